# SPDX-License-Identifier: BSD-3-Clause
"""RMSNorm of each head of queries and keys, then the rotary embedding. ``liger/ops/rope/qk_norm_rope.py``
has the formulas.

Forward grid as in ``rope.py``: for each token, programs for groups of HEADS heads of q, then of k. Backward
grid: persistent programs over such groups of one tensor. Each accumulates the gradient of the weight in
float32 in its own partial, and a second kernel adds the partials in a fixed order. A head is three tiles: the
first and the second elements of the rotated pairs, and the elements that are not rotated.
"""

import torch
import triton
import triton.language as tl

from .common import dense_vector, on_device_of, require_dtype, require_same_shape, sm_count
from .norm_rows import inverse_rms, round_xhat, sum_partials
from .rope import columns, heads_and_warps, load_pairs, load_tables, store_pairs, table_strides

# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _load_rest(rows_ptr, stride, row_mask, half, rest, REST: tl.constexpr):
    cols = columns(REST)
    x = tl.load(rows_ptr + (2 * half + cols) * stride, mask=row_mask & (cols < rest), other=0.0)
    return x.to(tl.float32)


@triton.jit
def _load_weight(
    weight_ptr, half, rest, offset, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """offset + weight as three rows; 1 without a weight."""
    rest_cols: tl.constexpr = REST if REST > 0 else 1
    if weight_ptr is None:
        first = tl.full([1, HALF], 1.0, tl.float32)
        second = first
        other = tl.full([1, rest_cols], 1.0, tl.float32)
    else:
        row = weight_ptr + tl.zeros([1, 1], tl.int32)
        mask = tl.full([1, 1], True, tl.int1)
        first, second = load_pairs(row, 1, mask, half, 1, HALF, INTERLEAVED)
        first += offset
        second += offset
        other = _load_rest(row, 1, mask, half, rest, rest_cols) + offset
    return first, second, other


@triton.jit
def _normalised(x, rstd, weight, dtype: tl.constexpr, CASTING: tl.constexpr):
    """Rounded to the dtype as if it were stored before the rotation."""
    return (round_xhat(x * rstd, dtype, CASTING) * weight).to(dtype).to(tl.float32)


@triton.jit
def _norm_rotate_heads(
    x_ptr, x_head_stride, x_dim_stride, out_ptr, out_head_stride, out_dim_stride, weight_ptr, first_head, n_heads,
    cos1, cos2, sin1, sin2, half, rest, eps, offset, CASTING: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    heads = (first_head + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    head_mask = heads < n_heads
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_rows = x_ptr + heads * x_head_stride
    out_rows = out_ptr + heads * out_head_stride
    x1, x2 = load_pairs(x_rows, x_dim_stride, head_mask, half, HEADS, HALF, INTERLEAVED)
    w1, w2, w3 = _load_weight(weight_ptr, half, rest, offset, HALF, REST, INTERLEAVED)
    squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
    if REST > 0:
        x3 = _load_rest(x_rows, x_dim_stride, head_mask, half, rest, REST)
        squares += tl.sum(x3 * x3, 1)
    rstd = inverse_rms(squares, 2 * half + rest, eps, dtype, CASTING)[:, None]
    y1 = _normalised(x1, rstd, w1, dtype, CASTING)
    y2 = _normalised(x2, rstd, w2, dtype, CASTING)
    out1, out2 = y1 * cos1 - y2 * sin1, y2 * cos2 + y1 * sin2
    store_pairs(out_rows, out_dim_stride, head_mask, half, out1, out2, HEADS, HALF, INTERLEAVED)
    if REST > 0:
        cols = columns(REST)
        y3 = _normalised(x3, rstd, w3, dtype, CASTING)
        tl.store(out_rows + (2 * half + cols) * out_dim_stride, y3.to(dtype), mask=head_mask & (cols < rest))


@triton.jit(do_not_specialize=["n_tokens"])
def qk_norm_rope_kernel(
    q_ptr, q_batch_stride, q_head_stride, q_token_stride, q_dim_stride,
    k_ptr, k_batch_stride, k_head_stride, k_token_stride, k_dim_stride,
    q_out_ptr, q_out_batch_stride, q_out_head_stride, q_out_token_stride, q_out_dim_stride,
    k_out_ptr, k_out_batch_stride, k_out_head_stride, k_out_token_stride, k_out_dim_stride,
    q_weight_ptr, k_weight_ptr,
    cos_ptr, cos_batch_stride, cos_token_stride, cos_dim_stride,
    sin_ptr, sin_batch_stride, sin_token_stride, sin_dim_stride,
    n_tokens, q_heads, k_heads, half, rest, eps, offset,
    CASTING: tl.constexpr, INTERLEAVED: tl.constexpr, Q_GROUPS: tl.constexpr, K_GROUPS: tl.constexpr,
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
    if group < Q_GROUPS:
        _norm_rotate_heads(
            q_ptr + batch * q_batch_stride + token * q_token_stride, q_head_stride, q_dim_stride,
            q_out_ptr + batch * q_out_batch_stride + token * q_out_token_stride, q_out_head_stride, q_out_dim_stride,
            q_weight_ptr, group * HEADS, q_heads, cos1, cos2, sin1, sin2, half, rest, eps, offset, CASTING,
            HEADS, HALF, REST, INTERLEAVED,
        )  # fmt: skip
    else:
        _norm_rotate_heads(
            k_ptr + batch * k_batch_stride + token * k_token_stride, k_head_stride, k_dim_stride,
            k_out_ptr + batch * k_out_batch_stride + token * k_out_token_stride, k_out_head_stride, k_out_dim_stride,
            k_weight_ptr, (group - Q_GROUPS) * HEADS, k_heads, cos1, cos2, sin1, sin2, half, rest, eps, offset, CASTING,
            HEADS, HALF, REST, INTERLEAVED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_items", "n_tokens"])
def qk_norm_rope_backward_kernel(
    grad_out_ptr, grad_out_batch_stride, grad_out_head_stride, grad_out_token_stride, grad_out_dim_stride,
    x_ptr, x_batch_stride, x_head_stride, x_token_stride, x_dim_stride,
    grad_ptr, grad_batch_stride, grad_head_stride, grad_token_stride, grad_dim_stride,
    weight_ptr, partial_ptr,
    cos_ptr, cos_batch_stride, cos_token_stride, cos_dim_stride,
    sin_ptr, sin_batch_stride, sin_token_stride, sin_dim_stride,
    n_items, n_tokens, n_heads, half, rest, eps, offset,
    CASTING: tl.constexpr, INTERLEAVED: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Persistent programs over n_items = batch * tokens * GROUPS groups of HEADS heads."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rest_cols: tl.constexpr = REST if REST > 0 else 1
    w1, w2, w3 = _load_weight(weight_ptr, half, rest, offset, HALF, REST, INTERLEAVED)
    n_cols = 2 * half + rest
    sum1 = tl.zeros([HEADS, HALF], tl.float32)
    sum2 = tl.zeros([HEADS, HALF], tl.float32)
    sum3 = tl.zeros([HEADS, rest_cols], tl.float32)
    for item in range(tl.program_id(0), n_items, tl.num_programs(0)):
        heads = ((item % GROUPS) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        head_mask = heads < n_heads
        batch = tl.cast(item // GROUPS // n_tokens, tl.int64)
        token = tl.cast(item // GROUPS % n_tokens, tl.int64)
        cos1, cos2, sin1, sin2 = load_tables(
            cos_ptr, cos_batch_stride, cos_token_stride, cos_dim_stride,
            sin_ptr, sin_batch_stride, sin_token_stride, sin_dim_stride, batch, token, half, HALF, INTERLEAVED,
        )  # fmt: skip
        x_rows = x_ptr + batch * x_batch_stride + token * x_token_stride + heads * x_head_stride
        grad_out_rows = (
            grad_out_ptr
            + batch * grad_out_batch_stride
            + token * grad_out_token_stride
            + heads * grad_out_head_stride
        )
        x1, x2 = load_pairs(x_rows, x_dim_stride, head_mask, half, HEADS, HALF, INTERLEAVED)
        g1, g2 = load_pairs(grad_out_rows, grad_out_dim_stride, head_mask, half, HEADS, HALF, INTERLEAVED)
        # The transpose of [[cos1, -sin1], [sin2, cos2]].
        y1, y2 = g1 * cos1 + g2 * sin2, g2 * cos2 - g1 * sin1
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        dot = tl.sum(y1 * w1 * x1, 1) + tl.sum(y2 * w2 * x2, 1)
        if REST > 0:
            x3 = _load_rest(x_rows, x_dim_stride, head_mask, half, rest, REST)
            y3 = _load_rest(grad_out_rows, grad_out_dim_stride, head_mask, half, rest, REST)
            squares += tl.sum(x3 * x3, 1)
            dot += tl.sum(y3 * w3 * x3, 1)
        # Heads that do not exist: without eps their factor would be infinite, and 0 * inf in the sums NaN.
        rstd = tl.where(head_mask, inverse_rms(squares, n_cols, eps, dtype, CASTING)[:, None], 0.0)
        # From left to right: rstd^3 alone may overflow.
        shift = (dot / n_cols)[:, None] * rstd * rstd * rstd
        if partial_ptr is not None:
            sum1 += y1 * round_xhat(x1 * rstd, dtype, CASTING)
            sum2 += y2 * round_xhat(x2 * rstd, dtype, CASTING)
            if REST > 0:
                sum3 += y3 * round_xhat(x3 * rstd, dtype, CASTING)
        if grad_ptr is not None:
            grad_rows = (
                grad_ptr + batch * grad_batch_stride + token * grad_token_stride + heads * grad_head_stride
            )
            store_pairs(
                grad_rows, grad_dim_stride, head_mask, half, rstd * (y1 * w1) - x1 * shift,
                rstd * (y2 * w2) - x2 * shift, HEADS, HALF, INTERLEAVED,
            )  # fmt: skip
            if REST > 0:
                cols = columns(REST)
                tl.store(
                    grad_rows + (2 * half + cols) * grad_dim_stride, (rstd * (y3 * w3) - x3 * shift).to(dtype),
                    mask=head_mask & (cols < rest),
                )  # fmt: skip

    if partial_ptr is not None:
        row = partial_ptr + tl.program_id(0).to(tl.int64) * n_cols + tl.zeros([1, 1], tl.int32)
        one_row = tl.full([1, 1], True, tl.int1)
        total1, total2 = tl.sum(sum1, 0)[None, :], tl.sum(sum2, 0)[None, :]
        store_pairs(row, 1, one_row, half, total1, total2, 1, HALF, INTERLEAVED)
        if REST > 0:
            cols = columns(REST)
            tl.store(row + 2 * half + cols, tl.sum(sum3, 0)[None, :], mask=cols < rest)


# --- launchers ----------------------------------------------------------------------------------------------


def _sizes(q, heads, cos):
    """(half, rest, HALF, REST, HEADS, num_warps)"""
    half = cos.shape[-1] // 2
    rest = q.shape[-1] - 2 * half
    half_block = triton.next_power_of_2(max(half, 1))
    rest_block = triton.next_power_of_2(rest) if rest else 0
    # A head without rotated elements has a tile of one element for its pairs.
    group, warps = heads_and_warps(max(half_block, rest_block // 2), heads)
    return half, rest, half_block, rest_block, group, warps


def qk_norm_rope(
    q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama", interleaved=False
):
    op = "qk_norm_rope"
    torch.ops.liger.check_qk_norm_rope(op, q, k, q_weight, k_weight, cos, sin, casting_mode, eps, offset)
    require_dtype(op, "q", q)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    batch, q_heads, n_tokens, _ = q.shape
    k_heads = k.shape[1]
    if q.numel() + k.numel() == 0:
        return q_out, k_out
    half, rest, half_block, rest_block, heads, warps = _sizes(q, max(q_heads, k_heads), cos)
    q_groups, k_groups = triton.cdiv(q_heads, heads), triton.cdiv(k_heads, heads)
    with on_device_of(q):
        qk_norm_rope_kernel[(batch * n_tokens * (q_groups + k_groups),)](
            q, *q.stride(), k, *k.stride(), q_out, *q_out.stride(), k_out, *k_out.stride(),
            dense_vector(q_weight), dense_vector(k_weight), cos, *table_strides(cos), sin, *table_strides(sin),
            n_tokens, q_heads, k_heads, half, rest, eps, offset, casting_mode, interleaved, q_groups, k_groups,
            heads, half_block, rest_block, num_warps=warps,
        )  # fmt: skip
    return q_out, k_out


def _backward(grad_out, x, weight, cos, sin, eps, offset, casting_mode, interleaved, need_grad, need_weight):
    """(gradient of x, gradient of the weight)"""
    batch, n_heads, n_tokens, head_dim = x.shape
    grad = torch.empty_like(x) if need_grad else x.new_empty(0)
    need_weight = need_weight and weight is not None
    like = x if weight is None else weight
    if x.numel() == 0 or not (need_grad or need_weight):
        return grad, like.new_zeros(head_dim if need_weight else 0)
    half, rest, half_block, rest_block, heads, warps = _sizes(x, n_heads, cos)
    groups = triton.cdiv(n_heads, heads)
    n_items = batch * n_tokens * groups
    programs = min(16 // warps * sm_count(x), n_items)
    grad_weight, partial = like.new_empty(head_dim if need_weight else 0), None
    target = (grad, *grad.stride()) if need_grad else (None, 0, 0, 0, 0)
    if need_weight:
        partial = torch.empty(programs, 1, head_dim, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        qk_norm_rope_backward_kernel[(programs,)](
            grad_out, *grad_out.stride(), x, *x.stride(), *target,
            dense_vector(weight), partial, cos, *table_strides(cos), sin, *table_strides(sin), n_items, n_tokens,
            n_heads, half, rest, eps, offset, casting_mode, interleaved, groups, heads, half_block, rest_block,
            num_warps=warps,
        )  # fmt: skip
        if need_weight:
            sum_partials(partial, [grad_weight])
    return grad, grad_weight


def qk_norm_rope_backward(
    grad_q_out, grad_k_out, q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode, interleaved,
    need_grad_q, need_grad_k, need_grad_q_weight, need_grad_k_weight,
):  # fmt: skip
    op = "qk_norm_rope_backward"
    torch.ops.liger.check_qk_norm_rope(op, q, k, q_weight, k_weight, cos, sin, casting_mode, eps, offset)
    require_dtype(op, "q", q)
    require_same_shape(op, "grad_q_out", grad_q_out, "q", q)
    require_same_shape(op, "grad_k_out", grad_k_out, "k", k)
    options = cos, sin, eps, offset, casting_mode, interleaved
    grad_q, grad_q_weight = _backward(grad_q_out, q, q_weight, *options, need_grad_q, need_grad_q_weight)
    grad_k, grad_k_weight = _backward(grad_k_out, k, k_weight, *options, need_grad_k, need_grad_k_weight)
    return grad_q, grad_k, grad_q_weight, grad_k_weight
