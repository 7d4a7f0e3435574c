# SPDX-License-Identifier: BSD-3-Clause
"""softmax against float64, in every backend that runs here."""

import pytest
import torch
from cases import DTYPES, check_op, strided_like

import liger

# Rows of a few lanes, a warp, a block, and rows that are read twice; with vectors and without.
SHAPES = [
    (8,), (1, 1), (9, 5), (5, 64), (2, 3, 129), (7, 1000), (3, 1023), (3, 4100), (3, 5000), (2, 20001), (2, 32768),
    (2, 40000), (1, 70000), (1, 70001), (0, 16), (3, 0),
]  # fmt: skip


def plain(x):
    return torch.softmax(x, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(device, shape, dtype):
    check_op(liger.softmax, plain, [torch.randn(shape, device=device, dtype=dtype) * 3], intermediate=8.0)


def check_both_ways(rows, columns, device, dtype):
    """y and its gradient against float64; the gradient against the gradient for the computed y."""
    x, grad = (torch.randn(rows, columns, device=device) for _ in range(2))
    x, grad = (3 * x).to(dtype).requires_grad_(), grad.to(dtype)
    y = liger.softmax(x)
    (grad_x,) = torch.autograd.grad(y, x, grad)
    probability, upstream = y.detach().double(), grad.double()
    expected_y = x.detach().double().softmax(-1)
    dot = (probability * upstream).sum(-1, keepdim=True)
    # (actual, expected, terms): upstream - dot may cancel, which leaves the rounding of the terms.
    checks = {
        "y": (y.double(), expected_y, expected_y),
        "grad_x": (
            grad_x.double(),
            probability * (upstream - dot),
            probability * (upstream.abs() + dot.abs()),
        ),
    }
    for name, (actual, expected, terms) in checks.items():
        # Relative to the largest of a row, where the error of its sum is largest.
        error = (actual - expected).abs().amax(-1) / terms.abs().amax(-1)
        assert error.max() < (8 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps, (name, columns)


# In the backward, twice as many bytes are kept.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows, row_bytes",
    [
        (600, 40016), (450, 70002), (300, 100002), (450, 140002), (300, 200002), (150, 300002), (120, 500002),
        (80, 600002), (40, 1000002), (9, 2000004),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows(device, dtype, rows, row_bytes):
    """More rows than fit the device at a time, each kept by a block or a cluster; and longer ones."""
    check_both_ways(rows, row_bytes // dtype.itemsize, device, dtype)


# The bytes of a row at which the cuda backend changes the shape of its launch, with 228 KB of shared memory
# per SM: three blocks per SM, alone, in pairs, in the largest clusters; then two blocks per SM and one, in
# the largest clusters. First the sizes of the backward, which stages two tensors.
LIMITS = [
    38144, 76032, 303104, 457728, 919552,
    76160, 152064, 602112, 912384, 1835008,
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", LIMITS)
def test_where_the_kernel_changes(device, limit, dtype):
    at = limit // dtype.itemsize
    for columns in (at - 1, at, at + 1, at + 13):
        check_both_ways(3, columns, device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [33000, 65536, 90000, 128264, 262144])
def test_rows_do_not_depend_on_their_batch(device, columns):
    """A row has the same bits in every place of a batch, and in every repetition."""
    x, grad = (torch.randn(280, columns, device=device, dtype=torch.bfloat16) for _ in range(2))

    def both(x, grad):
        x = x.detach().requires_grad_()
        y = liger.softmax(x)
        return y.detach(), torch.autograd.grad(y, x, grad)[0]

    place = torch.arange(280, device=device).roll(93)
    whole, moved = both(x, grad), both(x[place], grad[place])
    assert torch.equal(moved[0], whole[0][place]) and torch.equal(moved[1], whole[1][place])
    for _ in range(3):
        again = both(x, grad)
        assert torch.equal(again[0], whole[0]) and torch.equal(again[1], whole[1])


def test_rows_add_up_to_one(device):
    x = torch.randn(5, 70000, device=device) * 10
    sums = liger.softmax(x).double().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6)


@pytest.mark.parametrize("columns", [6, 300, 5000, 70000])
def test_large_magnitudes_and_masks(device, columns):
    """No overflow, 0 for -inf, also where a thread or a tile has nothing else, and NaN for rows of nothing
    else."""
    x = torch.randn(6, columns, device=device)
    x[0] += 3e4
    x[1] -= 3e38
    x[2, : columns // 2] = -float("inf")
    x[3, :-1] = -float("inf")
    x[4] = -float("inf")
    x[5, 1] = float("nan")
    y = liger.softmax(x)
    torch.testing.assert_close(y, plain(x), equal_nan=True)
    assert y[3, -1] == 1 and (y[2, : columns // 2] == 0).all()
    assert y[4:].isnan().all() and y[:4].isfinite().all()


@pytest.mark.parametrize(
    "move",
    [strided_like, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), lambda t: t.mT.contiguous().mT],
    ids=["every_second", "transposed", "columns_first"],
)
def test_strides_of_long_rows(device, move):
    x, grad = torch.randn(2, 6, 5, 8200, device=device).unbind()
    results = []
    for moved, upstream in ((x, grad), (move(x), move(grad))):
        moved.requires_grad_()
        y = liger.softmax(moved)
        assert y.stride() == torch.empty_like(moved).stride()
        results.append((y, *torch.autograd.grad(y, moved, upstream)))
    for contiguous, strided in zip(*results, strict=True):
        torch.testing.assert_close(contiguous, strided, rtol=1e-5, atol=1e-7)


def test_expanded_gradient(device):
    """All strides of the gradient of a sum are 0; the gradient of a softmax is also 0."""
    x = torch.randn(4, 100, device=device, requires_grad=True)
    liger.softmax(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.zeros_like(x), rtol=0, atol=1e-7)


def test_keeps_the_result_and_not_the_input(device):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda packed: None):
        y = liger.softmax(torch.randn(3, 8, device=device, requires_grad=True))
    assert saved == [y.data_ptr()]
