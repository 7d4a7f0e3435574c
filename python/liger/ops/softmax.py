# SPDX-License-Identifier: BSD-3-Clause
"""Softmax over the last dimension: torch kernels, API."""

import torch

from .._core.math.dtypes import accumulate_dtype
from .._core.op.arguments import arguments
from .._core.op.registration import declared_family


def softmax_torch(x):
    return torch.empty_like(x).copy_(torch.softmax(x, -1, dtype=accumulate_dtype(x.dtype)))


def softmax_backward_torch(grad_y, y):
    wide = accumulate_dtype(y.dtype)
    wide_y, wide_grad = y.to(wide), grad_y.to(wide)
    return torch.empty_like(y).copy_(wide_y * (wide_grad - (wide_y * wide_grad).sum(-1, keepdim=True)))


_softmax = declared_family("softmax", softmax_torch, softmax_backward_torch)


@arguments(late=True, enters=True, casts=True)
def softmax(x: torch.Tensor) -> torch.Tensor:
    """``exp(x) / sum(exp(x))`` over the last dimension, in float32 and rounded once.

    Args:
        x: (..., H), float16, bfloat16 or float32 (float64 on the torch backend), any strides. The softmax of
            -inf is 0; rows of -inf give NaN, as in torch.

    Under autocast on a GPU x is cast to float32, as for ``torch.softmax``.

    Returns:
        A tensor with the shape, dtype and, if dense, strides of x. Differentiable in x; the result is saved
        for the backward, x is not.

    Raises:
        TypeError: x is not a tensor.
        RuntimeError: no dimension, or a dtype that is not floating.

    Example::

        >>> liger.softmax(torch.zeros(4))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])

    Source of the single pass over long rows: Milakov and Gimelshein, "Online normalizer calculation for
    softmax", arXiv 1805.02867.
    """
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled("cuda"):
        x = x.float()
    return _softmax(x)
