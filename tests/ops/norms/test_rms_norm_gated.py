# SPDX-License-Identifier: BSD-3-Clause
"""rms_norm_gated against float64, in every backend that runs here."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, check_op, of_cuda

import liger
from liger._core.runtime.environment import triton_interpreted

MODES = ["llama", "gemma", "none"]
# (shape, group_size). Rows within a warp; odd sizes, without 16-byte vectors; groups of one warp, of odd
# size, and more groups than SMs; rows of one block, 2 to 8 vectors a thread; longer ones. More rows than SMs:
# of 288 16-byte vectors the backward gives a thread 2, of 352 it gives it 4.
SHAPES = [
    ((5, 64), None),
    ((2, 3, 129), None),
    ((1, 3), None),
    ((300, 128), None),
    ((2, 1000), 8),
    ((7, 1000), 125),
    ((3, 40 if triton_interpreted() else 600), 2),
    ((9, 4, 256), 64),
    ((3, 4100), None),
    ((3, 8200), 4100),
    ((2, 17000), None),
    ((2, 2, 2, 40), 20),
    *of_cuda(((1, 33000), None), ((300, 2304), None), ((300, 2816), None), ((40, 5632), 2816)),
]
FORMS = [(True, "silu"), (False, "silu"), (True, "sigmoid"), (False, "sigmoid")]


def reference(x, gate, weight, eps, offset, mode, group_size, norm_before_gate, activation):
    """The definition, with casts as in transformers: "llama" as in Qwen3-Next and Mamba2, "gemma" as in
    Falcon-H1."""
    wide = x.float() if mode != "none" and x.dtype != torch.float64 else x
    a = {"silu": F.silu, "sigmoid": torch.sigmoid}[activation](gate.to(wide.dtype))
    h = wide if norm_before_gate else wide * a
    rows = h.unflatten(-1, (-1, group_size or h.shape[-1]))
    y = (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    if mode == "llama":
        y = y.to(x.dtype)
    if weight is not None:
        y = y * (weight + offset if mode != "gemma" else weight.to(wide.dtype) + offset)
    if norm_before_gate:
        y = y * a
    return y.to(x.dtype)


def both(*options):
    """(the op, the reference) with these options, as functions of x, gate and weight."""
    return (
        lambda x, g, w: liger.rms_norm_gated(x, g, w, *options),
        lambda x, g, w: reference(x, g, w, *options),
    )


def random(device, dtype, *shape):
    return torch.randn(shape, device=device, dtype=dtype)


@pytest.mark.covering(2)
@pytest.mark.parametrize("norm_before_gate", [True, False], ids=["norm first", "gate first"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "group_size"), SHAPES, ids=str)
def test_rms_norm_gated(device, shape, group_size, dtype, mode, norm_before_gate):
    x, gate, weight = (
        random(device, dtype, *shape),
        random(device, dtype, *shape),
        random(device, dtype, shape[-1]),
    )
    offset = 1.0 if mode == "gemma" else 0.0
    ours, plain = both(1e-5, offset, mode, group_size, norm_before_gate, "silu")
    check_op(ours, plain, [x, gate, weight])


@pytest.mark.covering(1)
@pytest.mark.parametrize(("norm_before_gate", "activation"), FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows(device, dtype, norm_before_gate, activation):
    """More rows than the persistent blocks of the backward ask for the rstd of at a time."""
    rows = 2000 if triton_interpreted() else 70000
    x, gate, weight = (random(device, dtype, *s) for s in ((rows, 24), (rows, 24), (24,)))
    ours, plain = both(1e-5, 0.0, "llama", 8, norm_before_gate, activation)
    check_op(ours, plain, [x, gate, weight])


@pytest.mark.parametrize(("norm_before_gate", "activation"), FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_weight(device, dtype, norm_before_gate, activation):
    options = 1e-6, 0.0, "llama", None, norm_before_gate, activation
    check_op(
        lambda x, g: liger.rms_norm_gated(x, g, None, *options),
        lambda x, g: reference(x, g, None, *options),
        [random(device, dtype, 6, 200), random(device, dtype, 6, 200)],
    )


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_float32_weight_with_low_precision_input(device, dtype, norm_before_gate):
    ours, plain = both(1e-6, 0.0, "llama", 32, norm_before_gate, "silu")
    inputs = [random(device, dtype, 9, 96), random(device, dtype, 9, 96), random(device, torch.float32, 96)]
    check_op(ours, plain, inputs)
    inputs[2].requires_grad_()
    (grad,) = torch.autograd.grad(ours(*inputs).float().sum(), inputs[2])
    assert grad.dtype == torch.float32


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_rounds_where_transformers_does(device, dtype, norm_before_gate):
    """Every element of a short row, bit for bit: the mean of four elements has the same rounding in any
    order."""
    x, gate = (random(device, dtype, 4000, 4) for _ in range(2))
    x = x.sign() * 2.0 ** x.float().abs().round().to(dtype)
    weight = random(device, dtype, 4)
    ours, plain = both(1e-5, 0.0, "llama", None, norm_before_gate, "silu")
    same = (ours(x, gate, weight) == plain(x, gate, weight)).float().mean()
    # A SiLU or a root that differs in its last bit moves a few results over a rounding boundary.
    assert same > 0.99


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_gates_far_from_zero(device, norm_before_gate):
    """Saturated gates: value and gradient are as at the limits, and finite."""
    # One large gate among small ones would make the gradient a difference of nearly equal numbers.
    gate = torch.tensor(
        [[-1e4, -200.0, -90.0, -30.0, 0.0, 1.0, 2.0, 3.0], [1e4] * 8, [90.0] * 8], device=device
    )
    x, weight = random(device, torch.float32, 3, 8), random(device, torch.float32, 8)
    ours, plain = both(1e-6, 0.0, "llama", None, norm_before_gate, "silu")
    check_op(ours, plain, [x, gate, weight])


def test_saves_no_intermediate(device):
    """Of the forward only x, gate, weight and rstd are kept."""
    kept = []
    x, gate = (torch.randn(7, 32, device=device, requires_grad=True) for _ in range(2))
    weight = torch.randn(32, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        liger.rms_norm_gated(x, gate, weight, group_size=8)
    assert sorted(t.numel() for t in kept) == [28, 32, 224, 224]


def test_groups_that_do_not_divide_a_row(device):
    x = torch.randn(4, 8, device=device)
    with pytest.raises(
        ValueError, match="rms_norm_gated: group_size is 3, expected a divisor of the last dim"
    ):
        liger.rms_norm_gated(x, x, group_size=3)
