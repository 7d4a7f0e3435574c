# SPDX-License-Identifier: BSD-3-Clause
"""LayerNorm and GroupNorm: forward, backward, both, and host time per call."""

import torch
import torch.nn.functional as F

import liger

from ..candidates import Candidate, compiled, host_rows, liger_kernel, ours, peer, providers, selected
from ..harness import SIZES, Contest, Row, float32_reference, normal, works
from ..reports.goals import COPY, Goal

GOALS = (
    Goal("layer_norm forward 16384x4096", COPY, 0.95),
    Goal("layer_norm backward 16384x4096", COPY, 0.90),
)

EPS = 1e-5
WORKS = works(("y",), ("grad_y",), ("x", "weight", "bias"))
# Memory traffic in tensors of the size of x.
TENSORS = {"forward": 2, "backward": 3, "forward and backward": 5}
GROUPS = 32


def _eager(t):
    x = t["x"].float()
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return (y * t["weight"] + t["bias"]).to(t["x"].dtype)


def _torch(t):
    return F.layer_norm(t["x"], t["weight"].shape, t["weight"], t["bias"], EPS)


def _liger_kernel(t):
    return peer("liger_kernel.ops", "LigerLayerNormFunction").apply(t["x"], t["weight"], t["bias"], EPS)


def _candidates(options, small):
    return [
        *ours(options, lambda t: liger.layer_norm(t["x"], t["weight"], t["bias"], EPS), small=small),
        liger_kernel(_liger_kernel),
        Candidate("torch F.layer_norm", _torch),
        *compiled(options, _eager),
    ]


def _torch_groups(t):
    return F.group_norm(t["x"], GROUPS, t["weight"], t["bias"], EPS)


def _liger_kernel_groups(t):
    function = peer("liger_kernel.ops", "LigerGroupNormFunction")
    return function.apply(t["x"], t["weight"], t["bias"], t["x"].shape[1], GROUPS, EPS)


def _group_candidates(options):
    return [
        *ours(options, lambda t: liger.group_norm(t["x"], GROUPS, t["weight"], t["bias"], EPS)),
        liger_kernel(_liger_kernel_groups),
        Candidate("torch F.group_norm", _torch_groups),
        *compiled(options, _torch_groups),
    ]


def _inputs(options, shape, parameters):
    return lambda: {
        "x": normal(options, *shape),
        "weight": normal(options, parameters, std=0.2).add_(1),
        "bias": normal(options, parameters),
        "grad_y": normal(options, *shape),
    }


def _rows(options, name, candidates, reference, shape, parameters):
    size = "x".join(map(str, shape))
    for label, work in WORKS.items():
        yield Row(
            "layer_norm",
            f"{name} {label} {size}",
            _inputs(options, shape, parameters),
            providers(selected(options, candidates, label), *work),
            float32_reference(reference, *work),
            nbytes=TENSORS[label] * 2 * torch.Size(shape).numel(),
            contests=(Contest(),),
            work=f"{name} {label}",
            shape={"tokens": shape[0], "hidden size": shape[-1]},
        )


def rows(options):
    if options.sweep:
        swept = options.swept(SIZES)
        sizes = [*((swept[0], hidden) for hidden in swept), *((tokens, swept[0]) for tokens in swept[1:])]
    else:
        sizes = options.pick(
            [(16384, 4096), (4096, 4096), (16384, 8192), (16384, 2048)], [(16384, 4096)], [(6, 32)]
        )
    for tokens, hidden in sizes:
        candidates = _candidates(options, tokens * hidden <= 4096 * 4096)
        yield from _rows(options, "layer_norm", candidates, _eager, (tokens, hidden), hidden)
    if options.sweep:
        return
    for shape in options.pick([(32, 320, 64, 64), (8, 128, 256, 256)], [(32, 320, 64, 64)], [(2, 64, 3, 3)]):
        yield from _rows(options, "group_norm", _group_candidates(options), _torch_groups, shape, shape[1])
    yield from host_rows(
        options, "layer_norm", _inputs(options, (8, 256), 256), _candidates(options, True), WORKS
    )
