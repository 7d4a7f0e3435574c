# SPDX-License-Identifier: BSD-3-Clause
"""rms_norm and fused_add_rms_norm against float64, in every backend that runs here."""

import pytest
import torch
from cases import DTYPES, MANY_ROWS, check_op, of_cuda

import liger

MODES = ["llama", "gemma", "none"]
# Rows within a warp; odd sizes, without 16-byte vectors; rows of one block, 2 to 8 vectors a thread; longer
# ones. More rows than SMs: of 288 16-byte vectors the backward gives a thread 2, of 352 it gives it 4.
SHAPES = [
    (5, 64),
    (2, 3, 129),
    (1, 3),
    (7, 1000),
    (3, 4100),
    (2, 8200),
    (1, 17000),
    (300, 256),
    (2, 2, 2, 40),
    *of_cuda((1, 33000), (300, 2304), (300, 2816)),
]


def reference(x, weight, eps, offset, mode):
    """The definition in the dtype of its arguments, as eager code would write it."""
    wide = x.float() if mode != "none" and x.dtype != torch.float64 else x
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if mode == "llama":
        y = y.to(x.dtype)
    if weight is not None:
        y = y * (weight.to(y.dtype) + offset)
    return y.to(x.dtype)


@pytest.mark.covering(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(device, shape, dtype, mode):
    x = torch.randn(shape, device=device, dtype=dtype)
    weight = torch.randn(shape[-1], device=device, dtype=dtype)
    offset = 1.0 if mode == "gemma" else 0.0
    check_op(
        lambda x, w: liger.rms_norm(x, w, 1e-5, offset, mode),
        lambda x, w: reference(x, w, 1e-5, offset, mode),
        [x, weight],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows(device, dtype):
    """More rows than the persistent blocks of the backward ask for the rstd of at a time."""
    x, weight = (
        torch.randn(MANY_ROWS, 24, device=device, dtype=dtype),
        torch.randn(24, device=device, dtype=dtype),
    )
    check_op(
        lambda x, w: liger.rms_norm(x, w, 1e-5), lambda x, w: reference(x, w, 1e-5, 0.0, "llama"), [x, weight]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_without_weight(device, dtype):
    x = torch.randn(6, 200, device=device, dtype=dtype)
    check_op(lambda x: liger.rms_norm(x), lambda x: reference(x, None, 1e-6, 0.0, "llama"), [x])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 129), (300, 256), (3, 4100)], ids=str)
def test_fused_add_rms_norm(device, shape, dtype, mode):
    x, residual = torch.randn(2, *shape, device=device, dtype=dtype)
    weight = torch.randn(shape[-1], device=device, dtype=dtype)

    def plain(x, r, w):
        s = x + r
        return reference(s, w, 1e-6, 0.5, mode), s

    check_op(lambda x, r, w: liger.fused_add_rms_norm(x, r, w, 1e-6, 0.5, mode), plain, [x, residual, weight])


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_float32_weight_with_low_precision_input(device, dtype):
    x = torch.randn(9, 96, device=device, dtype=dtype)
    weight = torch.randn(96, device=device)
    y = liger.rms_norm(x, weight.requires_grad_())
    assert y.dtype == dtype
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32
