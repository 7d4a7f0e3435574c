# SPDX-License-Identifier: BSD-3-Clause
"""rescale: one rounding, any strides, and the rules of an op that writes its argument."""

import pytest
import torch
from cases import DTYPES, strided_like

import liger  # noqa: F401  (registers the ops)

# No dimension; no elements; sizes of no whole 16-byte vectors, for one block (of 1024 elements) and several.
SHAPES = [(), (1,), (7,), (0, 4), (4, 0), (3, 1001), (2, 3, 65), (130, 129)]


def exact(x, factor):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(wide) * factor.to(wide)).to(x.dtype)


@pytest.mark.covering(2)
@pytest.mark.parametrize("factor", [1.0, 0.3, -2.0, 0.0, 65536.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rescale(device, shape, dtype, factor):
    x = torch.randn(shape, device=device).to(dtype)
    before, factor = x.clone(), torch.tensor(factor, device=device)
    out = torch.ops.liger.rescale(x, factor)
    assert out.dtype == dtype and torch.equal(out, exact(x, factor))
    assert torch.equal(x, before) and (out.data_ptr() != x.data_ptr() or x.numel() == 0)
    assert torch.ops.liger.rescale_(x, factor) is None
    assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_factor_is_not_rounded_to_the_dtype_of_x(device, dtype):
    x = torch.full((5,), 1024.0, device=device).to(dtype)
    factor = torch.tensor(1 / 3, device=device)
    assert torch.equal(torch.ops.liger.rescale(x, factor), exact(x, factor))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_shapes_and_dtypes_of_the_factor(device, shape, dtype):
    x = torch.randn(6, 5, device=device)
    factor = torch.full(shape, 0.75, device=device, dtype=dtype)
    assert torch.equal(torch.ops.liger.rescale(x, factor), x * 0.75)


@pytest.mark.parametrize("make", [strided_like, lambda t: t.t()])
def test_strided(device, make):
    x = make(torch.randn(6, 8, device=device))
    factor = torch.tensor(0.3, device=device)
    expected = exact(x, factor)
    out = torch.ops.liger.rescale(x, factor)
    assert torch.equal(out, expected) and out.stride() == torch.empty_like(x).stride()
    torch.ops.liger.rescale_(x, factor)
    assert torch.equal(x, expected)


def test_only_the_view_is_written(device):
    whole = torch.ones(6, 10, device=device)
    torch.ops.liger.rescale_(whole[:, 2:5], torch.tensor(3.0, device=device))
    assert (whole[:, 2:5] == 3).all() and (whole[:, :2] == 1).all() and (whole[:, 5:] == 1).all()


def test_infinite_and_nan_values(device):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0], device=device)
    out = torch.ops.liger.rescale(x, torch.tensor(-2.0, device=device))
    torch.testing.assert_close(out, x * -2, equal_nan=True)


def test_block_size_changes_no_bit(monkeypatch):
    x, factor = torch.randn(40, 33).bfloat16(), torch.tensor(0.3)
    whole = torch.ops.liger.rescale(x, factor)
    monkeypatch.setattr("liger._core.math.row_blocks._CPU_BLOCK", 100)
    assert torch.equal(torch.ops.liger.rescale(x, factor), whole)


def test_gradients(device):
    x = torch.randn(4, 5, device=device, requires_grad=True)
    factor = torch.tensor(0.3, device=device, requires_grad=True)
    upstream = torch.randn(4, 5, device=device)
    ours = torch.autograd.grad(torch.ops.liger.rescale(x, factor), [x, factor], upstream)
    theirs = torch.autograd.grad(x * factor, [x, factor], upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_bad_factor(device):
    for op in (torch.ops.liger.rescale, torch.ops.liger.rescale_):
        with pytest.raises(RuntimeError, match=r"^rescale_?: factor has shape \(2,\), expected one element"):
            op(torch.randn(3, device=device), torch.ones(2, device=device))
