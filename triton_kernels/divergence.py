# SPDX-License-Identifier: BSD-3-Clause
"""Divergences between rows of student and teacher logits, and the gradient with respect to the student.

One program per row. The forward reads both rows twice, for the online softmax and for the terms; the gradient
reads them once more. Probabilities are never materialised. The twin of csrc/divergence/divergence.cuh.
"""

import torch
import triton
import triton.language as tl

from ..ops.divergence.rows import check_stats, entry_points, mixture_beta
from .common import dense_vector, on_device_of, output_rows, require_dtype, rows_of, warps_for, write_back

# BLOCK at most: columns of both rows per tile.
_BLOCK = 2048
# Values of KIND in the kernels.
_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2, "tvd": 3}


@triton.jit
def _expm1_of_negative(x):
    """exp(x) - 1 for x <= 0. Near 0 by the Taylor series, with a relative truncation error below 3e-8."""
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))
    return tl.where(x > -0.25, series, tl.exp(x) - 1)


@triton.jit
def _log1p_of_negative(x):
    """log(1 + x) for -1 < x <= 0. Near 0 by the series of 2 * atanh(x / (2 + x))."""
    s = x / (2 + x)
    square = s * s
    series = 2 * s * (1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square / 9))))
    return tl.where(x > -0.25, series, tl.log(1 + x))


@triton.jit
def _terms(s, t, max_s, log_sum_s, max_t, log_sum_t, inverse_temperature, beta, KIND: tl.constexpr):
    """(value, derivative with respect to log q, q) of a tile of classes.

    s, t: logits of student and teacher; max and log_sum of each row turn them into log-probabilities. A class
    of probability 0 adds 0, although its logarithm is infinite.
    """
    p = tl.exp((t - max_t) * inverse_temperature - log_sum_t)
    q = tl.exp((s - max_s) * inverse_temperature - log_sum_s)
    # Each row loses its own maximum first: an offset of one would round the other.
    d = ((t - max_t) - (s - max_s)) * inverse_temperature - (log_sum_t - log_sum_s)
    if KIND == 0:
        value = tl.where(p == 0, 0.0, p * d)  # NaN stays
        slope = -p
    elif KIND == 1:
        value = tl.where(q == 0, 0.0, -q * d)
        slope = value + q
    elif KIND == 2:
        # Uses the ratio of the smaller to the larger probability: exact for p near q, and finite.
        of_larger = -_log1p_of_negative(tl.where(d > 0, 1 - beta, beta) * _expm1_of_negative(-tl.abs(d)))
        slope = tl.where(q > 0, (1 - beta) * q * tl.where(d > 0, of_larger - d, of_larger), 0.0)
        value = slope + tl.where(p > 0, beta * p * tl.where(d > 0, of_larger, of_larger + d), 0.0)
    else:
        value = 0.5 * tl.abs(p - q)
        slope = tl.where(q > p, 0.5 * q, tl.where(q < p, -0.5 * q, 0.0))
    return value, slope, q


@triton.jit
def _accumulate(z_max, e_sum, z, inverse_temperature):
    """Online softmax: (maximum, sum of exponentials) of each lane after one more logit."""
    new_max = tl.maximum(z_max, z)
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    e_sum = e_sum * tl.exp((z_max - reference) * inverse_temperature)
    return new_max, e_sum + tl.exp((z - reference) * inverse_temperature)


@triton.jit
def _merge_lanes(z_max, e_sum, inverse_temperature):
    """(maximum, log of the sum of exponentials) of a row, from the values of its lanes."""
    row_max = tl.max(z_max, 0)
    reference = tl.where(row_max == float("-inf"), 0.0, row_max)
    return row_max, tl.log(tl.sum(e_sum * tl.exp((z_max - reference) * inverse_temperature), 0))


