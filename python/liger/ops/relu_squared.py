"""Squared ReLU, ``relu(x)^2`` (So et al., arXiv 2109.08668): reference kernels, fakes, autograd, API."""

from __future__ import annotations

import torch

from .._core.arguments import arguments
from .._core.autograd import differentiable, differentiable_once
from .._core.dtypes import accumulate_dtype
from .._core.fakes import register_fake
from .._core.vmap import to_front
from ..backend import register_family

# --- torch backend ----------------------------------------------------------------------------------------------


def relu_squared_torch(x):
    torch.ops.liger.check_rowwise("relu_squared", "x", x, None)
    return torch.empty_like(x).copy_(torch.relu(x).to(accumulate_dtype(x.dtype)).square())


def relu_squared_backward_torch(grad_y, x):
    torch.ops.liger.check_rowwise("relu_squared_backward", "x", x, grad_y)
    wide = accumulate_dtype(x.dtype)
    grad_x = (2 * x.to(wide) * grad_y.to(wide)).masked_fill_(x <= 0, 0)
    return torch.empty_like(x).copy_(grad_x)


register_family(
    "relu_squared",
    {"relu_squared": relu_squared_torch, "relu_squared_backward": relu_squared_backward_torch},
    "liger.triton_kernels.relu_squared",
)


# --- fakes --------------------------------------------------------------------------------------------------------


@register_fake("liger::relu_squared")
def _(x):
    return torch.empty_like(x)


@register_fake("liger::relu_squared_backward")
def _(grad_y, x):
    return torch.empty_like(x)


# --- autograd and vmap --------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@differentiable_once("relu_squared")
def _backward(ctx, grad_y):
    return (torch.ops.liger.relu_squared_backward.default(grad_y, *ctx.saved_tensors),)


_relu_squared = differentiable(torch.ops.liger.relu_squared.default, _setup, _backward)


@torch.library.register_vmap("liger::relu_squared")
def _(info, in_dims, x):
    return torch.ops.liger.relu_squared(to_front(x, in_dims[0], info.batch_size)), 0


# --- public API ---------------------------------------------------------------------------------------------------


@arguments(late=True)
def relu_squared(
    x: torch.Tensor,
) -> torch.Tensor:
    """``relu(x)^2``, elementwise, in float32 and rounded once. NaN stays NaN.

    Args:
        x: any shape of at least one dimension, float16, bfloat16 or float32 (float64 on the torch backend), any
            strides.

    Returns:
        A tensor with the shape, dtype and, if dense, strides of x. Differentiable in x, which is saved for the
        backward.

    Raises:
        TypeError: x is not a tensor.
        RuntimeError: no dimension, or a dtype that is not floating.

    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", arXiv 2109.08668.
    """
    return _relu_squared(x)
