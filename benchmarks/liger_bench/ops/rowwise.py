# SPDX-License-Identifier: BSD-3-Clause
"""Ops of one tensor and a gradient of the same shape: forward, backward, both."""

from collections.abc import Callable
from dataclasses import dataclass

from ..candidates import Candidate, compiled, host_rows, liger_kernel, ours, peer, providers, selected
from ..harness import SIZES, Contest, Row, float32_reference, normal, works

WORKS = works(("y",), ("grad_y",), ("x",))
# Memory traffic in tensors of the size of the result.
TENSORS = {"forward": 2, "backward": 3, "forward and backward": 5}


@dataclass(frozen=True)
class Rowwise:
    """An op: the functions of liger and torch, and its name in liger-kernel."""

    name: str
    function: Callable
    eager: Callable
    liger_kernel: str

    def candidates(self, options):
        def eager(t):
            return self.eager(t["x"])

        return [
            *ours(options, lambda t: self.function(t["x"])),
            liger_kernel(lambda t: peer("liger_kernel.ops", self.liger_kernel).apply(t["x"])),
            Candidate("torch eager", eager),
            *compiled(options, eager),
        ]

    @staticmethod
    def inputs(options, tokens, width):
        return lambda: {"x": normal(options, tokens, width), "grad_y": normal(options, tokens, width)}

    def rows_of(self, options, tokens, width):
        for name, work in WORKS.items():
            yield Row(
                self.name,
                f"{self.name} {name} {tokens}x{width}",
                self.inputs(options, tokens, width),
                providers(selected(options, self.candidates(options), name), *work),
                float32_reference(lambda t: self.eager(t["x"]), *work),
                nbytes=TENSORS[name] * 2 * tokens * width,
                contests=(Contest(),),
                work=f"{self.name} {name}",
                shape={"tokens": tokens, "width": width},
            )

    def rows(self, options, sizes):
        if options.sweep:
            swept = options.swept(SIZES)
            sizes = [*((swept[0], width) for width in swept), *((tokens, swept[0]) for tokens in swept[1:])]
        else:
            sizes = options.pick(sizes, sizes, [(6, 24)])
        for size in sizes:
            yield from self.rows_of(options, *size)
        if not options.sweep:
            yield from host_rows(
                options, self.name, self.inputs(options, 8, 256), self.candidates(options), WORKS
            )
