# SPDX-License-Identifier: BSD-3-Clause
"""Softmax and the squared ReLU as modules."""

import torch
from torch import nn

from .._core.op.arguments import INTEGER, arguments
from ..ops.relu_squared import relu_squared
from ..ops.softmax import softmax

_LAST = INTEGER._replace(expected="-1, the last dimension", in_range=lambda v: v == -1, beyond=None)


class Softmax(nn.Module):
    """Softmax over the last dimension, by :func:`liger.softmax`.

    Args:
        dim: -1. :class:`torch.nn.Softmax` takes other dimensions.

    Shape:
        x: as in :func:`liger.softmax`; the result has the shape and dtype of x.

    Raises:
        TypeError: a dim that is not an integer, an x that is not a tensor.
        ValueError: another dim.
        RuntimeError: as :func:`liger.softmax`.

    Example::

        >>> softmax = liger.nn.Softmax(dim=-1)
        >>> y = softmax(torch.randn(2, 10, 64))

    Source: as :func:`liger.softmax`.
    """

    @arguments(dim=_LAST)
    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    @arguments(late=True)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return softmax(x)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class ReLUSquared(nn.Module):
    """``relu(x)^2``, elementwise, by :func:`liger.relu_squared`.

    Shape:
        x: as in :func:`liger.relu_squared`; the result has the shape and dtype of x.

    Raises:
        TypeError: an x that is not a tensor.
        RuntimeError: as :func:`liger.relu_squared`.

    Example::

        >>> activation = liger.nn.ReLUSquared()
        >>> y = activation(torch.randn(2, 10, 64))

    Source: as :func:`liger.relu_squared`.
    """

    @arguments(late=True)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return relu_squared(x)
