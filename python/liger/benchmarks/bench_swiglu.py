"""SwiGLU of two tensors and of one packed tensor: forward, backward, both, and host time per call."""

import torch.nn.functional as F

import liger

from .candidates import (
    LIGER_KERNEL_CUTE,
    Candidate,
    compiled,
    liger_kernel,
    liger_kernel_cute,
    ours,
    peer,
    providers,
    selected,
)
from .harness import SIZES, Contest, Row, float32_reference, normal, works

INPLACE = " inplace"
# In place is a matter of the backward: the forward is the same.
GRADIENT = ("backward", "forward and backward")


def _eager(t):
    return F.silu(t["gate"]) * t["up"]


def _eager_packed(t):
    gate, up = t["gate_up"].chunk(2, -1)
    return F.silu(gate) * up


def _liger_kernel(t, module="liger_kernel.ops"):
    return peer(module, "LigerSiLUMulFunction").apply(t["gate"], t["up"])


def _liger_kernel_packed(t, in_place):
    return peer("liger_kernel.ops", "LigerFusedGateUpSiLUMulFunction").apply(t["gate_up"], in_place)


def _candidates(options, small=False):
    both = ("gate", "up")
    return [
        *ours(options, lambda t: liger.swiglu(t["gate"], t["up"]), small=small),
        *ours(options, lambda t: liger.swiglu(t["gate"], t["up"], inplace=True), INPLACE, both, GRADIENT),
        liger_kernel(_liger_kernel, overwrites=both),
        liger_kernel_cute(lambda t: _liger_kernel(t, LIGER_KERNEL_CUTE), overwrites=both),
        Candidate("torch eager", _eager),
        *compiled(options, _eager),
    ]


def _packed_candidates(options):
    whole = ("gate_up",)
    return [
        *ours(options, lambda t: liger.swiglu_packed(t["gate_up"])),
        *ours(options, lambda t: liger.swiglu_packed(t["gate_up"], inplace=True), INPLACE, whole, GRADIENT),
        liger_kernel(lambda t: _liger_kernel_packed(t, False)),
        liger_kernel(lambda t: _liger_kernel_packed(t, True), INPLACE, whole, GRADIENT),
        Candidate("torch eager", _eager_packed),
        *compiled(options, _eager_packed),
    ]


def _pair(options, tokens, width):
    return lambda: {name: normal(options, tokens, width) for name in ("gate", "up", "grad_y")}


def _packed(options, tokens, width):
    return lambda: {"gate_up": normal(options, tokens, 2 * width), "grad_y": normal(options, tokens, width)}


WORKS = works(("y",), ("grad_y",), ("gate", "up"))
PACKED_WORKS = works(("y",), ("grad_y",), ("gate_up",))
# Tensors of the size of the result that are read or written.
TENSORS = {"forward": 3, "backward": 5, "forward and backward": 8}


def _rows(options, form, tokens, width):
    packed = form == "swiglu_packed"
    candidates = _packed_candidates(options) if packed else _candidates(options)
    inputs, eager = (_packed, _eager_packed) if packed else (_pair, _eager)
    for name, work in (PACKED_WORKS if packed else WORKS).items():
        contests = [Contest()]
        if packed and name != "forward":
            contests.append(Contest(f"liger-kernel{INPLACE}", "in place"))
        yield Row(
            "swiglu",
            f"{form} {name} {tokens}x{width}",
            inputs(options, tokens, width),
            providers(selected(options, candidates, name), *work),
            float32_reference(eager, *work),
            nbytes=TENSORS[name] * 2 * tokens * width,
            contests=tuple(contests),
            work=f"{form} {name}",
            shape={"tokens": tokens, "width": width},
        )


def _host_rows(options):
    for label, name in (("forward with grad", "forward"), ("forward and backward",) * 2):
        yield Row(
            "swiglu",
            f"swiglu host time, {label}",
            _pair(options, 8, 256),
            providers(selected(options, _candidates(options, small=True), name), *WORKS[name]),
            kind="host",
            rounds=7,
            burst=options.pick(200, 100, 3),
        )


def rows(options):
    if options.sweep:
        swept = options.swept(SIZES)
        for size in (*((swept[0], w) for w in swept), *((tokens, swept[0]) for tokens in swept[1:])):
            yield from _rows(options, "swiglu", *size)
        return
    size = options.pick((16384, 14336), (16384, 14336), (6, 24))
    for form in ("swiglu", "swiglu_packed"):
        yield from _rows(options, form, *size)
    yield from _host_rows(options)
