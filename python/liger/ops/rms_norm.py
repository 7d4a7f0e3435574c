# SPDX-License-Identifier: BSD-3-Clause
"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467): torch kernels, API.

With ``s = rsqrt(mean(x^2) + eps)`` per row and ``w = offset + weight``, ``y = x * s * w``. Casting modes:

``"llama"``  ``x * s`` is rounded to the dtype of x before the product with the weight, as in LlamaRMSNorm.
``"gemma"``  all arithmetic in float32 and one rounding at the end, as in GemmaRMSNorm (with ``offset=1``).
``"none"``   as eager code without casts: ``s`` and ``x * s`` are rounded to the dtype of x.
"""

import torch

from .._core.math.dtypes import accumulate_dtype
from .._core.math.memory_format import laid_out_like
from .._core.op.arguments import FINITE, NOT_NEGATIVE, TEXT, arguments
from .._core.op.registration import declared_family
from .._core.op.types import CastingMode


def normalise(x, weight, eps, offset, casting_mode):
    wide = accumulate_dtype(x.dtype)
    xw = x.to(wide)
    rstd = torch.rsqrt(xw.square().mean(-1, keepdim=True) + eps)
    if casting_mode == "none":
        rstd = rstd.to(x.dtype).to(wide)
    y = xw * rstd
    if casting_mode != "gemma":
        y = y.to(x.dtype).to(wide)
    if weight is not None:
        y.mul_(weight.to(wide) + offset)
    return y.to(x.dtype), rstd.squeeze(-1).contiguous()


def norm_gradients(grad_y, x, weight, rstd, offset, casting_mode, grad_residual, need_x, need_weight):
    """(grad_x or None, grad_weight or None). The derivative of the roundings in the forward is taken as 1."""
    wide = accumulate_dtype(x.dtype)
    rstd = rstd.to(wide).reshape(*x.shape[:-1], 1)
    xhat = x.to(wide) * rstd
    g = grad_y.to(wide)
    # Allocating a tensor of the size of x costs as much as the arithmetic, so products are computed once and
    # reused.
    product = g * xhat
    grad_weight = None
    if need_weight and weight is not None:
        # The forward multiplies the weight by the rounded xhat.
        rounded = casting_mode != "gemma" and x.dtype != wide
        terms = g * xhat.to(x.dtype).to(wide) if rounded else product
        rows = tuple(range(x.dim() - 1))
        grad_weight = terms if not rows else terms.sum(rows)
        # Without rows it would alias the product, which is overwritten below.
        grad_weight = grad_weight.to(weight.dtype, copy=not rows)
    grad_x = None
    if need_x:
        if weight is not None:
            factor = weight.to(wide) + offset
            g, product = g * factor, product.mul_(factor)
        xhat.mul_(product.mean(-1, keepdim=True))
        grad_x = torch.sub(g, xhat, out=xhat).mul_(rstd)
        if grad_residual is not None:
            grad_x.add_(grad_residual.to(wide))
        grad_x = grad_x.to(x.dtype)
    return grad_x, grad_weight


def _or_empty(tensor, like):
    return like.new_empty(0) if tensor is None else tensor


def rms_norm_torch(x, weight, eps=1e-6, offset=0.0, casting_mode="llama"):
    y, rstd = normalise(x, weight, eps, offset, casting_mode)
    return laid_out_like(x, y), rstd


def rms_norm_backward_torch(grad_y, x, weight, rstd, offset, casting_mode, need_grad_x, need_grad_weight):
    grad_x, grad_weight = norm_gradients(
        grad_y, x, weight, rstd, offset, casting_mode, None, need_grad_x, need_grad_weight
    )
    grad_x = x.new_empty(0) if grad_x is None else laid_out_like(x, grad_x)
    return grad_x, _or_empty(grad_weight, x if weight is None else weight)


def fused_add_rms_norm_torch(x, residual, weight, eps=1e-6, offset=0.0, casting_mode="llama"):
    new_residual = torch.empty_like(x).copy_(x + residual)
    y, rstd = normalise(new_residual, weight, eps, offset, casting_mode)
    return laid_out_like(x, y), new_residual, rstd


def fused_add_rms_norm_backward_torch(
    grad_y, grad_new_residual, new_residual, weight, rstd, offset, casting_mode, need_grad_x, need_grad_weight
):
    upstream, needed = (grad_y, new_residual, weight, rstd), (need_grad_x, need_grad_weight)
    grad_x, grad_weight = norm_gradients(*upstream, offset, casting_mode, grad_new_residual, *needed)
    x = new_residual
    grad_x = x.new_empty(0) if grad_x is None else laid_out_like(x, grad_x)
    return grad_x, _or_empty(grad_weight, new_residual if weight is None else weight)


_rms_norm = declared_family("rms_norm", rms_norm_torch, rms_norm_backward_torch)
_fused_add_rms_norm = declared_family(
    "fused_add_rms_norm", fused_add_rms_norm_torch, fused_add_rms_norm_backward_torch, triton="rms_norm"
)


_checked = arguments(late=True, enters=True, eps=NOT_NEGATIVE, offset=FINITE, casting_mode=TEXT)


@_checked
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: CastingMode = "llama",
) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension.

    ``y = x * rsqrt(mean(x^2) + eps) * (offset + weight)``, with statistics in float32.

    Args:
        x: (..., H), float16, bfloat16 or float32 (float64 on the torch backend), any strides.
        weight: (H,), the dtype of x or float32; None for no scale.
        eps: added to the mean square; finite and at least 0.
        offset: added to the weight; 1.0 for Gemma, which stores weights around zero.
        casting_mode: where intermediate results are rounded to the dtype of x: ``"llama"``:
            ``x * rsqrt(...)`` before the weight; ``"gemma"``: only y; ``"none"``: ``rsqrt(...)`` and
            ``x * rsqrt(...)``. Use the mode of the code that trained the weights.

    Returns:
        y, of the shape and dtype of x. Differentiable in x and weight.

    Raises:
        TypeError: an argument of another type.
        ValueError: eps or offset out of range, or an unknown casting mode.
        RuntimeError: mismatched shapes, dtypes or devices.

    Example::

        >>> x, weight = torch.randn(2, 10, 64), torch.ones(64)
        >>> y = liger.rms_norm(x, weight, eps=1e-5)

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    return _rms_norm(x, weight, eps, offset, casting_mode)[0]


@_checked
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: CastingMode = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual addition and root-mean-square normalisation in one pass.

    ``new_residual = x + residual``; ``y = rms_norm(new_residual, weight, ...)``.

    Args:
        x: (..., H), as in :func:`rms_norm`.
        residual: the shape, dtype and device of x.
        weight, eps, offset, casting_mode: as in :func:`rms_norm`.

    Returns:
        (y, new_residual), both of the shape and dtype of x. Differentiable in x, residual and weight.

    Raises:
        TypeError: an argument of another type.
        ValueError: eps or offset out of range, or an unknown casting mode.
        RuntimeError: mismatched shapes, dtypes or devices.

    Example::

        >>> x, residual, weight = torch.randn(2, 10, 64), torch.randn(2, 10, 64), torch.ones(64)
        >>> y, new_residual = liger.fused_add_rms_norm(x, residual, weight)

    Source: as :func:`rms_norm`.
    """
    return _fused_add_rms_norm(x, residual, weight, eps, offset, casting_mode)[:2]
