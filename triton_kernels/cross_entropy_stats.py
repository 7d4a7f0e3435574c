# SPDX-License-Identifier: BSD-3-Clause
"""Row statistics of a shard of the classes, for vocabulary-parallel losses, and the gradient of that shard.

One program per row in both kernels. The rule is in :mod:`.cross_entropy_rule`; probabilities are never
materialised.
"""

import torch
import triton
import triton.language as tl

from .._core.head.cross_entropy import check_row_values
from .common import dense_vector, on_device_of, output_rows, require_dtype, rows_of, write_back
from .cross_entropy_rows import streaming_tile
from .cross_entropy_rule import (
    class_weight,
    fill_zeros,
    partial_statistics,
    square_sum,
    store_target_gradient,
    target_logit,
    write_gradient,
)


@triton.jit(do_not_specialize=["n_rows", "vocab_start", "ignore_index"])
def stats_kernel(
    logits_ptr, logits_stride, target_ptr, ce_weight_ptr, stats_ptr, n_rows, n_cols, vocab_start, ignore_index, softcap,
    CLASS_SUM: tl.constexpr, SQUARE_SUM: tl.constexpr, LANES: tl.constexpr, REPEATS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    target = tl.load(target_ptr + row)
    z_max, e_sum, z_target, class_sum, sum_of_squares = 0.0, 1.0, 0.0, 0.0, 1.0
    if target != ignore_index:
        column = target.to(tl.int64) - vocab_start
        in_range = (column >= 0) & (column < n_cols)
        z = target_logit(row_ptr, column, in_range, softcap)
        z_target = tl.where(in_range, z, 0.0)
        z_max, e_sum, class_sum = partial_statistics(
            row_ptr, ce_weight_ptr, n_cols, softcap, CLASS_SUM, LANES, REPEATS, VECTOR
        )
        if SQUARE_SUM:
            sum_of_squares = square_sum(row_ptr, z_max, n_cols, softcap, LANES, REPEATS, VECTOR)
    count = tl.cast(n_rows, tl.int64)
    tl.store(stats_ptr + row, z_max)
    tl.store(stats_ptr + count + row, e_sum)
    tl.store(stats_ptr + 2 * count + row, z_target)
    if CLASS_SUM:
        tl.store(stats_ptr + 3 * count + row, class_sum)
    if SQUARE_SUM:
        tl.store(stats_ptr + (3 + CLASS_SUM) * count + row, sum_of_squares)


@triton.jit(do_not_specialize=["vocab_start", "ignore_index"])
def stats_backward_kernel(
    logits_ptr, logits_stride, out_ptr, out_stride, target_ptr, reference_ptr, coef_exp_ptr, coef_target_ptr,
    coef_class_ptr, coef_log_ptr, ce_weight_ptr, n_cols, vocab_start, ignore_index, softcap,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr, out_row = logits_ptr + row * logits_stride, out_ptr + row * out_stride
    target = tl.load(target_ptr + row)
    if target != ignore_index:
        column = target.to(tl.int64) - vocab_start
        in_range = (column >= 0) & (column < n_cols)
        z_target = target_logit(row_ptr, column, in_range, softcap)
        # In place, another thread may overwrite the target's logit; all threads must have loaded it before.
        tl.debug_barrier()
        reference, coef_exp = tl.load(reference_ptr + row), tl.load(coef_exp_ptr + row)
        # If every logit is -inf, z - reference would be NaN.
        reference = tl.where(reference == float("-inf"), 0.0, reference)
        coef_class = 0.0
        if coef_class_ptr is not None:
            coef_class = tl.load(coef_class_ptr + row)
        coef_log = None
        if coef_log_ptr is not None:
            coef_log = tl.load(coef_log_ptr + row)
        weight = class_weight(ce_weight_ptr, column, in_range)
        write_gradient(
            row_ptr, out_row, reference, ce_weight_ptr, coef_exp, coef_class, 1.0, n_cols, softcap,
            coef_class_ptr is not None, LANES, REPEATS, VECTOR, coef_log,
        )  # fmt: skip
        store_target_gradient(
            out_row, column, in_range, z_target, reference, weight, coef_exp, tl.load(coef_target_ptr + row),
            coef_class, 1.0, softcap, coef_class_ptr is not None, coef_log,
        )  # fmt: skip
    else:
        fill_zeros(out_row, n_cols, LANES * REPEATS * VECTOR)


# --- launchers ----------------------------------------------------------------------------------------------


def _check(op, logits, target, ce_weight, softcap):
    torch.ops.liger.check_cross_entropy(op, logits, target, ce_weight, None, None, 0.0, softcap, "sum")
    require_dtype(op, "logits", logits)


def cross_entropy_stats(
    logits, target, ce_weight, vocab_start, ignore_index, softcap, return_class_sum, return_square_sum=False
):
    _check("cross_entropy_stats", logits, target, ce_weight, softcap)
    n_rows, n_cols = logits.shape
    results = 3 + return_class_sum + return_square_sum
    stats = torch.empty(results, n_rows, dtype=torch.float32, device=logits.device)
    if n_rows == 0:
        return stats
    logits, stride = rows_of(logits)
    tile, warps, _ = streaming_tile(n_cols, logits.element_size(), False)
    with on_device_of(logits):
        stats_kernel[(n_rows,)](
            logits, stride, dense_vector(target), dense_vector(ce_weight) if return_class_sum else None, stats,
            n_rows, n_cols, vocab_start, ignore_index, softcap, return_class_sum, return_square_sum, *tile,
            num_warps=warps,
        )  # fmt: skip
    return stats


def _backward(
    op, out, logits, target, reference, coef_exp, coef_target, coef_class, ce_weight, vocab_start, ignore_index,
    softcap, coef_log,
):  # fmt: skip
    _check(op, logits, target, ce_weight, softcap)
    check_row_values(
        op,
        logits,
        reference=reference,
        coef_exp=coef_exp,
        coef_target=coef_target,
        coef_class=coef_class,
        coef_log=coef_log,
    )
    if logits.shape[0] == 0:
        return
    logits_rows, logits_stride = rows_of(logits)
    out_rows, out_stride = (logits_rows, logits_stride) if out is logits else output_rows(out)
    tile, warps, _ = streaming_tile(logits.shape[1], logits.element_size(), False)
    with on_device_of(logits):
        stats_backward_kernel[(logits.shape[0],)](
            logits_rows, logits_stride, out_rows, out_stride, dense_vector(target), dense_vector(reference),
            dense_vector(coef_exp), dense_vector(coef_target), dense_vector(coef_class), dense_vector(coef_log),
            None if coef_class is None else dense_vector(ce_weight), logits.shape[1], vocab_start, ignore_index,
            softcap, *tile, num_warps=warps,
        )  # fmt: skip
    write_back(out, out_rows)


def cross_entropy_stats_backward(logits, *rest):
    grad_logits = torch.empty_like(logits)
    _backward("cross_entropy_stats_backward", grad_logits, logits, *rest)
    return grad_logits


def cross_entropy_stats_backward_(logits, *rest):
    _backward("cross_entropy_stats_backward_", logits, logits, *rest)
