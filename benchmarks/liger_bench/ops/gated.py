# SPDX-License-Identifier: BSD-3-Clause
"""Gated products of two tensors and of one packed tensor: forward, backward, both, and host time per call."""

from collections.abc import Callable
from dataclasses import dataclass

from ..candidates import (
    LIGER_KERNEL_CUTE,
    Candidate,
    compiled,
    host_rows,
    liger_kernel,
    liger_kernel_cute,
    ours,
    peer,
    providers,
    selected,
)
from ..harness import FASTEST, SIZES, Contest, Row, float32_reference, normal, works

INPLACE = " inplace"
# inplace changes the backward only.
GRADIENT = ("backward", "forward and backward")


@dataclass(frozen=True)
class Family:
    """A gated product: its ops, the activation in torch, and its name in liger-kernel."""

    name: str
    activation: Callable
    separate: Callable
    packed: Callable
    liger_kernel: str
    liger_kernel_packed: str | None = None
    liger_kernel_cute: bool = False

    def eager(self, t):
        return self.activation(t["gate"]) * t["up"]

    def eager_packed(self, t):
        gate, up = t["gate_up"].chunk(2, -1)
        return self.activation(gate) * up

    def peer(self, t, module="liger_kernel.ops"):
        return peer(module, self.liger_kernel).apply(t["gate"], t["up"])

    def peer_packed(self, t, in_place):
        return peer("liger_kernel.ops", self.liger_kernel_packed).apply(t["gate_up"], in_place)


def _candidates(options, family, small=False):
    both = ("gate", "up")
    cute = liger_kernel_cute(lambda t: family.peer(t, LIGER_KERNEL_CUTE), overwrites=both)
    return [
        *ours(options, lambda t: family.separate(t["gate"], t["up"]), small=small),
        *ours(options, lambda t: family.separate(t["gate"], t["up"], inplace=True), INPLACE, both, GRADIENT),
        liger_kernel(family.peer, overwrites=both),
        *([cute] if family.liger_kernel_cute else []),
        Candidate("torch eager", family.eager),
        *compiled(options, family.eager),
    ]


def _packed_candidates(options, family):
    whole = ("gate_up",)
    peers = [
        liger_kernel(lambda t: family.peer_packed(t, False)),
        liger_kernel(lambda t: family.peer_packed(t, True), INPLACE, whole, GRADIENT),
    ]
    return [
        *ours(options, lambda t: family.packed(t["gate_up"])),
        *ours(options, lambda t: family.packed(t["gate_up"], inplace=True), INPLACE, whole, GRADIENT),
        *(peers if family.liger_kernel_packed else []),
        Candidate("torch eager", family.eager_packed),
        *compiled(options, family.eager_packed),
    ]


def _pair(options, tokens, width):
    return lambda: {name: normal(options, tokens, width) for name in ("gate", "up", "grad_y")}


def _packed(options, tokens, width):
    return lambda: {"gate_up": normal(options, tokens, 2 * width), "grad_y": normal(options, tokens, width)}


WORKS = works(("y",), ("grad_y",), ("gate", "up"))
PACKED_WORKS = works(("y",), ("grad_y",), ("gate_up",))
# Memory traffic in tensors of the size of the result.
TENSORS = {"forward": 3, "backward": 5, "forward and backward": 8}


def _rows(options, family, packed, tokens, width):
    form = f"{family.name}_packed" if packed else family.name
    candidates = (_packed_candidates if packed else _candidates)(options, family)
    inputs, eager = (_packed, family.eager_packed) if packed else (_pair, family.eager)
    for name, work in (PACKED_WORKS if packed else WORKS).items():
        contests = [Contest() if not packed or family.liger_kernel_packed else FASTEST]
        if packed and family.liger_kernel_packed and name != "forward":
            contests.append(Contest(f"liger-kernel{INPLACE}", "in place"))
        yield Row(
            family.name,
            f"{form} {name} {tokens}x{width}",
            inputs(options, tokens, width),
            providers(selected(options, candidates, name), *work),
            float32_reference(eager, *work),
            nbytes=TENSORS[name] * 2 * tokens * width,
            contests=tuple(contests),
            work=f"{form} {name}",
            shape={"tokens": tokens, "width": width},
        )


def family_rows(options, family):
    """The rows of one family."""
    if options.sweep:
        swept = options.swept(SIZES)
        for size in (*((swept[0], w) for w in swept), *((tokens, swept[0]) for tokens in swept[1:])):
            yield from _rows(options, family, False, *size)
        return
    size = options.pick((16384, 14336), (16384, 14336), (6, 24))
    for packed in (False, True):
        yield from _rows(options, family, packed, *size)
    candidates = _candidates(options, family, small=True)
    yield from host_rows(options, family.name, _pair(options, 8, 256), candidates, WORKS)
