# SPDX-License-Identifier: BSD-3-Clause
"""Layer normalisation (Ba, Kiros and Hinton, arXiv 1607.06450): torch kernels, API.

With ``m`` and ``v`` the mean and the variance of a row, ``y = (x - m) * rsqrt(v + eps) * weight + bias``, in
float32 with one rounding at the end. The variance is the mean of ``(x - m)^2``, never the difference of two
large numbers.
"""

import torch

from .._core.math.dtypes import accumulate_dtype
from .._core.op.arguments import NOT_NEGATIVE, arguments
from .._core.op.registration import declared_family
from .moment_norm import parameter_grad, rows_grad, rows_normalised


def layer_norm_torch(x, weight=None, bias=None, eps=1e-5):
    y, mean, rstd = rows_normalised(x, eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return torch.empty_like(x).copy_(y), mean, rstd


def layer_norm_backward_torch(
    grad_y, x, weight, bias, mean, rstd, need_grad_x, need_grad_weight, need_grad_bias
):
    wide = accumulate_dtype(x.dtype)
    mean, rstd = (t.to(wide).reshape(*x.shape[:-1], 1) for t in (mean, rstd))
    xhat, g = (x.to(wide) - mean) * rstd, grad_y.to(wide)
    rows = tuple(range(x.dim() - 1))
    grad_weight = parameter_grad(weight, need_grad_weight, x, g * xhat, rows)
    grad_bias = parameter_grad(bias, need_grad_bias, x, g, rows)
    if not need_grad_x:
        return x.new_empty(0), grad_weight, grad_bias
    weighted = g if weight is None else g * weight.to(wide)
    return torch.empty_like(x).copy_(rows_grad(weighted, xhat, rstd)), grad_weight, grad_bias


_layer_norm = declared_family("layer_norm", layer_norm_torch, layer_norm_backward_torch)


@arguments(late=True, enters=True, eps=NOT_NEGATIVE)
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Layer normalisation over the last dimension.

    ``y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias``, with statistics in float32.

    Args:
        x: (..., H), float16, bfloat16 or float32 (float64 on the torch backend), any strides.
        weight: (H,), the dtype of x or float32; None for no scale.
        bias: (H,), the dtype of the weight, or without a weight the dtype of x or float32; None for no shift.
        eps: added to the variance; finite and at least 0.

    Returns:
        y, of the shape and dtype of x. Differentiable in x, weight and bias.

    Raises:
        TypeError: an argument of another type.
        ValueError: eps out of range.
        RuntimeError: mismatched shapes, dtypes or devices.

    Example::

        >>> x, weight, bias = torch.randn(2, 10, 64), torch.ones(64), torch.zeros(64)
        >>> y = liger.layer_norm(x, weight, bias)

    Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450.
    """
    return _layer_norm(x, weight, bias, eps)[0]
