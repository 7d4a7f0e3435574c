"""Squared ReLU: forward, backward, both."""

import torch.nn.functional as F

import liger

from .candidates import Candidate, compiled, liger_kernel, ours, peer, providers, selected
from .harness import SIZES, Contest, Row, float32_reference, normal, works


def _eager(t):
    return F.relu(t["x"]).square()


def _candidates(options):
    return [
        *ours(options, lambda t: liger.relu_squared(t["x"])),
        liger_kernel(lambda t: peer("liger_kernel.ops", "LigerReLUSquaredFunction").apply(t["x"])),
        Candidate("torch eager", _eager),
        *compiled(options, _eager),
    ]


WORKS = works(("y",), ("grad_y",), ("x",))
# Tensors of the size of the result that are read or written.
TENSORS = {"forward": 2, "backward": 3, "forward and backward": 5}


def _rows(options, tokens, width):
    for name, work in WORKS.items():
        yield Row(
            "relu_squared",
            f"relu_squared {name} {tokens}x{width}",
            lambda: {"x": normal(options, tokens, width), "grad_y": normal(options, tokens, width)},
            providers(selected(options, _candidates(options), name), *work),
            float32_reference(_eager, *work),
            nbytes=TENSORS[name] * 2 * tokens * width,
            contests=(Contest(),),
            work=f"relu_squared {name}",
            shape={"tokens": tokens, "width": width},
        )


def rows(options):
    if options.sweep:
        swept = options.swept(SIZES)
        sizes = [*((swept[0], w) for w in swept), *((tokens, swept[0]) for tokens in swept[1:])]
    else:
        sizes = [options.pick((16384, 14336), (16384, 14336), (6, 24))]
    for size in sizes:
        yield from _rows(options, *size)
