# SPDX-License-Identifier: BSD-3-Clause
"""Group normalisation (Wu and He, arXiv 1803.08494): torch kernels, API.

The channels of a sample form groups of consecutive channels. The elements of a group, over all positions, are
normalised by their mean and variance like a row of :mod:`liger.ops.layer_norm`. Weight and bias have one
value per channel.
"""

import torch

from .._core.math.dtypes import accumulate_dtype
from .._core.op.arguments import INTEGER, NOT_NEGATIVE, arguments
from .._core.op.registration import declared_family
from .moment_norm import parameter_grad, rows_grad, rows_normalised


def _rows(x, num_groups):
    """(N, G, elements of a group)."""
    return x.reshape(x.shape[0], num_groups, x.shape[1] // num_groups * x.shape[2:].numel())


def _per_channel(parameter, x):
    return parameter.to(accumulate_dtype(x.dtype)).reshape(-1, *(1,) * (x.dim() - 2))


def group_norm_torch(x, num_groups, weight=None, bias=None, eps=1e-5):
    y, mean, rstd = rows_normalised(_rows(x, num_groups), eps)
    y = y.reshape(x.shape)
    if weight is not None:
        y = y * _per_channel(weight, x)
    if bias is not None:
        y = y + _per_channel(bias, x)
    return torch.empty_like(x).copy_(y), mean, rstd


def group_norm_backward_torch(
    grad_y, x, num_groups, weight, bias, mean, rstd, need_grad_x, need_grad_weight, need_grad_bias
):
    wide = accumulate_dtype(x.dtype)
    mean, rstd = (t.to(wide).reshape(x.shape[0], num_groups, 1) for t in (mean, rstd))
    rows = (_rows(x, num_groups).to(wide) - mean) * rstd
    xhat, g = rows.reshape(x.shape), grad_y.to(wide)
    dims = (0, *range(2, x.dim()))
    grad_weight = parameter_grad(weight, need_grad_weight, x, g * xhat, dims)
    grad_bias = parameter_grad(bias, need_grad_bias, x, g, dims)
    if not need_grad_x:
        return x.new_empty(0), grad_weight, grad_bias
    weighted = g if weight is None else g * _per_channel(weight, x)
    grad_x = rows_grad(_rows(weighted, num_groups), rows, rstd).reshape(x.shape)
    return torch.empty_like(x).copy_(grad_x), grad_weight, grad_bias


_group_norm = declared_family("group_norm", group_norm_torch, group_norm_backward_torch)


@arguments(late=True, enters=True, num_groups=INTEGER, eps=NOT_NEGATIVE)
def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Group normalisation of channels.

    ``y = (x - mean) * rsqrt(var + eps) * weight + bias``, with the statistics of each group of channels of
    each sample, in float32.

    Args:
        x: (N, C, ...), float16, bfloat16 or float32 (float64 on the torch backend), any strides.
        num_groups: a divisor of C.
        weight: (C,), the dtype of x or float32; None for no scale.
        bias: (C,), the dtype of the weight, or without a weight the dtype of x or float32; None for no shift.
        eps: added to the variance; finite and at least 0.

    Returns:
        y, of the shape and dtype of x. Differentiable in x, weight and bias.

    Raises:
        TypeError: an argument of another type.
        ValueError: num_groups does not divide the channels, or eps is out of range.
        RuntimeError: mismatched shapes, dtypes or devices.

    Example::

        >>> x, weight, bias = torch.randn(2, 64, 10, 10), torch.ones(64), torch.zeros(64)
        >>> y = liger.group_norm(x, 8, weight, bias)

    Source: Wu and He, "Group Normalization", arXiv 1803.08494.
    """
    return _group_norm(x, num_groups, weight, bias, eps)[0]
