# SPDX-License-Identifier: BSD-3-Clause
"""Rotary position embedding of queries and keys in one launch, forward and backward.

Grid: for each token, programs for groups of HEADS heads of q, then of k. Tensors have four strides, so views
such as ``(B, T, H, D).transpose(1, 2)`` need no copy. The rotated halves are never materialised.
"""

import torch
import triton
import triton.language as tl

from .common import on_device_of, require_dtype

# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def columns(COUNT: tl.constexpr):
    """0, ..., COUNT - 1 as a tile [1, COUNT]. int64, because a head of a strided tensor may span 2^31
    elements."""
    return tl.arange(0, COUNT).to(tl.int64)[None, :]


@triton.jit
def load_pairs(
    rows_ptr, stride, row_mask, half, ROWS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The first and the second elements of the rotated pairs: two float32 tiles [ROWS, HALF]."""
    if INTERLEAVED:
        cols = columns(2 * HALF)
        x = tl.load(rows_ptr + cols * stride, mask=row_mask & (cols < 2 * half), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [ROWS, HALF, 2]))
    else:
        cols = columns(HALF)
        mask = row_mask & (cols < half)
        first = tl.load(rows_ptr + cols * stride, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(rows_ptr + (half + cols) * stride, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(
    rows_ptr, stride, row_mask, half, first, second,
    ROWS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    if INTERLEAVED:
        cols = columns(2 * HALF)
        x = tl.reshape(tl.join(first.to(dtype), second.to(dtype)), [ROWS, 2 * HALF])
        tl.store(rows_ptr + cols * stride, x, mask=row_mask & (cols < 2 * half))
    else:
        cols = columns(HALF)
        mask = row_mask & (cols < half)
        tl.store(rows_ptr + cols * stride, first.to(dtype), mask=mask)
        tl.store(rows_ptr + (half + cols) * stride, second.to(dtype), mask=mask)


@triton.jit
def load_tables(
    cos_ptr, cos_batch_stride, cos_token_stride, cos_dim_stride,
    sin_ptr, sin_batch_stride, sin_token_stride, sin_dim_stride,
    batch, token, half, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The rows of the tables for a token: cos1, cos2, sin1, sin2, each a float32 tile [1, HALF]."""
    one_row = tl.full([1, 1], True, tl.int1)
    cos_row = cos_ptr + batch * cos_batch_stride + token * cos_token_stride + tl.zeros([1, 1], tl.int32)
    sin_row = sin_ptr + batch * sin_batch_stride + token * sin_token_stride + tl.zeros([1, 1], tl.int32)
    cos1, cos2 = load_pairs(cos_row, cos_dim_stride, one_row, half, 1, HALF, INTERLEAVED)
    sin1, sin2 = load_pairs(sin_row, sin_dim_stride, one_row, half, 1, HALF, INTERLEAVED)
    return cos1, cos2, sin1, sin2


@triton.jit
def _rotate_heads(
    x_ptr, x_head_stride, x_dim_stride, out_ptr, out_head_stride, out_dim_stride, first_head, n_heads,
    cos1, cos2, sin1, sin2, half, rest,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    heads = (first_head + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    head_mask = heads < n_heads
    x_rows = x_ptr + heads * x_head_stride
    out_rows = out_ptr + heads * out_head_stride
    x1, x2 = load_pairs(x_rows, x_dim_stride, head_mask, half, HEADS, HALF, INTERLEAVED)
    out1, out2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    store_pairs(out_rows, out_dim_stride, head_mask, half, out1, out2, HEADS, HALF, INTERLEAVED)
    if REST > 0:
        cols = columns(REST)
        mask = head_mask & (cols < rest)
        unrotated = tl.load(x_rows + (2 * half + cols) * x_dim_stride, mask=mask)
        tl.store(out_rows + (2 * half + cols) * out_dim_stride, unrotated, mask=mask)


# The batch strides of the tables are specialised although they depend on the number of tokens: without the
# hint that they are divisible by 16, the loads of the tables are not vectorised.
@triton.jit(do_not_specialize=["n_tokens"])
def rope_kernel(
    q_ptr, q_batch_stride, q_head_stride, q_token_stride, q_dim_stride,
    k_ptr, k_batch_stride, k_head_stride, k_token_stride, k_dim_stride,
    q_out_ptr, q_out_batch_stride, q_out_head_stride, q_out_token_stride, q_out_dim_stride,
    k_out_ptr, k_out_batch_stride, k_out_head_stride, k_out_token_stride, k_out_dim_stride,
    cos_ptr, cos_batch_stride, cos_token_stride, cos_dim_stride,
    sin_ptr, sin_batch_stride, sin_token_stride, sin_dim_stride,
    n_tokens, q_heads, k_heads, half, rest,
    BACKWARD: tl.constexpr, INTERLEAVED: tl.constexpr, Q_GROUPS: tl.constexpr, K_GROUPS: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Consecutive programs have the same token: groups of HEADS heads of q, then of k."""
    group = tl.program_id(0) % (Q_GROUPS + K_GROUPS)
    all_tokens = tl.program_id(0) // (Q_GROUPS + K_GROUPS)
    batch = (all_tokens // n_tokens).to(tl.int64)
    token = (all_tokens % n_tokens).to(tl.int64)
    cos1, cos2, sin1, sin2 = load_tables(
        cos_ptr, cos_batch_stride, cos_token_stride, cos_dim_stride,
        sin_ptr, sin_batch_stride, sin_token_stride, sin_dim_stride, batch, token, half, HALF, INTERLEAVED,
    )  # fmt: skip
    if BACKWARD:
        # The transpose of [[cos1, -sin1], [sin2, cos2]].
        sin1, sin2 = -sin2, -sin1
    if group < Q_GROUPS:
        _rotate_heads(
            q_ptr + batch * q_batch_stride + token * q_token_stride, q_head_stride, q_dim_stride,
            q_out_ptr + batch * q_out_batch_stride + token * q_out_token_stride, q_out_head_stride, q_out_dim_stride,
            group * HEADS, q_heads, cos1, cos2, sin1, sin2, half, rest, HEADS, HALF, REST, INTERLEAVED,
        )  # fmt: skip
    else:
        _rotate_heads(
            k_ptr + batch * k_batch_stride + token * k_token_stride, k_head_stride, k_dim_stride,
            k_out_ptr + batch * k_out_batch_stride + token * k_out_token_stride, k_out_head_stride, k_out_dim_stride,
            (group - Q_GROUPS) * HEADS, k_heads, cos1, cos2, sin1, sin2, half, rest, HEADS, HALF, REST, INTERLEAVED,
        )  # fmt: skip


# --- launchers ----------------------------------------------------------------------------------------------


def table_strides(table):
    """(batch, token, dim) strides of a cosine or sine table with or without a batch dimension; 0 if it is
    broadcast."""
    *batch, token, dim = table.stride()
    return (batch[0] if batch and table.shape[0] > 1 else 0), token, dim


def heads_and_warps(half_block, heads):
    """(HEADS, num_warps) of a program: 16 pairs per thread. Usually one warp; many small programs are
    faster."""
    group = min(max(512 // half_block, 1), triton.next_power_of_2(heads))
    return group, min(max(group * half_block // 512, 1), 8)


def _rope(op, q, k, cos, sin, interleaved, backward, inplace=False):
    torch.ops.liger.check_rope(q, k, cos, sin, interleaved)
    require_dtype(op, "q", q)
    q_out, k_out = (q, k) if inplace else (torch.empty_like(q), torch.empty_like(k))
    batch, q_heads, n_tokens, head_dim = q.shape
    k_heads = k.shape[1]
    if batch * n_tokens * head_dim * (q_heads + k_heads) == 0:
        return q_out, k_out
    half = cos.shape[-1] // 2
    rest = head_dim - 2 * half
    half_block = triton.next_power_of_2(max(half, 1))
    heads, warps = heads_and_warps(half_block, max(q_heads, k_heads))
    q_groups, k_groups = triton.cdiv(q_heads, heads), triton.cdiv(k_heads, heads)
    with on_device_of(q):
        rope_kernel[(batch * n_tokens * (q_groups + k_groups),)](
            q, *q.stride(), k, *k.stride(), q_out, *q_out.stride(), k_out, *k_out.stride(),
            cos, *table_strides(cos), sin, *table_strides(sin), n_tokens, q_heads, k_heads, half, rest,
            backward, interleaved, q_groups, k_groups, heads, half_block,
            triton.next_power_of_2(rest) if rest else 0, num_warps=warps,
        )  # fmt: skip
    return q_out, k_out


def rope(q, k, cos, sin, interleaved=False):
    return _rope("rope", q, k, cos, sin, interleaved, False)


def rope_backward(grad_q_out, grad_k_out, cos, sin, interleaved=False):
    return _rope("rope_backward", grad_q_out, grad_k_out, cos, sin, interleaved, True)


def rope_(q, k, cos, sin, interleaved=False):
    # Each program loads its heads before it stores them.
    _rope("rope_", q, k, cos, sin, interleaved, False, inplace=True)
