# SPDX-License-Identifier: BSD-3-Clause
"""Rotary embedding of queries and keys that are transposed views, as Hugging Face models make them."""

import torch

import liger

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
from ..harness import SIZES, Contest, Row, float32_reference, normal, works
from ..reports.goals import COPY, Goal

GOALS = (
    Goal("rope forward q(4,32,4096,128) k(4,8,4096,128)", COPY, 0.95),
    Goal("rope backward q(4,32,4096,128) k(4,8,4096,128)", COPY, 0.95),
)

COPIES = " on copies"


def _rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def eager(t):
    cos, sin = t["cos"].unsqueeze(1), t["sin"].unsqueeze(1)
    return t["q"] * cos + _rotate_half(t["q"]) * sin, t["k"] * cos + _rotate_half(t["k"]) * sin


def _inplace(t):
    return liger.rope(t["q"], t["k"], t["cos"], t["sin"], inplace=True)


def _liger_kernel(t, module="liger_kernel.ops"):
    return peer(module, "LigerRopeFunction").apply(t["q"], t["k"], t["cos"], t["sin"])


def _liger_kernel_on_copies(t):
    return _liger_kernel({**t, "q": t["q"].clone(), "k": t["k"].clone()})


def _candidates(options):
    # liger-kernel always overwrites the gradients.
    gradients = ("grad_q", "grad_k")
    everything = ("q", "k", *gradients)
    return [
        *ours(options, lambda t: liger.rope(t["q"], t["k"], t["cos"], t["sin"])),
        *ours(options, _inplace, " inplace", overwrites=("q", "k")),
        liger_kernel(_liger_kernel, overwrites=everything),
        liger_kernel(_liger_kernel_on_copies, COPIES, gradients, ("forward", "forward and backward")),
        liger_kernel_cute(lambda t: _liger_kernel(t, LIGER_KERNEL_CUTE), overwrites=everything),
        Candidate("torch eager", eager),
        *compiled(options, eager),
    ]


def inputs(options, batch, q_heads, k_heads, tokens, dim):
    def make():
        heads = {"q": q_heads, "k": k_heads, "grad_q": q_heads, "grad_k": k_heads}
        tensors = {name: normal(options, batch, tokens, n, dim).transpose(1, 2) for name, n in heads.items()}
        inverse = 500000.0 ** (-torch.arange(0, dim, 2, device=options.device) / dim)
        angles = torch.arange(tokens, device=options.device)[:, None] * inverse
        angles = torch.cat((angles, angles), -1)[None]
        return {**tensors, "cos": angles.cos().to(options.dtype), "sin": angles.sin().to(options.dtype)}

    return make


WORKS = works(("q_out", "k_out"), ("grad_q", "grad_k"), ("q", "k"))
# Memory traffic in tensors of the size of q and k together.
TENSORS = {"forward": 2, "backward": 2, "forward and backward": 4}


def _rows(options, batch, q_heads, k_heads, tokens, dim):
    candidates = _candidates(options)
    for name, work in WORKS.items():
        contests = [Contest(label="it overwrites its inputs")]
        if name != "backward":
            contests.append(Contest(f"liger-kernel{COPIES}", "inputs kept"))
        yield Row(
            "rope",
            f"rope {name} q({batch},{q_heads},{tokens},{dim}) k({batch},{k_heads},{tokens},{dim})",
            inputs(options, batch, q_heads, k_heads, tokens, dim),
            providers(selected(options, candidates, name), *work),
            float32_reference(eager, *work),
            nbytes=TENSORS[name] * 2 * batch * (q_heads + k_heads) * tokens * dim,
            contests=tuple(contests),
            work=f"rope {name}",
            shape={"tokens": batch * tokens, "hidden size": q_heads * dim},
        )


def rows(options):
    if options.sweep:
        swept, dim = options.swept(SIZES), options.pick(128, 128, 4)
        sizes = [*((hidden, swept[0]) for hidden in swept), *((swept[0], tokens) for tokens in swept[1:])]
        for hidden, tokens in sizes:
            yield from _rows(options, 1, hidden // dim, options.pick(8, 8, 2), tokens, dim)
        return
    size = (4, 32, 8, 4096, 128)
    yield from _rows(options, *options.pick(size, size, (2, 4, 2, 5, 8)))
    yield from host_rows(options, "rope", inputs(options, 1, 4, 2, 8, 64), _candidates(options), WORKS)
