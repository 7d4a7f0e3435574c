# SPDX-License-Identifier: BSD-3-Clause
"""RMSNorm with a gate: before it as in Qwen3-Next, after it and in groups as in Mamba2. Forward, backward,
both."""

import torch
import torch.nn.functional as F

import liger

from ..candidates import Candidate, compiled, ours, providers, selected
from ..harness import FASTEST, Row, float32_reference, normal, works
from ..reports.goals import COPY, Goal

GOALS = (
    Goal("rms_norm_gated forward 524288x128", COPY, 0.90),
    Goal("rms_norm_gated backward 524288x128", COPY, 0.85),
    Goal("rms_norm_gated forward 16384x4096", COPY, 0.95),
    Goal("rms_norm_gated backward 16384x4096", COPY, 0.90),
    Goal("rms_norm_gated forward 16384x4096 gate first, groups of 4096", COPY, 0.95),
    Goal("rms_norm_gated backward 16384x4096 gate first, groups of 4096", COPY, 0.90),
)

EPS = 1e-6
WORKS = works(("y",), ("grad_y",), ("x", "gate", "weight"))
# Memory traffic in tensors of the size of x.
TENSORS = {"forward": 3, "backward": 5, "forward and backward": 8}


def _norm(x, group_size):
    rows = x.unflatten(-1, (-1, group_size))
    return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS)).flatten(-2)


def _eager_gate_last(t):
    normalised = _norm(t["x"].float(), t["x"].shape[-1]).to(t["x"].dtype)
    return (t["weight"] * normalised * F.silu(t["gate"].float())).to(t["x"].dtype)


def _eager_gate_first(group_size):
    def eager(t):
        return t["weight"] * _norm(t["x"].float() * F.silu(t["gate"].float()), group_size).to(t["x"].dtype)

    return eager


def _inputs(options, tokens, hidden):
    return lambda: {
        "x": normal(options, tokens, hidden),
        "gate": normal(options, tokens, hidden),
        "weight": normal(options, hidden, std=0.2).add_(1),
        "grad_y": normal(options, tokens, hidden),
    }


def _rows(options, tokens, hidden, group_size):
    """group_size: of the norm after the gate; None for the norm before it."""
    gate_last = group_size is None
    eager = _eager_gate_last if gate_last else _eager_gate_first(group_size)
    fixed = {"group_size": group_size, "norm_before_gate": gate_last}
    candidates = [
        *ours(options, lambda t: liger.rms_norm_gated(t["x"], t["gate"], t["weight"], EPS, **fixed)),
        Candidate("torch eager", eager),
        *compiled(options, eager),
    ]
    form = "" if gate_last else f" gate first, groups of {group_size}"
    for name, work in WORKS.items():
        yield Row(
            "rms_norm_gated",
            f"rms_norm_gated {name} {tokens}x{hidden}{form}",
            _inputs(options, tokens, hidden),
            providers(selected(options, candidates, name), *work),
            float32_reference(eager, *work),
            nbytes=TENSORS[name] * 2 * tokens * hidden,
            contests=(FASTEST,),
            work=f"rms_norm_gated {name}",
            shape={"tokens": tokens, "hidden size": hidden},
        )


def rows(options):
    # 32 heads of 16384 tokens; whole rows; Mamba2 with one group and with eight.
    sizes = [(524288, 128, None), (16384, 4096, None), (16384, 4096, 4096), (16384, 8192, 1024)]
    if options.sweep:
        sizes = [(tokens, 128, None) for tokens in (131072, 262144, 524288, 1048576)]
    for size in options.pick(sizes, sizes[:3], [(6, 32, None), (6, 32, 8)]):
        yield from _rows(options, *size)