@triton.jit
def _write_gradient(
    student_row, teacher_row, out_row, n_cols, valid, upstream, max_s, log_sum_s, max_t, log_sum_t, slope_sum, target,
    cross_entropy, beta, inverse_temperature,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores ``upstream * (slope - q * slope_sum + cross_entropy * (q - onehot))``.

    slope: derivative with respect to log q, summed over the row in slope_sum. NaN if cross_entropy is not 0
    and the target is not a class; 0 in ignored rows.
    """
    lanes = tl.arange(0, BLOCK)
    out_of_range = (cross_entropy != 0) & ((target < 0) | (target >= n_cols))
    hard = tl.where(out_of_range, float("nan"), cross_entropy)
    slope_sum -= hard
    for start in range(0, n_cols, BLOCK):
        mask = start + lanes < n_cols
        s = tl.load(student_row + start + lanes, mask=mask, other=0.0).to(tl.float32)
        t = tl.load(teacher_row + start + lanes, mask=mask, other=0.0).to(tl.float32)
        _, slope, q = _terms(s, t, max_s, log_sum_s, max_t, log_sum_t, inverse_temperature, beta, KIND)
        onehot = tl.where(start + lanes == target, hard, 0.0)
        grad = tl.where(valid, upstream * (slope - q * slope_sum - onehot), 0.0)
        tl.store(out_row + start + lanes, grad.to(out_row.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def forward_kernel(
    student_ptr, student_stride, teacher_ptr, teacher_stride, target_ptr, weight_ptr, loss_ptr, stats_ptr, out_ptr,
    out_stride, n_rows, n_cols, ignore_index, cross_entropy, beta, inverse_temperature,
    KIND: tl.constexpr, LOG_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weighted loss and stats of rows; with ``out_ptr`` also the gradient, which may overwrite the student.

    stats (5, rows): maximum and log-sum of student, of teacher, and slope_sum.
    """
    # int64: past the last tile of 2^31 - 1 columns, a column index exceeds int32.
    n_cols = tl.cast(n_cols, tl.int64)
    row = tl.program_id(0).to(tl.int64)
    student_row, teacher_row = student_ptr + row * student_stride, teacher_ptr + row * teacher_stride
    lanes = tl.arange(0, BLOCK)
    valid, target = True, -1
    if target_ptr is not None:
        target = tl.load(target_ptr + row)
        valid = target != ignore_index
    loss, slope_sum = 0.0, 0.0
    max_s, log_sum_s, max_t, log_sum_t = 0.0, 0.0, 0.0, 0.0
    if valid:
        if not LOG_PROBS:
            lane_max_s = tl.full([BLOCK], float("-inf"), tl.float32)
            lane_sum_s = tl.zeros([BLOCK], tl.float32)
            lane_max_t, lane_sum_t = lane_max_s, lane_sum_s
            for start in range(0, n_cols, BLOCK):
                mask = start + lanes < n_cols
                s = tl.load(student_row + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
                t = tl.load(teacher_row + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
                lane_max_s, lane_sum_s = _accumulate(lane_max_s, lane_sum_s, s, inverse_temperature)
                lane_max_t, lane_sum_t = _accumulate(lane_max_t, lane_sum_t, t, inverse_temperature)
            max_s, log_sum_s = _merge_lanes(lane_max_s, lane_sum_s, inverse_temperature)
            max_t, log_sum_t = _merge_lanes(lane_max_t, lane_sum_t, inverse_temperature)
        values, slopes = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, n_cols, BLOCK):
            mask = start + lanes < n_cols
            s = tl.load(student_row + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
            t = tl.load(teacher_row + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
            value, slope, _ = _terms(
                s, t, max_s, log_sum_s, max_t, log_sum_t, inverse_temperature, beta, KIND
            )
            values += value
            slopes += slope
        loss = tl.sum(values, 0)
        if not LOG_PROBS:
            slope_sum = tl.sum(slopes, 0)
    weight = 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + row)
    if out_ptr is not None:
        _write_gradient(
            student_row, teacher_row, out_ptr + row * out_stride, n_cols, valid, weight * inverse_temperature,
            max_s, log_sum_s, max_t, log_sum_t, slope_sum, target, cross_entropy, beta, inverse_temperature, KIND,
            BLOCK,
        )  # fmt: skip
    count = tl.cast(n_rows, tl.int64)
    tl.store(loss_ptr + row, loss * weight)
    tl.store(stats_ptr + row, max_s)
    tl.store(stats_ptr + count + row, log_sum_s)
    tl.store(stats_ptr + 2 * count + row, max_t)
    tl.store(stats_ptr + 3 * count + row, log_sum_t)
    tl.store(stats_ptr + 4 * count + row, slope_sum)


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def backward_kernel(
    grad_loss_ptr, student_ptr, student_stride, teacher_ptr, teacher_stride, target_ptr, stats_ptr, out_ptr,
    out_stride, n_rows, n_cols, ignore_index, beta, inverse_temperature,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_cols = tl.cast(n_cols, tl.int64)
    row = tl.program_id(0).to(tl.int64)
    student_row, teacher_row = student_ptr + row * student_stride, teacher_ptr + row * teacher_stride
    count = tl.cast(n_rows, tl.int64)
    max_s, log_sum_s = tl.load(stats_ptr + row), tl.load(stats_ptr + count + row)
    max_t, log_sum_t = tl.load(stats_ptr + 2 * count + row), tl.load(stats_ptr + 3 * count + row)
    slope_sum = tl.load(stats_ptr + 4 * count + row)
    upstream = tl.load(grad_loss_ptr + row) * inverse_temperature
    valid = True
    if target_ptr is not None:
        valid = tl.load(target_ptr + row) != ignore_index
    _write_gradient(
        student_row, teacher_row, out_ptr + row * out_stride, n_cols, valid, upstream, max_s, log_sum_s, max_t,
        log_sum_t, slope_sum, -1, 0.0, beta, inverse_temperature, KIND, BLOCK,
    )  # fmt: skip


# --- launchers ----------------------------------------------------------------------------------------------


def _check(op, student, teacher, target, row_weight, divergence, beta, temperature, log_probs):
    torch.ops.liger.check_divergence(
        op, student, teacher, target, row_weight, divergence, beta, temperature, log_probs
    )
    require_dtype(op, "student", student)


def _block(n_cols):
    block = min(triton.next_power_of_2(n_cols), _BLOCK)
    return {"BLOCK": block, "num_warps": warps_for(block)}


def _pairs(student, teacher, out):
    """(student, its row stride, teacher, its row stride, output of the kernel, its row stride).

    If ``out`` is the student, the kernel reads and writes the same rows.
    """
    rows = rows_of(student)
    written = (None, 0) if out is None else rows if out is student else output_rows(out)
    return *rows, *rows_of(teacher), *written


def _expand_to_rows(values, n_rows):
    """(n_rows,) from a tensor with one value, or one per row; None for None."""
    return None if values is None else dense_vector(values.expand(n_rows))


def _forward(op, out, student, teacher, target, row_weight, *options, per_row, cross_entropy=0.0):
    """(loss, stats); the gradient is written to ``out``, unless that is None."""
    divergence, beta, temperature, log_probs, ignore_index = options
    _check(op, student, teacher, target, row_weight, divergence, beta, temperature, log_probs)
    n_rows, n_cols = student.shape
    loss = torch.empty(n_rows, dtype=torch.float32, device=student.device)
    stats = torch.empty(5, n_rows, dtype=torch.float32, device=student.device)
    if n_rows > 0:
        *inputs, written, out_stride = _pairs(student, teacher, out)
        with on_device_of(student):
            forward_kernel[(n_rows,)](
                *inputs, dense_vector(target), _expand_to_rows(row_weight, n_rows), loss, stats, written, out_stride,
                n_rows, n_cols, ignore_index, float(cross_entropy), mixture_beta(beta), 1.0 / temperature,
                _KINDS[divergence], log_probs, **_block(n_cols),
            )  # fmt: skip
        if out is not None:
            write_back(out, written)
    return loss if per_row else loss.sum(), stats


divergence_forward, divergence_forward_, divergence_ce_forward_ = entry_points(_forward)


def divergence_backward(grad_loss, student, teacher, target, stats, *options):
    divergence, beta, temperature, log_probs, ignore_index = options
    op = "divergence_backward"
    _check(op, student, teacher, target, None, divergence, beta, temperature, log_probs)
    check_stats(op, student, grad_loss, stats)
    n_rows, n_cols = student.shape
    grad_student = torch.empty_like(student)
    if n_rows > 0:
        *inputs, written, out_stride = _pairs(student, teacher, grad_student)
        with on_device_of(student):
            backward_kernel[(n_rows,)](
                _expand_to_rows(grad_loss, n_rows), *inputs, dense_vector(target), stats.contiguous(), written,
                out_stride, n_rows, n_cols, ignore_index, mixture_beta(beta), 1.0 / temperature, _KINDS[divergence],
                **_block(n_cols),
            )  # fmt: skip
        write_back(grad_student, written)
    return grad_student
