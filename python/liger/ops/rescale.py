# SPDX-License-Identifier: BSD-3-Clause
"""Multiplication by a device scalar: the product of a gradient computed in the forward and the upstream
gradient.

The autograd formula is in ``_core/op/forward_gradients.py``, below the losses that call it.
"""

import torch

from .._core.math.dtypes import accumulate_dtype
from .._core.math.row_blocks import row_blocks
from .._core.op.fakes import register_fake
from .._core.op.registration import register_family
from .._core.op.tensors import wrong_shape


def _check(x, factor):
    if factor.numel() != 1:
        raise wrong_shape("rescale", "factor", factor, "one element")


def _scale_into(out, x, factor):
    _check(x, factor)
    wide = accumulate_dtype(x.dtype)
    factor = factor.reshape(()).to(wide)
    if x.dim() == 0:
        out.copy_(x.to(wide) * factor)
        return
    # Blocks of rows, because a float32 copy of a weight gradient would be larger than the gradient.
    for block in row_blocks(x):
        out[block].copy_(x[block].to(wide) * factor)


def rescale_torch(x, factor):
    out = torch.empty_like(x)
    _scale_into(out, x, factor)
    return out


def rescale__torch(x, factor):
    _scale_into(x, x, factor)


register_family("rescale", rescale_torch, rescale__torch)


@register_fake("liger::rescale")
def _(x, factor):
    return torch.empty_like(x)
