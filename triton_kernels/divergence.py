"""The divergence of rows of student and teacher logits, and its gradient in the student's. A program takes a row."""

import torch
import triton
import triton.language as tl

from ..ops.divergence_torch import check_stats, entry_points
from .common import dense_vector, on_device_of, output_rows, require_dtype, rows_of, warps_for, write_back

# Columns of both rows that a program holds at a time.
_BLOCK = 2048
# The names of KIND in the kernels.
_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2, "tvd": 3}


@triton.jit
def _expm1_of_negative(x):
    """exp(x) - 1 for x <= 0: near 0 by its series, whose first term left out is below 3e-8 of the value."""
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))
    return tl.where(x > -0.25, series, tl.exp(x) - 1)


@triton.jit
def _log1p_of_negative(x):
    """log(1 + x) for -1 < x <= 0: near 0 by the series of atanh."""
    s = x / (2 + x)
    square = s * s
    series = 2 * s * (1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square / 9))))
    return tl.where(x > -0.25, series, tl.log(1 + x))


@triton.jit
def _terms(s, t, high_s, sum_s, high_t, sum_t, inverse_temperature, beta, KIND: tl.constexpr):
    """(value, derivative in log_q, q) of classes by the logits s of the student and t of the teacher, and what makes
    them log-probabilities. A class without probability adds nothing, whatever its logarithm."""
    p = tl.exp((t - high_t) * inverse_temperature - sum_t)
    q = tl.exp((s - high_s) * inverse_temperature - sum_s)
    # log(p / q): of logits that are near each other the difference is exact, that of rounded logarithms is not.
    d = ((t - s) - (high_t - high_s)) * inverse_temperature - (sum_t - sum_s)
    if KIND == 0:
        value = tl.where(p > 0, p * d, 0.0)
        slope = -p
    elif KIND == 1:
        value = tl.where(q > 0, -q * d, 0.0)
        slope = value + q
    elif KIND == 2:
        # By the ratio of the smaller to the larger one: exact for p near q, and finite.
        of_larger = -_log1p_of_negative(tl.where(d > 0, 1 - beta, beta) * _expm1_of_negative(-tl.abs(d)))
        slope = tl.where(q > 0, (1 - beta) * q * tl.where(d > 0, of_larger - d, of_larger), 0.0)
        value = slope + tl.where(p > 0, beta * p * tl.where(d > 0, of_larger, of_larger + d), 0.0)
    else:
        value = 0.5 * tl.abs(p - q)
        slope = tl.where(q > p, 0.5 * q, tl.where(q < p, -0.5 * q, 0.0))
    return value, slope, q


@triton.jit
def _added(high, total, z, inverse_temperature):
    """Each lane's largest logit and sum of exponentials, with one logit more."""
    higher = tl.maximum(high, z)
    reference = tl.where(higher == float("-inf"), 0.0, higher)
    total = total * tl.exp((high - reference) * inverse_temperature)
    return higher, total + tl.exp((z - reference) * inverse_temperature)


@triton.jit
def _normaliser(high, total, inverse_temperature):
    """(largest logit, log of the sum) of a row, from those of the lanes."""
    highest = tl.max(high, 0)
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, tl.log(tl.sum(total * tl.exp((high - reference) * inverse_temperature), 0))


