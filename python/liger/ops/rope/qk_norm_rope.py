# SPDX-License-Identifier: BSD-3-Clause
"""RMSNorm of each head of queries and keys, then the rotary embedding: reference kernels, fakes, autograd,
API.

The result is ``rope(rms_norm(q), rms_norm(k))``: the normalised heads are rounded to the dtype of q before
the rotation. The backward saves no intermediate: it recomputes the norm from q and k.
"""

from typing import Literal

import torch

from ..._core.math.dtypes import accumulate_dtype
from ..._core.math.memory_format import laid_out_like
from ..._core.op.arguments import FLAG, INTEGER, NORM, arguments, check
from ..._core.op.autograd import differentiable, differentiable_once
from ..._core.op.by_name import by_name
from ..._core.op.fakes import register_fake
from ..._core.op.registration import register_family
from ..._core.op.types import CastingMode
from ..._core.op.vmap import loop_rule, to_front
from ..rms_norm import norm_gradients, normalise
from .op import check_heads_dim, heads_first, rotate, tables_to_front

# --- torch backend ------------------------------------------------------------------------------------------


def qk_norm_rope_torch(
    q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama", interleaved=False
):
    torch.ops.liger.check_qk_norm_rope(
        "qk_norm_rope", q, k, q_weight, k_weight, cos, sin, casting_mode, eps, offset
    )

    def apply(x, weight):
        y, _ = normalise(x, weight, eps, offset, casting_mode)
        return laid_out_like(x, rotate(y, cos, sin, interleaved, False))

    return apply(q, q_weight), apply(k, k_weight)


@by_name(torch.ops.liger.qk_norm_rope_backward.default)
def qk_norm_rope_backward_torch(a):
    grad_q_out, grad_k_out, q, k, q_weight, k_weight, cos, sin, *options = a[:12]
    eps, offset, casting_mode, interleaved = options
    need_grad_q, need_grad_k, need_grad_q_weight, need_grad_k_weight = a.needs_grad
    torch.ops.liger.check_qk_norm_rope(
        "qk_norm_rope_backward", q, k, q_weight, k_weight, cos, sin, casting_mode, eps, offset
    )

    def gradients(grad_out, x, weight, need_x, need_weight):
        grad_x = grad_weight = None
        if need_x or (need_weight and weight is not None):
            _, rstd = normalise(x, None, eps, 0.0, casting_mode)
            # The rotated gradient is not rounded to the dtype of x.
            grad_y = rotate(grad_out.to(accumulate_dtype(x.dtype)), cos, sin, interleaved, True)
            grad_x, grad_weight = norm_gradients(
                grad_y, x, weight, rstd, offset, casting_mode, None, need_x, need_weight
            )
        like = x if weight is None else weight
        return (
            x.new_empty(0) if grad_x is None else laid_out_like(x, grad_x),
            like.new_empty(0) if grad_weight is None else grad_weight,
        )

    grad_q, grad_q_weight = gradients(grad_q_out, q, q_weight, need_grad_q, need_grad_q_weight)
    grad_k, grad_k_weight = gradients(grad_k_out, k, k_weight, need_grad_k, need_grad_k_weight)
    return grad_q, grad_k, grad_q_weight, grad_k_weight


register_family("qk_norm_rope", qk_norm_rope_torch, qk_norm_rope_backward_torch)


# --- fakes --------------------------------------------------------------------------------------------------


