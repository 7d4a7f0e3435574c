# SPDX-License-Identifier: BSD-3-Clause
"""Rotary position embedding (Su et al., arXiv 2104.09864): reference kernels, fakes, autograd, API.

Each pair (x1, x2) of the first R elements of a head is rotated by the angle of its token:
``out1 = x1 * cos1 - x2 * sin1``, ``out2 = x2 * cos2 + x1 * sin2``. The other D - R elements are copied. Pairs
are elements i and i + R/2 (the layout of Hugging Face's rotate_half) or, interleaved, elements 2i and 2i + 1
(GPT-J's). cos and sin have one value per element, so cos1 and cos2 may differ.
"""

from typing import Literal

import torch

from ..._core.math.dtypes import accumulate_dtype
from ..._core.op.arguments import FLAG, INTEGER, arguments, check, described
from ..._core.op.autograd import (
    differentiable,
    forbid_autograd,
    may_write_inputs,
    non_overlapping,
    refuse_inplace_leaf,
    without_base,
)
from ..._core.op.fakes import register_fake
from ..._core.op.registration import register_family
from ..._core.op.tensors import check_floating, check_like, wrong_shape
from ..._core.op.vmap import to_front


def rotate(x, cos, sin, interleaved, backward):
    """x (B, H, T, D) rotated, or with ``backward`` multiplied by the transposed rotation; a new tensor with
    the strides of ``torch.empty_like(x)``."""
    wide = accumulate_dtype(x.dtype)
    rotary = cos.shape[-1]
    if interleaved:
        first, second = slice(0, rotary, 2), slice(1, rotary, 2)
    else:
        first, second = slice(0, rotary // 2), slice(rotary // 2, rotary)
    x1, x2 = x[..., first].to(wide), x[..., second].to(wide)
    # A head dimension; the batch dimension of a (T, R) table is broadcast.
    cos, sin = cos.to(wide).unsqueeze(-3), sin.to(wide).unsqueeze(-3)
    cos1, cos2, sin1, sin2 = cos[..., first], cos[..., second], sin[..., first], sin[..., second]
    out = torch.empty_like(x)
    sin_of_second, sin_of_first = (sin2, -sin1) if backward else (-sin1, sin2)
    _write_sum(out[..., first], x1, cos1, x2, sin_of_second)
    _write_sum(out[..., second], x2, cos2, x1, sin_of_first)
    if rotary < x.shape[-1]:
        out[..., rotary:] = x[..., rotary:]
    return out


def _write_sum(out, a, b, c, d):
    """``out = a * b + c * d``, rounded once."""
    if out.dtype == a.dtype:
        torch.mul(a, b, out=out).addcmul_(c, d)
    else:
        out.copy_((a * b).addcmul_(c, d))


# --- torch backend ------------------------------------------------------------------------------------------


def rope_torch(q, k, cos, sin, interleaved=False):
    torch.ops.liger.check_rope(q, k, cos, sin, interleaved)
    return rotate(q, cos, sin, interleaved, False), rotate(k, cos, sin, interleaved, False)


def rope_backward_torch(grad_q_out, grad_k_out, cos, sin, interleaved=False):
    return rotate(grad_q_out, cos, sin, interleaved, True), rotate(grad_k_out, cos, sin, interleaved, True)


def rope__torch(q, k, cos, sin, interleaved=False):
    torch.ops.liger.check_rope(q, k, cos, sin, interleaved)
    for x in (q, k):
        x.copy_(rotate(x, cos, sin, interleaved, False))


register_family("rope", rope_torch, rope_backward_torch, rope__torch)


# --- fakes --------------------------------------------------------------------------------------------------


@register_fake("liger::rope")
def _(q, k, cos, sin, interleaved=False):
    return torch.empty_like(q), torch.empty_like(k)


@register_fake("liger::rope_backward")
def _(grad_q_out, grad_k_out, cos, sin, interleaved=False):
    return torch.empty_like(grad_q_out), torch.empty_like(grad_k_out)


# --- autograd -----------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    _q, _k, cos, sin, ctx.interleaved = inputs
    need_q, need_k, *need_tables = ctx.needs_input_grad[:4]
    if any(need_tables):
        raise RuntimeError("rope: cos or sin requires grad, but rope is differentiable in q and k only")
    if not (need_q and need_k):
        ctx.mark_non_differentiable(
            *(o for o, need in zip(output, (need_q, need_k), strict=True) if not need)
        )
    ctx.save_for_backward(cos, sin)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_q_out, grad_k_out):
    return _rotated(_rope_backward, ctx, grad_q_out, grad_k_out)


def _rotated(op, ctx, q, k):
    """q and k rotated by ``op``. An entry is None if its gradient is missing or not needed."""
    cos, sin = ctx.saved_tensors
    need_q = ctx.needs_input_grad[0] and q is not None
    need_k = ctx.needs_input_grad[1] and k is not None
    if not need_q and not need_k:
        return None, None, None, None, None
    # The op needs both: the other one is passed with zero heads.
    q, k = op(q if need_q else k[:, :0], k if need_k else q[:, :0], cos, sin, ctx.interleaved)
    return q if need_q else None, k if need_k else None, None, None, None


_rope = differentiable(torch.ops.liger.rope.default, _setup, _backward)
# A rotation is linear: the derivative of its backward is the rotation itself.
_rope_backward = differentiable(
    torch.ops.liger.rope_backward.default, _setup, lambda ctx, q, k: _rotated(_rope, ctx, q, k)
)
_rope_ = forbid_autograd("rope_")


