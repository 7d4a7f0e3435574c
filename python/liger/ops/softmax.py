"""Softmax over the last dimension: reference kernels, fakes, autograd, API."""

from __future__ import annotations

import torch

from .._core.arguments import arguments
from .._core.autograd import differentiable, differentiable_once
from .._core.dtypes import accumulate_dtype
from .._core.fakes import register_fake
from .._core.vmap import refuse_mapped_scalars, to_front
from ..backend import register_family

# --- torch backend ----------------------------------------------------------------------------------------------


def softmax_torch(x):
    torch.ops.liger.check_rowwise("softmax", "x", x, None)
    return torch.empty_like(x).copy_(torch.softmax(x, -1, dtype=accumulate_dtype(x.dtype)))


def softmax_backward_torch(grad_y, y):
    torch.ops.liger.check_rowwise("softmax_backward", "y", y, grad_y)
    wide = accumulate_dtype(y.dtype)
    wide_y, wide_grad = y.to(wide), grad_y.to(wide)
    return torch.empty_like(y).copy_(wide_y * (wide_grad - (wide_y * wide_grad).sum(-1, keepdim=True)))


register_family(
    "softmax",
    {"softmax": softmax_torch, "softmax_backward": softmax_backward_torch},
    "liger.triton_kernels.softmax",
)


# --- fakes --------------------------------------------------------------------------------------------------------


@register_fake("liger::softmax")
def _(x):
    return torch.empty_like(x)


@register_fake("liger::softmax_backward")
def _(grad_y, y):
    return torch.empty_like(y)


# --- autograd and vmap --------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    ctx.save_for_backward(output)


@differentiable_once("softmax")
def _backward(ctx, grad_y):
    return (torch.ops.liger.softmax_backward.default(grad_y, *ctx.saved_tensors),)


_softmax = differentiable(torch.ops.liger.softmax.default, _setup, _backward)


@torch.library.register_vmap("liger::softmax")
def _(info, in_dims, x):
    x = to_front(x, in_dims[0], info.batch_size)
    refuse_mapped_scalars("softmax", "x", x)
    return torch.ops.liger.softmax(x), 0


# --- public API ---------------------------------------------------------------------------------------------------


@arguments(late=True)
def softmax(
    x: torch.Tensor,
) -> torch.Tensor:
    """``exp(x) / sum(exp(x))`` over the last dimension, in float32 and rounded once.

    Args:
        x: (..., H), float16, bfloat16 or float32 (float64 on the torch backend), any strides. The softmax of -inf is
            0; rows of -inf give NaN, as in torch.

    Under autocast on a GPU x is cast to float32, as for ``torch.softmax``.

    Returns:
        A tensor with the shape, dtype and, if dense, strides of x. Differentiable in x; the result is saved for the
        backward, x is not.

    Raises:
        TypeError: x is not a tensor.
        RuntimeError: no dimension, or a dtype that is not floating.

    Source of the single pass over long rows: Milakov and Gimelshein, "Online normalizer calculation for softmax",
    arXiv 1805.02867.
    """
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled("cuda"):
        x = x.float()
    return _softmax(x)