@register_fake("liger::qk_norm_rope")
def _(q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama", interleaved=False):
    return torch.empty_like(q), torch.empty_like(k)


@register_fake("liger::qk_norm_rope_backward")
@by_name(torch.ops.liger.qk_norm_rope_backward.default)
def _(a):
    need_grad_q, need_grad_k, need_grad_q_weight, need_grad_k_weight = a.needs_grad

    def of_weight(x, weight, need):
        return x.new_empty(0) if weight is None else weight.new_empty(weight.shape[0] if need else 0)

    return (
        torch.empty_like(a.q) if need_grad_q else a.q.new_empty(0),
        torch.empty_like(a.k) if need_grad_k else a.k.new_empty(0),
        of_weight(a.q, a.q_weight, need_grad_q_weight),
        of_weight(a.k, a.k_weight, need_grad_k_weight),
    )


# --- autograd -----------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    *saved, ctx.eps, ctx.offset, ctx.casting_mode, ctx.interleaved = inputs
    need_q, need_k, need_q_weight, need_k_weight, *need_tables = ctx.needs_input_grad[:6]
    if any(need_tables):
        raise RuntimeError(
            "qk_norm_rope: cos or sin requires grad, but qk_norm_rope is differentiable in q, k and the weights only"
        )
    needed = need_q or need_q_weight, need_k or need_k_weight
    ctx.mark_non_differentiable(*(out for out, need in zip(output, needed, strict=True) if not need))
    ctx.save_for_backward(*saved)
    ctx.set_materialize_grads(False)


@differentiable_once("qk_norm_rope")
def _backward(ctx, grad_q_out, grad_k_out):
    q, k, *others = ctx.saved_tensors
    given = grad_q_out is not None, grad_k_out is not None
    needed = [need and given[i % 2] for i, need in enumerate(ctx.needs_input_grad[:4])]
    grads = (None,) * 4
    if any(needed):
        # The op needs both: the other one is passed with zero heads.
        if not given[0]:
            grad_q_out = q = q[:, :0]
        if not given[1]:
            grad_k_out = k = k[:, :0]
        options = ctx.eps, ctx.offset, ctx.casting_mode, ctx.interleaved
        backward = torch.ops.liger.qk_norm_rope_backward.default
        results = backward(grad_q_out, grad_k_out, q, k, *others, *options, *needed)
        grads = tuple(grad if need else None for grad, need in zip(results, needed, strict=True))
    return *grads, None, None, None, None, None, None


_qk_norm_rope = differentiable(torch.ops.liger.qk_norm_rope.default, _setup, _backward)


# --- vmap ---------------------------------------------------------------------------------------------------


def _batched(info, in_dims, q, k, q_weight, k_weight, cos, sin, *options):
    """The mapped dimension becomes a part of the batch, unless the weights are mapped."""
    op, size = torch.ops.liger.qk_norm_rope.default, info.batch_size
    if in_dims[2] is not None or in_dims[3] is not None:
        return loop_rule(op)(info, in_dims, q, k, q_weight, k_weight, cos, sin, *options)
    q, k = to_front(q, in_dims[0], size), to_front(k, in_dims[1], size)
    batch = q.shape[1]
    cos, sin = tables_to_front(info, in_dims[4:6], cos, sin, batch)
    outputs = op(q.flatten(0, 1), k.flatten(0, 1), q_weight, k_weight, cos, sin, *options)
    return tuple(t.unflatten(0, (size, batch)) for t in outputs), (0, 0)


torch.library.register_vmap("liger::qk_norm_rope", _batched)


# --- public API ---------------------------------------------------------------------------------------------


@arguments(
    late=True, enters=True, optional=("q_weight", "k_weight"), unsqueeze_dim=INTEGER, interleaved=FLAG, **NORM
)
def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: CastingMode = "llama",
    unsqueeze_dim: Literal[1, 2] = 1,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over each head of queries and keys, then rotary position embedding, in one pass over both.

    ``rope(rms_norm(q, q_weight, ...), rms_norm(k, k_weight, ...), cos, sin, ...)``, as in Qwen3 and Gemma 3.

    Args:
        q: (B, Hq, T, D) or, with ``unsqueeze_dim=2``, (B, T, Hq, D); float16, bfloat16 or float32 (float64 on
            the torch backend), any strides: ``.transpose(1, 2)`` views are not copied.
        k: (B, Hk, T, D) or (B, T, Hk, D), the dtype of q; Hk may differ from Hq.
        q_weight, k_weight: (D,), the dtype of q or float32; None for no scale.
        cos, sin: as in :func:`liger.rope`: (T, R), (1, T, R) or (B, T, R), R even and at most D: the
            normalised elements from R on are not rotated. They get no gradient.
        eps, offset, casting_mode: as in :func:`liger.rms_norm`; ``offset=1.0`` and ``"gemma"`` for Gemma 3
            and Qwen3-Next.
        unsqueeze_dim: the dimension of the heads in q and k: 1 or 2.
        interleaved: pairs are elements (2i, 2i + 1) instead of (i, i + R/2).

    Returns:
        (q, k), with the dtype and, if dense, the strides of q and k. Differentiable in q, k and both weights.

    Raises:
        TypeError: an argument of another type.
        ValueError: unsqueeze_dim is neither 1 nor 2, eps or offset is out of range, an unknown casting mode.
        RuntimeError: mismatched shapes, dtypes or devices, or cos or sin requires grad.

    Example::

        >>> q, k, angles = torch.randn(1, 8, 10, 64), torch.randn(1, 2, 10, 64), torch.randn(10, 64)
        >>> q, k = liger.qk_norm_rope(q, k, torch.ones(64), torch.ones(64), angles.cos(), angles.sin())

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467; Su et al.,
    "RoFormer", arXiv 2104.09864.
    """
    check_heads_dim("qk_norm_rope", unsqueeze_dim)
    if interleaved is not False:
        check("qk_norm_rope", "interleaved", interleaved, FLAG)
    if unsqueeze_dim == 2:
        # The op and its messages use (batch, heads, tokens, head_dim).
        q, k = heads_first("qk_norm_rope", "q", q), heads_first("qk_norm_rope", "k", k)
    q, k = _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode, interleaved)
    return (q, k) if unsqueeze_dim == 1 else (q.transpose(1, 2), k.transpose(1, 2))
