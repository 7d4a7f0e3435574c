# SPDX-License-Identifier: BSD-3-Clause
"""group_norm against float64, in every backend that runs here."""

import pytest
import torch
from cases import DTYPES, check_op

import liger

PARAMETERS = [(True, True), (True, False), (False, True), (False, False)]
# Groups of a few elements (with two, the gradient of x is but rounding), odd sizes, whole vectors, groups
# that a block holds, and larger ones.
CASES = [
    ((3, 32), 4),
    ((5, 6, 7), 3),
    ((2, 6, 5, 5), 6),
    ((2, 64, 8, 8), 32),
    ((40, 96, 16), 1),
    ((2, 4, 96, 96), 2),
    ((1, 4, 203, 204), 2),
    ((1, 4, 201, 203), 2),
    ((1, 4, 8, 80, 80), 2),
]


def reference(x, groups, weight, bias, eps=1e-5):
    """The definition: statistics in at least float32, one rounding at the end."""
    wide = x if x.dtype == torch.float64 else x.float()
    rows = wide.reshape(x.shape[0], groups, -1)
    centred = rows - rows.mean(-1, keepdim=True)
    y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    of_channel = (-1, *(1,) * (x.dim() - 2))
    y = y if weight is None else y * weight.to(y.dtype).reshape(of_channel)
    y = y if bias is None else y + bias.to(y.dtype).reshape(of_channel)
    return y.to(x.dtype)


def check(x, groups, which, intermediate=0.0):
    parameters = [
        torch.randn(x.shape[1], device=x.device, dtype=x.dtype) if there else None for there in which
    ]
    check_op(
        lambda x, w, b: liger.group_norm(x, groups, w, b),
        lambda x, w, b: reference(x, groups, w, b),
        [x, *parameters],
        intermediate,
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize("which", PARAMETERS, ids=["weight+bias", "weight", "bias", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "groups"), CASES, ids=str)
def test_group_norm(device, shape, groups, dtype, which):
    check(torch.randn(shape, device=device, dtype=dtype) + 2, groups, which)


# The bytes of a group at which the cuda backend changes the shape of its launch, with 228 KB of shared memory
# per SM. First the sizes of the backward, which stages two tensors: two blocks per SM, one, pairs, the
# largest clusters; then the sizes of the forward: two blocks per SM, alone, in pairs and in the largest
# clusters, and one.
LIMITS = [56576, 113664, 227328, 903168, 114816, 229376, 908288, 1826816]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", LIMITS)
def test_where_the_kernel_changes(device, limit, dtype):
    """Groups of two channels, at the limits and near them, some more of them than a device keeps at a
    time."""
    vector = 16 // dtype.itemsize
    at = limit // dtype.itemsize // 2 // vector * vector
    for spatial, samples in (
        (at - vector, 2),
        (at, 150 if limit < 250000 else 30),
        (at + vector, 3),
        (at + 8 * vector, 1),
    ):
        # The gradients of parameters are few numbers, sums of many terms that cancel.
        check(torch.randn(samples, 4, spatial, device=device, dtype=dtype) + 1, 2, (True, True), 2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((30, 640, 16, 16), 2),
        ((9, 1280, 8, 8), 32),
        ((3, 96, 24, 24), 4),
        ((5, 40, 520), 1),
        ((3, 130, 512), 2),
    ],
    ids=str,
)
def test_channels_of_many_sizes(device, shape, groups, dtype):
    """Many channels in a group, short ones, and ones that end inside what a warp reads at a time."""
    check(torch.randn(shape, device=device, dtype=dtype) + 1, groups, (True, True))


@pytest.mark.parametrize("shape", [(2, 4, 40), (2, 4, 120, 160)], ids=str)
def test_a_large_mean_does_not_cancel(device, shape):
    """With a mean of 4000 deviations the difference of squares would have no digit left in float32."""
    x = torch.randn(shape, device=device) + 4096
    _, mean, rstd = torch.ops.liger.group_norm(x, 2)
    rows = x.double().reshape(2, 2, -1)
    torch.testing.assert_close(mean.double(), rows.mean(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), (rows.var(-1, correction=0) + 1e-5).rsqrt(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_float32_parameters_with_low_precision_input(device, dtype):
    x = torch.randn(3, 8, 5, 4, device=device, dtype=dtype)
    weight, bias = (torch.randn(8, device=device, requires_grad=True) for _ in range(2))
    liger.group_norm(x, 2, weight, bias).float().sum().backward()
    assert weight.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize("groups", [0, 4])
def test_groups_that_do_not_divide_the_channels(device, groups):
    words = f"group_norm: num_groups is {groups}, expected a divisor of the channels of x, 6"
    with pytest.raises(ValueError, match=words):
        liger.group_norm(torch.randn(2, 6, 3, device=device), groups)