@triton.jit
def _write_gradient(
    student_row, teacher_row, out_row, n_cols, live, upstream, high_s, sum_s, high_t, sum_t, taken, target,
    cross_entropy, beta, inverse_temperature,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``cross_entropy * (softmax - onehot)`` is added to the gradient before the factor ``upstream``: nan where the
    target is no class."""
    lanes = tl.arange(0, BLOCK)
    unknown = (cross_entropy != 0) & ((target < 0) | (target >= n_cols))
    hard = tl.where(unknown, float("nan"), cross_entropy)
    taken -= hard
    for start in range(0, n_cols, BLOCK):
        mask = start + lanes < n_cols
        s = tl.load(student_row + start + lanes, mask=mask, other=0.0).to(tl.float32)
        t = tl.load(teacher_row + start + lanes, mask=mask, other=0.0).to(tl.float32)
        _, slope, q = _terms(s, t, high_s, sum_s, high_t, sum_t, inverse_temperature, beta, KIND)
        onehot = tl.where(start + lanes == target, hard, 0.0)
        grad = tl.where(live, upstream * (slope - q * taken - onehot), 0.0)
        tl.store(out_row + start + lanes, grad.to(out_row.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def forward_kernel(
    student_ptr, student_stride, teacher_ptr, teacher_stride, target_ptr, weight_ptr, loss_ptr, stats_ptr, out_ptr,
    out_stride, n_rows, n_cols, ignore_index, cross_entropy, beta, inverse_temperature,
    KIND: tl.constexpr, LOG_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With ``out_ptr`` the gradient too, perhaps over the student: one more read of both rows, in part from L2."""
    # The first column past the last block of 2^31 - 1 columns is no int32.
    n_cols = tl.cast(n_cols, tl.int64)
    row = tl.program_id(0).to(tl.int64)
    student_row, teacher_row = student_ptr + row * student_stride, teacher_ptr + row * teacher_stride
    lanes = tl.arange(0, BLOCK)
    live, target = True, -1
    if target_ptr is not None:
        target = tl.load(target_ptr + row)
        live = target != ignore_index
    loss, taken = 0.0, 0.0
    high_s, sum_s, high_t, sum_t = 0.0, 0.0, 0.0, 0.0
    if live:
        if not LOG_PROBS:
            highs_s = tl.full([BLOCK], float("-inf"), tl.float32)
            highs_t, sums_s, sums_t = highs_s, tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
            for start in range(0, n_cols, BLOCK):
                mask = start + lanes < n_cols
                s = tl.load(student_row + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
                t = tl.load(teacher_row + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
                highs_s, sums_s = _added(highs_s, sums_s, s, inverse_temperature)
                highs_t, sums_t = _added(highs_t, sums_t, t, inverse_temperature)
            high_s, sum_s = _normaliser(highs_s, sums_s, inverse_temperature)
            high_t, sum_t = _normaliser(highs_t, sums_t, inverse_temperature)
        values, slopes = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, n_cols, BLOCK):
            mask = start + lanes < n_cols
            s = tl.load(student_row + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
            t = tl.load(teacher_row + start + lanes, mask=mask, other=float("-inf")).to(tl.float32)
            value, slope, _ = _terms(s, t, high_s, sum_s, high_t, sum_t, inverse_temperature, beta, KIND)
            values += value
            slopes += slope
        loss = tl.sum(values, 0)
        if not LOG_PROBS:
            taken = tl.sum(slopes, 0)
    weight = 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + row)
    if out_ptr is not None:
        _write_gradient(
            student_row, teacher_row, out_ptr + row * out_stride, n_cols, live, weight * inverse_temperature,
            high_s, sum_s, high_t, sum_t, taken, target, cross_entropy, beta, inverse_temperature, KIND, BLOCK,
        )  # fmt: skip
    count = tl.cast(n_rows, tl.int64)
    tl.store(loss_ptr + row, loss * weight)
    tl.store(stats_ptr + row, high_s)
    tl.store(stats_ptr + count + row, sum_s)
    tl.store(stats_ptr + 2 * count + row, high_t)
    tl.store(stats_ptr + 3 * count + row, sum_t)
    tl.store(stats_ptr + 4 * count + row, taken)


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
    high_s, sum_s = tl.load(stats_ptr + row), tl.load(stats_ptr + count + row)
    high_t, sum_t = tl.load(stats_ptr + 2 * count + row), tl.load(stats_ptr + 3 * count + row)
    taken = tl.load(stats_ptr + 4 * count + row)
    upstream = tl.load(grad_loss_ptr + row) * inverse_temperature
    live = True
    if target_ptr is not None:
        live = tl.load(target_ptr + row) != ignore_index
    _write_gradient(
        student_row, teacher_row, out_ptr + row * out_stride, n_cols, live, upstream, high_s, sum_s, high_t, sum_t,
        taken, -1, 0.0, beta, inverse_temperature, KIND, BLOCK,
    )  # fmt: skip


# --- launchers ----------------------------------------------------------------------------------------------------


def _check(op, student, teacher, target, row_weight, divergence, beta, temperature, log_probs):
    torch.ops.liger.check_divergence(
        op, student, teacher, target, row_weight, divergence, beta, temperature, log_probs
    )
    require_dtype(op, "student", student)


def _block(n_cols):
    block = min(triton.next_power_of_2(n_cols), _BLOCK)
    return {"BLOCK": block, "num_warps": warps_for(block)}


def _pairs(student, teacher, out):
    """(student, its row stride, teacher, its row stride, what the gradient is written to, its row stride).

    Where ``out`` is the student, the rows that are read are those that are written.
    """
    rows = rows_of(student)
    written = (None, 0) if out is None else rows if out is student else output_rows(out)
    return *rows, *rows_of(teacher), *written


def _of_rows(values, n_rows):
    """One value for each row, of a tensor that has one for all of them, or of None."""
    return None if values is None else dense_vector(values.expand(n_rows))


def _forward(op, out, student, teacher, target, row_weight, *options, per_row, cross_entropy=0.0):
    """(loss, stats); the gradient goes to ``out``, unless it is None."""
    divergence, beta, temperature, log_probs, ignore_index = options
    _check(op, student, teacher, target, row_weight, divergence, beta, temperature, log_probs)
    n_rows, n_cols = student.shape
    loss = torch.empty(n_rows, dtype=torch.float32, device=student.device)
    stats = torch.empty(5, n_rows, dtype=torch.float32, device=student.device)
    if n_rows > 0:
        *inputs, written, out_stride = _pairs(student, teacher, out)
        with on_device_of(student):
            forward_kernel[(n_rows,)](
                *inputs, dense_vector(target), _of_rows(row_weight, n_rows), loss, stats, written, out_stride, n_rows,
                n_cols, ignore_index, float(cross_entropy), beta, 1.0 / temperature, _KINDS[divergence], log_probs,
                **_block(n_cols),
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
                _of_rows(grad_loss, n_rows), *inputs, dense_vector(target), stats.contiguous(), written, out_stride,
                n_rows, n_cols, ignore_index, beta, 1.0 / temperature, _KINDS[divergence], **_block(n_cols),
            )  # fmt: skip
        write_back(grad_student, written)
    return grad_student
