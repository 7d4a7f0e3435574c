"""SwiGLU of two tensors and of one packed tensor: forward, backward, and host time per call."""

import torch.nn.functional as F
from harness import (
    Candidate,
    Contest,
    Row,
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

INPLACE = " inplace"


def _eager(t):
    return F.silu(t["gate"]) * t["up"]


def _eager_packed(t):
    gate, up = t["gate_up"].chunk(2, -1)
    return F.silu(gate) * up


def _liger_kernel(t):
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(t["gate"], t["up"])


def _liger_kernel_packed(t, in_place):
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    return LigerFusedGateUpSiLUMulFunction.apply(t["gate_up"], in_place)


def _candidates(options):
    both = ("gate", "up")
    return [
        *ours(options, lambda t: liger.swiglu(t["gate"], t["up"])),
        *ours(options, lambda t: liger.swiglu(t["gate"], t["up"], inplace=True), INPLACE, both),
        liger_kernel(_liger_kernel, overwrites=both),
        Candidate("torch eager", _eager),
        *compiled(options, _eager),
    ]


def _packed_candidates(options):
    return [
        *ours(options, lambda t: liger.swiglu_packed(t["gate_up"])),
        *ours(options, lambda t: liger.swiglu_packed(t["gate_up"], inplace=True), INPLACE, ("gate_up",)),
        liger_kernel(lambda t: _liger_kernel_packed(t, False)),
        liger_kernel(lambda t: _liger_kernel_packed(t, True), INPLACE, ("gate_up",)),
        Candidate("torch eager", _eager_packed),
        *compiled(options, _eager_packed),
    ]


def _pair(options, rows, width):
    return lambda: {name: normal(options, rows, width) for name in ("gate", "up", "grad_y")}


def _packed(options, rows, width):
    return lambda: {"gate_up": normal(options, rows, 2 * width), "grad_y": normal(options, rows, width)}


def rows(options):
    tokens, width = options.pick((16384, 14336), (16384, 14336), (6, 24))
    forms = {
        "swiglu": (_pair, ("gate", "up"), _eager, _candidates(options), (Contest(),)),
        "swiglu_packed": (
            _packed,
            ("gate_up",),
            _eager_packed,
            _packed_candidates(options),
            (Contest(), Contest(f"liger-kernel{INPLACE}", "in place")),
        ),
    }
    for name, (inputs, leaves, eager, candidates, contests) in forms.items():
        forward, backward = (forward_work, ("y",), leaves), (backward_work, ("grad_y",), leaves)
        size = f"{tokens}x{width}"
        yield Row(
            "swiglu",
            f"{name} forward {size}",
            inputs(options, tokens, width),
            providers([c for c in candidates if not c.name.endswith(INPLACE)], *forward),
            float32_reference(eager, *forward),
            nbytes=3 * 2 * tokens * width,
        )
        yield Row(
            "swiglu",
            f"{name} backward {size}",
            inputs(options, tokens, width),
            providers(candidates, *backward),
            float32_reference(eager, *backward),
            nbytes=5 * 2 * tokens * width,
            contests=contests,
        )
    works = {
        "forward with grad": (forward_work, ("y",), ("gate", "up")),
        "forward and backward": (training_work, ("grad_y",), ("gate", "up")),
    }
    for name, work in works.items():
        yield Row(
            "swiglu",
            f"swiglu host time, {name}",
            _pair(options, 8, 256),
            providers(_candidates(options), *work),
            kind="host",
            rounds=7,
            burst=options.pick(200, 100, 3),
        )
