# SPDX-License-Identifier: BSD-3-Clause
"""RMSNorm and residual addition with RMSNorm: forward, backward, both, and host time per call."""

import torch
import torch.nn.functional as F

import liger

from ..candidates import (
    LIGER_KERNEL_CUTE,
    Candidate,
    compiled,
    liger_kernel,
    liger_kernel_cute,
    ours,
    peer,
    providers,
    quack,
    selected,
)
from ..harness import SIZES, Contest, Provider, Row, Work, float32_reference, normal, works
from ..reports.goals import COPY, Goal

GOALS = (
    Goal("rms_norm forward 16384x4096", COPY, 0.95),
    Goal("rms_norm forward 4096x4096", "TB/s", 3.3),
    Goal("rms_norm backward 16384x4096", COPY, 0.90),
    Goal("rms_norm backward 16384x8192", COPY, 0.90),
    Goal("rms_norm backward 16384x2048", COPY, 0.90),
    Goal("rms_norm backward 4096x4096", "TB/s", 2.5),
    Goal("rms_norm host time, forward with grad", "us", 25),
    Goal("rms_norm host time, forward and backward", "us", 120),
)

EPS = 1e-6
KEPT = " keeping dy"
# Largest size at which plain torch is measured as well.
SMALL = 4096 * 4096


def _eager(t):
    x = t["x"]
    wide = x.float()
    return t["weight"] * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _eager_add(t):
    total = t["x"] + t["residual"]
    return _eager({"x": total, "weight": t["weight"]}), total


def _torch(t):
    return F.rms_norm(t["x"], t["weight"].shape, t["weight"], EPS)


def _torch_add(t):
    total = t["x"] + t["residual"]
    return _torch({"x": total, "weight": t["weight"]}), total


def _liger_kernel(t, in_place, module="liger_kernel.ops"):
    function = peer(module, "LigerRMSNormFunction")
    return function.apply(t["x"], t["weight"], EPS, 0.0, "llama", in_place)


def _liger_kernel_add(t):
    function = peer("liger_kernel.ops", "LigerFusedAddRMSNormFunction")
    return function.apply(t["x"], t["residual"], t["weight"], EPS, 0.0, "llama", False)


def _quack(t):
    return peer("quack", "rmsnorm")(t["x"], t["weight"], eps=EPS)


def _quack_add(t):
    return peer("quack", "rmsnorm")(t["x"], t["weight"], residual=t["residual"], eps=EPS, prenorm=True)


def _norm_candidates(options, small):
    with_gradient = ("backward", "forward and backward")
    return [
        *ours(options, lambda t: liger.rms_norm(t["x"], t["weight"], EPS), small=small),
        liger_kernel(lambda t: _liger_kernel(t, True), overwrites=("grad_y",)),
        liger_kernel(lambda t: _liger_kernel(t, False), KEPT, works=with_gradient),
        liger_kernel_cute(lambda t: _liger_kernel(t, False, LIGER_KERNEL_CUTE)),
        quack(_quack),
        Candidate("torch F.rms_norm", _torch),
        Candidate("torch eager", _eager),
        *compiled(options, _eager),
    ]


def _add_candidates(options):
    return [
        *ours(options, lambda t: liger.fused_add_rms_norm(t["x"], t["residual"], t["weight"], EPS)),
        liger_kernel(_liger_kernel_add),
        quack(_quack_add),
        Candidate("torch add + F.rms_norm", _torch_add),
        *compiled(options, _eager_add),
    ]


def _forward_op(inputs):
    """The forward op without autograd."""
    return Work(lambda: {"y": torch.ops.liger.rms_norm(inputs["x"], inputs["weight"], EPS)[0]})


def _backward_op(inputs):
    """The backward op without autograd."""
    x, weight, grad_y = inputs["x"], inputs["weight"], inputs["grad_y"]
    rstd = torch.ops.liger.rms_norm(x, weight, EPS)[1]

    def run():
        grads = torch.ops.liger.rms_norm_backward(grad_y, x, weight, rstd, 0.0, "llama", True, True)
        return dict(zip(("dx", "dweight"), grads, strict=True))

    return Work(run)


