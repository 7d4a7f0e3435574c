"""Multiplication by a device scalar: how a gradient computed in the forward meets the upstream gradient."""

import torch

from ..backend import register_family
from ._autograd import differentiable, forbid_autograd, may_write_saved
from ._fakes import register_fake
from ._rows import row_blocks
from .rms_norm import accumulate_dtype


def _check(x, factor):
    if factor.numel() != 1:
        raise RuntimeError(f"rescale: factor has shape {tuple(factor.shape)}, expected one element")


# --- torch backend ----------------------------------------------------------------------------------------------


def _scale_into(out, x, factor):
    _check(x, factor)
    wide = accumulate_dtype(x.dtype)
    factor = factor.reshape(()).to(wide)
    if x.dim() == 0:
        out.copy_(x.to(wide) * factor)
        return
    # Blocks of rows: a float32 copy of a whole weight gradient would cost more than the gradient itself.
    for block in row_blocks(x):
        out[block].copy_(x[block].to(wide) * factor)


def rescale_torch(x, factor):
    out = torch.empty_like(x)
    _scale_into(out, x, factor)
    return out


def rescale__torch(x, factor):
    _scale_into(x, x, factor)


register_family(
    "rescale", {"rescale": rescale_torch, "rescale_": rescale__torch}, "liger.triton_kernels.rescale"
)


# --- fakes --------------------------------------------------------------------------------------------------------


@register_fake("liger::rescale")
def _(x, factor):
    return torch.empty_like(x)


@register_fake("liger::rescale_")
def _(x, factor):
    return None


# --- autograd -----------------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_out):
    x, factor = ctx.saved_tensors
    need_x, need_factor = ctx.needs_input_grad
    grad_x = rescale(grad_out, factor) if need_x else None
    grad_factor = None
    if need_factor:
        wide = accumulate_dtype(x.dtype)
        grad_factor = (grad_out.to(wide) * x.to(wide)).sum().to(factor.dtype).reshape(factor.shape)
    return grad_x, grad_factor


rescale = differentiable(torch.ops.liger.rescale.default, _setup, _backward)
rescale_ = forbid_autograd("rescale_")


def scaled_by_upstream(ctx, grads, grad_loss):
    """In a backward: the saved gradients of a loss, or None, times the upstream gradient; in place where they die with
    the node."""
    grads = [None if grad is None else grad.detach() for grad in grads]
    if not may_write_saved(ctx, *grads):
        return [None if grad is None else rescale(grad, grad_loss) for grad in grads]
    for grad in grads:
        if grad is not None:
            rescale_(grad, grad_loss)
    return grads
