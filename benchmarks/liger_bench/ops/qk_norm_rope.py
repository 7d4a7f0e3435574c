# SPDX-License-Identifier: BSD-3-Clause
"""RMSNorm of the heads of queries and keys, then the rotary embedding: one op vs. two, and vs. eager
code."""

import torch

import liger

from ..candidates import Candidate, compiled, ours, providers, selected
from ..harness import FASTEST, Row, float32_reference, normal, works
from ..reports.goals import COPY, Goal
from .rope import eager as eager_rope
from .rope import inputs as rope_inputs

GOALS = (
    Goal("qk_norm_rope forward q(4,32,4096,128) k(4,8,4096,128)", COPY, 0.90),
    Goal("qk_norm_rope backward q(4,32,4096,128) k(4,8,4096,128)", COPY, 0.90),
)

EPS = 1e-6
WORKS = works(("q_out", "k_out"), ("grad_q", "grad_k"), ("q", "k", "q_weight", "k_weight"))
# Memory traffic in tensors of the size of q and k together.
TENSORS = {"forward": 2, "backward": 3, "forward and backward": 5}


def _norm(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _eager(t):
    return eager_rope({**t, "q": _norm(t["q"], t["q_weight"]), "k": _norm(t["k"], t["k_weight"])})


def _two_ops(t):
    normed = (liger.rms_norm(t[x], t[f"{x}_weight"], EPS) for x in "qk")
    return liger.rope(*normed, t["cos"], t["sin"])


def _one_op(t):
    return liger.qk_norm_rope(t["q"], t["k"], t["q_weight"], t["k_weight"], t["cos"], t["sin"], EPS)


def _inputs(options, *size):
    make, dim = rope_inputs(options, *size), size[-1]
    return lambda: {**make(), **{f"{x}_weight": normal(options, dim, std=0.2).add_(1) for x in "qk"}}


def _rows(options, batch, q_heads, k_heads, tokens, dim):
    candidates = [
        *ours(options, _one_op),
        *ours(options, _two_ops, " rms_norm and rope"),
        Candidate("torch eager", _eager),
        *compiled(options, _eager),
    ]
    for name, work in WORKS.items():
        yield Row(
            "qk_norm_rope",
            f"qk_norm_rope {name} q({batch},{q_heads},{tokens},{dim}) k({batch},{k_heads},{tokens},{dim})",
            _inputs(options, batch, q_heads, k_heads, tokens, dim),
            providers(selected(options, candidates, name), *work),
            float32_reference(_eager, *work),
            nbytes=TENSORS[name] * 2 * batch * (q_heads + k_heads) * tokens * dim,
            contests=(FASTEST,),
            work=f"qk_norm_rope {name}",
            shape={"tokens": batch * tokens, "hidden size": q_heads * dim},
        )


def rows(options):
    # Heads as in Qwen3 8B, and as in Gemma 3 12B.
    sizes = [(4, 32, 8, 4096, 128), (4, 16, 8, 4096, 256)]
    if options.sweep:
        sizes = [(1, 32, 8, tokens, 128) for tokens in (2048, 4096, 8192, 32768)]
    for size in options.pick(sizes, sizes[:1], [(2, 4, 2, 5, 8)]):
        yield from _rows(options, *size)