def _both_ops(inputs):
    """The forward op and the backward op without autograd; the difference to the public function is
    autograd's time."""
    x, weight, grad_y = inputs["x"], inputs["weight"], inputs["grad_y"]

    def run():
        y, rstd = torch.ops.liger.rms_norm(x, weight, EPS)
        grads = torch.ops.liger.rms_norm_backward(grad_y, x, weight, rstd, 0.0, "llama", True, True)
        return {"y": y, "dx": grads[0], "dweight": grads[1]}

    return Work(run)


def _inputs(options, tokens, hidden):
    return lambda: {
        "x": normal(options, tokens, hidden),
        "residual": normal(options, tokens, hidden),
        "weight": normal(options, hidden, std=0.2).add_(1),
        "grad_y": normal(options, tokens, hidden),
        "grad_total": normal(options, tokens, hidden),
    }


NORM_WORKS = works(("y",), ("grad_y",), ("x", "weight"))
ADD_WORKS = works(("y", "total"), ("grad_y", "grad_total"), ("x", "residual", "weight"))
# Memory traffic in tensors of the size of x.
NORM_TENSORS = {"forward": 2, "backward": 3, "forward and backward": 5}
ADD_TENSORS = {"forward": 4, "backward": 4, "forward and backward": 8}


def _norm_rows(options, tokens, hidden):
    candidates = _norm_candidates(options, tokens * hidden <= SMALL)
    for name, work in NORM_WORKS.items():
        chosen = selected(options, candidates, name)
        made, contests = providers(chosen, *work), [Contest()]
        if name != "forward":
            contests = [Contest(label="it overwrites dy"), Contest(f"liger-kernel{KEPT}", "dy kept")]
        if name == "backward":
            mine = [c for c in chosen if c.group == "ours"]
            made += [Provider(f"{c.name} op alone", _backward_op, "op alone", c.context) for c in mine]
        yield Row(
            "rms_norm",
            f"rms_norm {name} {tokens}x{hidden}",
            _inputs(options, tokens, hidden),
            made,
            float32_reference(_eager, *work),
            nbytes=NORM_TENSORS[name] * 2 * tokens * hidden,
            contests=tuple(contests),
            work=f"rms_norm {name}",
            shape={"tokens": tokens, "hidden size": hidden},
        )


def _add_rows(options, tokens, hidden):
    for name, work in ADD_WORKS.items():
        yield Row(
            "rms_norm",
            f"fused_add_rms_norm {name} {tokens}x{hidden}",
            _inputs(options, tokens, hidden),
            providers(selected(options, _add_candidates(options), name), *work),
            float32_reference(_eager_add, *work),
            nbytes=ADD_TENSORS[name] * 2 * tokens * hidden,
            work=f"fused_add_rms_norm {name}",
            shape={"tokens": tokens, "hidden size": hidden},
        )


def _host_rows(options):
    timed = (
        ("forward with grad", "forward", _forward_op),
        ("forward and backward", "forward and backward", _both_ops),
    )
    for label, name, alone in timed:
        chosen = selected(options, _norm_candidates(options, True), "forward")
        made = providers(chosen, *NORM_WORKS[name])
        made += [
            Provider(f"{c.name} ops alone", alone, "op alone", c.context) for c in chosen if c.group == "ours"
        ]
        yield Row(
            "rms_norm",
            f"rms_norm host time, {label}",
            _inputs(options, 8, 256),
            made,
            kind="host",
            rounds=7,
            burst=options.pick(200, 100, 3),
        )


def rows(options):
    if options.sweep:
        swept = options.swept(SIZES)
        sizes = [*((swept[0], hidden) for hidden in swept), *((tokens, swept[0]) for tokens in swept[1:])]
        for size in sizes:
            yield from _norm_rows(options, *size)
        return
    sizes = options.pick(
        [(16384, 4096), (4096, 4096), (16384, 8192), (16384, 2048)], [(16384, 4096), (4096, 4096)], [(6, 32)]
    )
    for size in sizes:
        yield from _norm_rows(options, *size)
    yield from _add_rows(options, *sizes[0])
    yield from _host_rows(options)
