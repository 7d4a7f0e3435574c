# SPDX-License-Identifier: BSD-3-Clause
"""layer_norm against float64, in every backend that runs here."""

import pytest
import torch
from cases import DTYPES, MANY_ROWS, check_op, of_cuda

import liger

PARAMETERS = [(True, True), (True, False), (False, True), (False, False)]
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
    *of_cuda((1, 33000), (2, 70000), (300, 2304), (300, 2816)),
]


def reference(x, weight, bias, eps=1e-5):
    """The definition: statistics in at least float32, one rounding at the end."""
    wide = x if x.dtype == torch.float64 else x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.to(y.dtype)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype)


def parameters(which, size, device, dtype):
    return [torch.randn(size, device=device, dtype=dtype) if there else None for there in which]


@pytest.mark.covering(2)
@pytest.mark.parametrize("which", PARAMETERS, ids=["weight+bias", "weight", "bias", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(device, shape, dtype, which):
    # Around 2: a bias that were left out of the statistics would show.
    x = torch.randn(shape, device=device, dtype=dtype) + 2
    check_op(liger.layer_norm, reference, [x, *parameters(which, shape[-1], device, dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [3, 256, 1000, 8192, *of_cuda(33000)])
def test_few_rows(device, dtype, hidden):
    """On a GPU one block of one launch sums them. The gradient of the bias of one row is that row, and every
    run has the same bits."""
    for rows in (1, 2, 9):
        leaves = [
            torch.randn(*size, device=device).to(dtype) for size in ((rows, hidden), (hidden,), (hidden,))
        ]
        x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
        y = liger.layer_norm(x, weight, bias)
        upstream = torch.randn_like(y)
        first, again = (
            torch.autograd.grad(y, (x, weight, bias), upstream, retain_graph=True) for _ in range(2)
        )
        assert all(map(torch.equal, first, again))
        if rows == 1:
            assert torch.equal(first[2], upstream[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows(device, dtype):
    """More rows than the persistent blocks of the backward ask for the statistics of at a time."""
    x = torch.randn(MANY_ROWS, 24, device=device, dtype=dtype)
    check_op(liger.layer_norm, reference, [x, *parameters((True, True), 24, device, dtype)])


@pytest.mark.parametrize("hidden", [48, 4096, 20000, *of_cuda(70000)])
def test_a_large_mean_does_not_cancel(device, hidden):
    """With a mean of 4000 deviations the difference of squares would have no digit left in float32."""
    x = torch.randn(3, hidden, device=device) + 4096
    _, mean, rstd = torch.ops.liger.layer_norm(x)
    wide = x.double()
    torch.testing.assert_close(mean.double(), wide.mean(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), (wide.var(-1, correction=0) + 1e-5).rsqrt(), rtol=1e-4, atol=0)


def test_one_outlier_does_not_cancel(device):
    x = torch.randn(4, 2048, device=device)
    x[:, 0] = 3e4
    check_op(liger.layer_norm, reference, [x, *parameters((True, True), 2048, device, torch.float32)])


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [40, 2048, *of_cuda(16384)])
def test_a_row_that_starts_with_its_variance(device, dtype, hidden):
    """Half types take differences from the first values: here those are what the variance consists of."""
    x = torch.randn(3, hidden, device=device, dtype=dtype)
    x[:, :8] = 3000
    check_op(liger.layer_norm, reference, [x, *parameters((True, True), hidden, device, dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 8, 64, 4096, *of_cuda(16384)])
def test_rows_of_equal_elements(device, dtype, hidden):
    """No element differs from the mean, and no rounding may make one differ: rstd would multiply it by
    316."""
    x, grad = (
        torch.randint(-40, 40, (9, 1), device=device).to(dtype).expand(9, hidden) / 8 for _ in range(2)
    )
    weight, bias = (
        torch.full((hidden,), 3.0, device=device, dtype=dtype),
        torch.randn(hidden, device=device).to(dtype),
    )
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = liger.layer_norm(*leaves)
    grad_x, grad_weight, _ = torch.autograd.grad(y, leaves, grad)
    assert torch.equal(y, bias.expand_as(y))
    assert not grad_x.any() and not grad_weight.any()


def test_rows_of_one_element(device):
    """Less its mean nothing is left: y is the bias, and the gradient of x the rounding of what cancels."""
    x, weight, bias = (torch.randn(n, device=device).requires_grad_() for n in ((6, 1), (1,), (1,)))
    y = liger.layer_norm(x, weight, bias)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    assert torch.equal(y, bias.expand(6, 1))
    assert x.grad.abs().max() <= 1e-6 * 1e-5**-0.5 * (upstream * weight).abs().max()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_float32_parameters_with_low_precision_input(device, dtype):
    x = torch.randn(9, 96, device=device, dtype=dtype)
    weight, bias = (torch.randn(96, device=device, requires_grad=True) for _ in range(2))
    check_op(liger.layer_norm, reference, [x, weight, bias])
    liger.layer_norm(x, weight, bias).float().sum().backward()
    assert weight.grad.dtype == bias.grad.dtype == torch.float32


def test_parameters_of_two_dtypes(device):
    weight, bias = torch.randn(2, 8, device=device)
    with pytest.raises(
        RuntimeError, match="layer_norm: bias has dtype float16, expected the dtype of weight, float32"
    ):
        liger.layer_norm(torch.randn(4, 8, device=device).half(), weight, bias.half())
