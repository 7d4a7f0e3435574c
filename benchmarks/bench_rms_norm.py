"""RMSNorm and residual addition with RMSNorm: forward, backward, and host time per call."""

import torch
import torch.nn.functional as F
from harness import (
    Candidate,
    Contest,
    Provider,
    Row,
    Work,
    backward_work,
    compiled,
    float32_reference,
    forward_work,
    liger_kernel,
    normal,
    ours,
    providers,
    training_work,
)

import liger

EPS = 1e-6
KEPT = " keeping dy"


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


def _liger_kernel_norm(t, in_place):
    from liger_kernel.ops import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(t["x"], t["weight"], EPS, 0.0, "llama", in_place)


def _liger_kernel_add(t):
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(t["x"], t["residual"], t["weight"], EPS, 0.0, "llama", False)


def _quack(t):
    from quack import rmsnorm

    return rmsnorm(t["x"], t["weight"], eps=EPS)


def _norm_candidates(options):
    return [
        *ours(options, lambda t: liger.rms_norm(t["x"], t["weight"], EPS)),
        liger_kernel(lambda t: _liger_kernel_norm(t, True), overwrites=("grad_y",)),
        liger_kernel(lambda t: _liger_kernel_norm(t, False), KEPT),
        Candidate("torch F.rms_norm", _torch),
        Candidate("torch eager", _eager),
        *compiled(options, _eager),
        Candidate("quack", _quack, needs=("quack",)),
    ]


def _add_candidates(options):
    return [
        *ours(options, lambda t: liger.fused_add_rms_norm(t["x"], t["residual"], t["weight"], EPS)),
        liger_kernel(_liger_kernel_add),
        Candidate("torch add + F.rms_norm", _torch_add),
        *compiled(options, _eager_add),
    ]


def _backward_op(inputs):
    """The backward op alone, without autograd around it."""
    x, weight, grad_y = inputs["x"], inputs["weight"], inputs["grad_y"]
    rstd = torch.ops.liger.rms_norm(x, weight, EPS)[1]

    def run():
        grads = torch.ops.liger.rms_norm_backward(grad_y, x, weight, rstd, 0.0, "llama", True, True)
        return dict(zip(("dx", "dweight"), grads, strict=True))

    return Work(run)


def _inputs(options, rows, hidden):
    return lambda: {
        "x": normal(options, rows, hidden),
        "residual": normal(options, rows, hidden),
        "weight": normal(options, hidden, std=0.2).add_(1),
        "grad_y": normal(options, rows, hidden),
        "grad_total": normal(options, rows, hidden),
    }


def _norm_rows(options, rows, hidden):
    forward, backward = (forward_work, ("y",), ("x", "weight")), (backward_work, ("grad_y",), ("x", "weight"))
    inputs, candidates, size = _inputs(options, rows, hidden), _norm_candidates(options), f"{rows}x{hidden}"
    alone = [
        Provider(f"{c.name} op alone", _backward_op, "ours", c.context)
        for c in candidates
        if c.group == "ours"
    ]
    yield Row(
        "rms_norm",
        f"rms_norm forward {size}",
        inputs,
        providers([c for c in candidates if not c.name.endswith(KEPT)], *forward),
        float32_reference(_eager, *forward),
        nbytes=2 * 2 * rows * hidden,
    )
    yield Row(
        "rms_norm",
        f"rms_norm backward {size}",
        inputs,
        [*providers(candidates, *backward), *alone],
        float32_reference(_eager, *backward),
        nbytes=3 * 2 * rows * hidden,
        # The op alone is not what a user calls: it is measured, but does not compete.
        contests=tuple(
            Contest(baseline, label, tuple(c.name for c in candidates if c.group == "ours"))
            for baseline, label in (("liger-kernel", "it overwrites dy"), (f"liger-kernel{KEPT}", "dy kept"))
        ),
    )


def _add_rows(options, rows, hidden):
    leaves = ("x", "residual", "weight")
    forward = (forward_work, ("y", "total"), leaves)
    backward = (backward_work, ("grad_y", "grad_total"), leaves)
    for direction, work in (("forward", forward), ("backward", backward)):
        yield Row(
            "rms_norm",
            f"fused_add_rms_norm {direction} {rows}x{hidden}",
            _inputs(options, rows, hidden),
            providers(_add_candidates(options), *work),
            float32_reference(_eager_add, *work),
            nbytes=4 * 2 * rows * hidden,
        )


def _host_rows(options):
    leaves = ("x", "weight")
    works = {
        "forward with grad": (forward_work, ("y",), leaves),
        "forward and backward": (training_work, ("grad_y",), leaves),
    }
    for name, work in works.items():
        yield Row(
            "rms_norm",
            f"rms_norm host time, {name}",
            _inputs(options, 8, 256),
            providers([c for c in _norm_candidates(options) if not c.name.endswith(KEPT)], *work),
            kind="host",
            rounds=7,
            burst=options.pick(200, 100, 3),
        )


def rows(options):
    sizes = options.pick(
        [(16384, 4096), (4096, 4096), (16384, 8192), (16384, 2048)], [(16384, 4096), (4096, 4096)], [(6, 32)]
    )
    for size in sizes:
        yield from _norm_rows(options, *size)
    yield from _add_rows(options, *sizes[0])
    yield from _host_rows(options)
