# SPDX-License-Identifier: BSD-3-Clause
"""relu_squared against float64, in every backend that runs here."""

import pytest
import torch
from cases import DTYPES, check_op

import liger

# One and several blocks of 128 threads with a 16-byte vector each; sizes of no whole vectors (1, 2 x 3 x 129)
# or of none in half types only (3 x 4100); no elements.
SHAPES = [(8,), (1, 1), (5, 64), (2, 3, 129), (7, 1000), (3, 4100), (2, 2, 2, 6), (0, 16), (3, 0)]


def plain(x):
    return torch.relu(x).square()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(device, shape, dtype):
    check_op(liger.relu_squared, plain, [torch.randn(shape, device=device, dtype=dtype) * 3])


def test_zero_nan_and_infinity(device):
    x = torch.tensor([-float("inf"), -0.0, 0.0, float("inf"), float("nan")], device=device).requires_grad_()
    y = liger.relu_squared(x)
    y.backward(torch.ones_like(x))
    torch.testing.assert_close(y, plain(x.detach()), equal_nan=True)
    inf, nan = float("inf"), float("nan")
    torch.testing.assert_close(x.grad, torch.tensor([0, 0, 0, inf, nan], device=device), equal_nan=True)
