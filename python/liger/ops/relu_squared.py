# SPDX-License-Identifier: BSD-3-Clause
"""Squared ReLU, ``relu(x)^2`` (So et al., arXiv 2109.08668): torch kernels, API."""

import torch

from .._core.math.dtypes import accumulate_dtype
from .._core.op.arguments import arguments
from .._core.op.registration import declared_family


def relu_squared_torch(x):
    return torch.empty_like(x).copy_(torch.relu(x).to(accumulate_dtype(x.dtype)).square())


def relu_squared_backward_torch(grad_y, x):
    wide = accumulate_dtype(x.dtype)
    grad_x = (2 * x.to(wide) * grad_y.to(wide)).masked_fill_(x <= 0, 0)
    return torch.empty_like(x).copy_(grad_x)


_relu_squared = declared_family("relu_squared", relu_squared_torch, relu_squared_backward_torch)


@arguments(late=True, enters=True)
def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """``relu(x)^2``, elementwise, in float32 and rounded once. NaN stays NaN.

    Args:
        x: any shape of at least one dimension, float16, bfloat16 or float32 (float64 on the torch backend),
            any strides.

    Returns:
        A tensor with the shape, dtype and, if dense, strides of x. Differentiable in x, which is saved for
        the backward.

    Raises:
        TypeError: x is not a tensor.
        RuntimeError: no dimension, or a dtype that is not floating.

    Example::

        >>> liger.relu_squared(torch.tensor([-1.0, 0.0, 3.0]))
        tensor([0., 0., 9.])

    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", arXiv 2109.08668.
    """
    return _relu_squared(x)