class _Inplace(torch.autograd.Function):
    """rope that overwrites q and k with its results. The backward needs neither, and is not in place."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        output = without_base(q), without_base(k)
        _setup(ctx, (q, k, cos, sin, interleaved), output)
        # Detached tensors share the version counters of q and k, so autograd detects the write.
        _rope_(q.detach(), k.detach(), cos, sin, interleaved)
        return output

    @staticmethod
    def backward(ctx, grad_q_out, grad_k_out):
        return _backward(ctx, grad_q_out, grad_k_out)


def _inplace_applies(q, k):
    """True if the in-place form runs. Raises RuntimeError if it would overwrite a parameter."""
    if not may_write_inputs(q, k):
        return False
    if torch.is_grad_enabled():
        refuse_inplace_leaf("rope", ("q", "k"), (q, k))
    return non_overlapping((q, k))


# --- vmap ---------------------------------------------------------------------------------------------------


def tables_to_front(info, in_dims, cos, sin, batch):
    """The tables for a batch of the mapped dimension and ``batch``; unchanged if all elements share them."""
    size = info.batch_size
    if in_dims[0] is not None or in_dims[1] is not None or (cos.dim() == 3 and cos.shape[0] != 1):
        cos, sin = to_front(cos, in_dims[0], size), to_front(sin, in_dims[1], size)
        cos, sin = (t if t.dim() == 4 else t.unsqueeze(1) for t in (cos, sin))
        cos, sin = (t.expand(size, batch, *t.shape[2:]).flatten(0, 1) for t in (cos, sin))
    return cos, sin


def _batched(op):
    def rule(info, in_dims, q, k, cos, sin, interleaved=False):
        size = info.batch_size
        q, k = to_front(q, in_dims[0], size), to_front(k, in_dims[1], size)
        batch = q.shape[1]
        cos, sin = tables_to_front(info, in_dims[2:4], cos, sin, batch)
        outputs = op(q.flatten(0, 1), k.flatten(0, 1), cos, sin, interleaved)
        return tuple(t.unflatten(0, (size, batch)) for t in outputs), (0, 0)

    return rule


torch.library.register_vmap("liger::rope", _batched(torch.ops.liger.rope))
torch.library.register_vmap("liger::rope_backward", _batched(torch.ops.liger.rope_backward))


# --- public API ---------------------------------------------------------------------------------------------


def check_heads_dim(op, unsqueeze_dim):
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"{op}: unsqueeze_dim is {described(unsqueeze_dim)}, expected 1 or 2")


def check_heads(op, q, k, unsqueeze_dim):
    """The checks of q and k in check_rope, for functions that compute the tables of rope; messages name
    ``op``."""
    check_heads_dim(op, unsqueeze_dim)
    order = "(batch, heads, tokens, head_dim)" if unsqueeze_dim == 1 else "(batch, tokens, heads, head_dim)"
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4:
            raise wrong_shape(op, name, x, order)
    check_floating(op, "q", q)
    check_like(op, "k", k, "q", q)
    tokens = 3 - unsqueeze_dim
    if any(k.shape[d] != q.shape[d] for d in (0, tokens, 3)):
        raise wrong_shape(op, "k", k, f"the batch, tokens and head_dim of q, {tuple(q.shape)}")


@arguments(late=True, enters=True, unsqueeze_dim=INTEGER, interleaved=FLAG, inplace=FLAG)
def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: Literal[1, 2] = 1,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys, in one pass over both.

    Args:
        q: (B, Hq, T, D) or, with ``unsqueeze_dim=2``, (B, T, Hq, D); float16, bfloat16 or float32 (float64 on
            the torch backend), any strides: ``.transpose(1, 2)`` views are not copied.
        k: (B, Hk, T, D) or (B, T, Hk, D), the dtype of q; Hk may differ from Hq.
        cos, sin: (T, R), (1, T, R) or (B, T, R), any floating dtype, R even and at most D: the elements from
            R on are copied. They get no gradient.
        unsqueeze_dim: the dimension of the heads in q and k: 1 or 2, as in Hugging Face's
            apply_rotary_pos_emb.
        interleaved: pairs are elements (2i, 2i + 1) instead of (i, i + R/2).
        inplace: the results overwrite q and k. Set it if nothing else reads q and k, such as the outputs of
            projections: autograd raises if it needs their old values. No effect in compiled code, under the
            transforms of torch.func, or if q and k share memory or overlap themselves.

    Returns:
        (q, k) rotated: new tensors (unless ``inplace``) with the dtype and, if dense, the strides of q and k.
        Computed in float32, rounded once. Differentiable in q and k.

    Raises:
        TypeError: an argument of another type.
        ValueError: unsqueeze_dim is neither 1 nor 2.
        RuntimeError: mismatched shapes, dtypes or devices, or cos or sin requires grad. With ``inplace``: q
            or k is a leaf that requires grad.

    Example::

        >>> q, k, angles = torch.randn(1, 8, 10, 64), torch.randn(1, 2, 10, 64), torch.randn(10, 64)
        >>> q, k = liger.rope(q, k, angles.cos(), angles.sin())

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864.
    """
    check_heads_dim("rope", unsqueeze_dim)
    if inplace is not False:
        check("rope", "inplace", inplace, FLAG)
    if interleaved is not False:
        check("rope", "interleaved", interleaved, FLAG)
    if unsqueeze_dim == 2:
        # The op and its messages use (batch, heads, tokens, head_dim).
        q, k = heads_first("rope", "q", q), heads_first("rope", "k", k)
    op = _Inplace.apply if inplace and _inplace_applies(q, k) else _rope
    q, k = op(q, k, cos, sin, interleaved)
    return (q, k) if unsqueeze_dim == 1 else (q.transpose(1, 2), k.transpose(1, 2))


def heads_first(op, name, x):
    if x.dim() != 4:
        raise wrong_shape(op, name, x, "(batch, tokens, heads, head_dim)")
    return x.transpose(1, 2)
