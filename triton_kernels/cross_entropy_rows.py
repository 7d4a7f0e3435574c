# SPDX-License-Identifier: BSD-3-Clause
"""The row kernel of cross_entropy and fused_linear_ce, and its launches; docs/guides/cross_entropy.md defines
every term.

forward_kernel: persistent programs, each with one row at a time, by the rule in :mod:`.cross_entropy_rule`.
One pass over the logits computes the online-softmax statistics per lane, merged at the end of the row. The
gradient is a second pass in reverse order; the grid has no more programs than rows fit the L2 cache. A row
that fits the registers of its program is read once for both. reduce_kernel: one program sums the results of
rows in a fixed order. Probabilities are never materialised.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .._core.head.cross_entropy import check_targets
from .._core.runtime.environment import targets_checked
from .common import dense_vector, on_device_of, sm_count
from .cross_entropy_rule import (
    class_weight,
    coefficients,
    fill_zeros,
    load_row,
    statistics,
    store_gradient,
    store_target_gradient,
    target_logit,
    tile_statistics,
    write_gradient,
)

# Rows up to this size remain in registers between statistics and gradient; elements per thread.
_REGISTER_ROW_BYTES = 32768
_ELEMENTS_PER_THREAD = 16
# Vectors per thread in a tile of a longer row: for one pass, and for two passes.
_REPEATS, _REPEATS_TWO_PASSES = 2, 4
# Bytes of the L2 cache per SM for rows that are read twice: 50 MB over the 132 SMs of an H100 or H200, minus
# room for the gradient.
_L2_BYTES_PER_SM = 294912
_REDUCE_WARPS = 8

# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _row(
    index, logits_ptr, logits_stride, out_ptr, out_stride, target_ptr, ce_weight_ptr, token_weight_ptr,
    class_weight_sum_ptr, used_denominator_ptr, loss_ptr, z_loss_ptr, predicted_ptr, logprobs_ptr, entropy_ptr,
    stats_ptr, all_rows, first_row, n_cols, ignore_index, label_smoothing, lse_square_scale, softcap,
    SMOOTHING: tl.constexpr, CHECK_TARGETS: tl.constexpr, IN_REGISTERS: tl.constexpr,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row_ptr = logits_ptr + index * logits_stride
    row = first_row + index
    if out_ptr is not None:
        out_ptr += index * out_stride
    target = tl.load(target_ptr + row)
    valid = target != ignore_index
    in_range = valid & (target >= 0) & (target < n_cols)
    if CHECK_TARGETS:
        if valid & (in_range == 0):
            tl.device_print("liger: target out of range at row", row)
        tl.device_assert(in_range | (valid == 0), "liger: target out of range")
    loss, z_loss, logprob, entropy, z_max, e_sum = 0.0, 0.0, 0.0, 0.0, 0.0, 1.0
    best = -1
    if valid:
        # Loaded before the gradient may overwrite it: the reductions of the statistics are barriers in
        # between.
        z_target = target_logit(row_ptr, target, in_range, softcap)
        weight = class_weight(ce_weight_ptr, target, in_range)
        # Makes all results NaN if the target is not a class.
        scale = tl.where(in_range, 1.0, float("nan"))
        if IN_REGISTERS:
            x, cols, mask = load_row(row_ptr, n_cols, LANES, REPEATS, VECTOR)
            z_max, e_sum, entropy, best, weighted_sum = tile_statistics(
                x, cols, mask, ce_weight_ptr, n_cols, softcap,
                predicted_ptr is not None, entropy_ptr is not None, SMOOTHING, LANES,
            )  # fmt: skip
        else:
            z_max, e_sum, entropy, best, weighted_sum = statistics(
                row_ptr, ce_weight_ptr, n_cols, softcap,
                predicted_ptr is not None, entropy_ptr is not None, SMOOTHING, out_ptr is not None,
                LANES, REPEATS, VECTOR,
            )  # fmt: skip
        log_sum = tl.log(e_sum)
        lse = z_max + log_sum
        # Not minus lse: an offset of all logits goes before anything is rounded.
        logprob = scale * ((z_target - z_max) - log_sum)
        if token_weight_ptr is not None:
            scale *= tl.load(token_weight_ptr + row).to(tl.float32)
        # A term with coefficient 0 is skipped, because its factor may be infinite.
        z_loss = tl.where(lse_square_scale == 0.0, 0.0, lse_square_scale * weight * lse * lse)
        loss = z_loss + tl.where(label_smoothing == 1.0, 0.0, -(1.0 - label_smoothing) * weight * logprob)
        if SMOOTHING:
            weight_sum = n_cols if ce_weight_ptr is None else tl.load(class_weight_sum_ptr)
            loss += label_smoothing / n_cols * (weight_sum * log_sum - weighted_sum)
        loss *= scale
        z_loss *= scale
        if out_ptr is not None:
            upstream = scale / tl.load(used_denominator_ptr)
            coef_exp, coef_target, coef_class = coefficients(
                ce_weight_ptr, class_weight_sum_ptr, weight, z_max, e_sum, n_cols, label_smoothing, lse_square_scale,
                SMOOTHING,
            )  # fmt: skip
            if IN_REGISTERS:
                store_gradient(
                    out_ptr, x, cols, mask, z_max, ce_weight_ptr, coef_exp, coef_class, upstream, softcap, SMOOTHING
                )  # fmt: skip
            else:
                write_gradient(
                    row_ptr, out_ptr, z_max, ce_weight_ptr, coef_exp, coef_class, upstream, n_cols, softcap, SMOOTHING,
                    LANES, REPEATS, VECTOR,
                )  # fmt: skip
            store_target_gradient(
                out_ptr, target, in_range, z_target, z_max, weight, coef_exp, coef_target, coef_class, upstream,
                softcap, SMOOTHING,
            )  # fmt: skip
    elif out_ptr is not None:
        fill_zeros(out_ptr, n_cols, LANES * REPEATS * VECTOR)
    tl.store(loss_ptr + row, loss)
    tl.store(stats_ptr + row, z_max)
    tl.store(stats_ptr + tl.cast(all_rows, tl.int64) + row, e_sum)
    if z_loss_ptr is not None:
        tl.store(z_loss_ptr + row, z_loss)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + row, best)
    if logprobs_ptr is not None:
        tl.store(logprobs_ptr + row, logprob)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)


@triton.jit(do_not_specialize=["all_rows", "first_row", "n_rows", "ignore_index"])
def forward_kernel(
    logits_ptr, logits_stride, out_ptr, out_stride, target_ptr, ce_weight_ptr, token_weight_ptr, class_weight_sum_ptr,
    used_denominator_ptr, loss_ptr, z_loss_ptr, predicted_ptr, logprobs_ptr, entropy_ptr, stats_ptr,
    all_rows, first_row, n_rows, n_cols, ignore_index, label_smoothing, lse_square_scale, softcap,
    SMOOTHING: tl.constexpr, CHECK_TARGETS: tl.constexpr, IN_REGISTERS: tl.constexpr,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Loss and metrics of rows and, with ``out_ptr``, their gradient. Logits and gradient start at
    ``first_row``.

    IN_REGISTERS: a tile is a whole row, and ``out_ptr`` is given.
    """
    for index in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        _row(
            tl.cast(index, tl.int64), logits_ptr, logits_stride, out_ptr, out_stride, target_ptr, ce_weight_ptr,
            token_weight_ptr, class_weight_sum_ptr, used_denominator_ptr, loss_ptr, z_loss_ptr, predicted_ptr,
            logprobs_ptr, entropy_ptr, stats_ptr, all_rows, first_row, n_cols, ignore_index, label_smoothing,
            lse_square_scale, softcap, SMOOTHING, CHECK_TARGETS, IN_REGISTERS, LANES, REPEATS, VECTOR,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def reduce_kernel(
    target_ptr, ce_weight_ptr, denominator_ptr, loss_rows_ptr, z_loss_rows_ptr, predicted_ptr,
    loss_ptr, z_loss_ptr, token_accuracy_ptr, used_denominator_ptr, n_rows, n_cols, ignore_index,
    MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scalars from per-row results, each optional; one program.

    The denominator is loaded from ``denominator_ptr``; without it, it is the sum of class weights (MEAN) or
    1.
    """
    weights = tl.zeros([BLOCK], tl.float32)
    losses = tl.zeros([BLOCK], tl.float32)
    z_losses = tl.zeros([BLOCK], tl.float32)
    correct = tl.zeros([BLOCK], tl.float32)
    valid_rows = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_rows, BLOCK):
        rows = (start + tl.arange(0, BLOCK)).to(tl.int64)
        mask = rows < n_rows
        target = tl.load(target_ptr + rows, mask=mask, other=0)
        valid = mask & (target != ignore_index)
        in_range = valid & (target >= 0) & (target < n_cols)
        if MEAN and denominator_ptr is None:
            weights += class_weight(ce_weight_ptr, target, in_range)
        if loss_ptr is not None:
            losses += tl.load(loss_rows_ptr + rows, mask=mask, other=0.0)
        if z_loss_ptr is not None:
            z_losses += tl.load(z_loss_rows_ptr + rows, mask=mask, other=0.0)
        if token_accuracy_ptr is not None:
            predicted = tl.load(predicted_ptr + rows, mask=mask, other=-1)
            correct += tl.where(in_range & (predicted == target), 1.0, 0.0)
            valid_rows += tl.where(valid, 1.0, 0.0)
    if denominator_ptr is not None:
        denominator = tl.load(denominator_ptr).to(tl.float32)
    elif MEAN:
        denominator = tl.sum(weights, 0)
    else:
        denominator = 1.0
    if loss_ptr is not None:
        tl.store(loss_ptr, tl.sum(losses, 0) / denominator)
    if z_loss_ptr is not None:
        tl.store(z_loss_ptr, tl.sum(z_losses, 0) / denominator)
    if token_accuracy_ptr is not None:
        tl.store(token_accuracy_ptr, tl.sum(correct, 0) / tl.sum(valid_rows, 0))
    if used_denominator_ptr is not None:
        tl.store(used_denominator_ptr, denominator)


# --- launchers ----------------------------------------------------------------------------------------------


@dataclass
class Rule:
    """The options of a call in the form that the kernels take; ``op`` is the name in error messages."""

    op: str
    n_cols: int
    target: torch.Tensor
    ce_weight: torch.Tensor | None
    token_weight: torch.Tensor | None
    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    softcap: float | None

    def __post_init__(self):
        # The interpreter ignores device_assert, so CPU targets are checked here. On a GPU a target out of
        # range makes its row NaN, or stops the kernel by device_assert if LIGER_CHECK_TARGETS=1.
        if not self.target.is_cuda:
            check_targets(self.op, self.target, self.n_cols, self.ignore_index)
        self.check_targets = self.target.is_cuda and targets_checked()
        self.target, self.ce_weight, self.token_weight = map(
            dense_vector, (self.target, self.ce_weight, self.token_weight)
        )
        self.smoothing = self.label_smoothing != 0.0
        self.class_weight_sum = None
        if self.smoothing and self.ce_weight is not None:
            self.class_weight_sum = self.ce_weight.sum(dtype=torch.float32)

    @classmethod
    def of_options(cls, op, n_cols, target, options):
        """From :class:`CEOptions`."""
        return cls(
            op, n_cols, target, options.ce_weight, options.token_weight, options.ignore_index,
            options.label_smoothing, options.lse_square_scale, options.softcap,
        )  # fmt: skip

    def buffer(self, shape, needed, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=self.target.device) if needed else None

    def no_tensor(self, dtype=torch.float32):
        return torch.empty(0, dtype=dtype, device=self.target.device)


def streaming_tile(n_cols, itemsize, read_again):
    """((LANES, REPEATS, VECTOR), num_warps, concurrent rows per SM or None) of programs with several tiles
    per row.

    ``read_again``: a second pass computes the gradient, so the rows of all programs must fit the L2 cache.
    """
    rows, repeats = None, _REPEATS
    if read_again:
        repeats = _REPEATS_TWO_PASSES
        rows = max(_L2_BYTES_PER_SM // (n_cols * itemsize), 1)
        warps = 32 if rows == 1 else 16 if rows <= 3 else 8
    else:
        warps = 4 if n_cols <= 4096 else 8
    return (32 * warps, repeats, 16 // itemsize), warps, rows


class RowResults:
    """The results of the row kernel for all rows of a call; None for those that are not requested."""

    def __init__(self, rule, z_loss, token_accuracy, argmax, logprobs, entropy):
        rows = rule.target.shape
        self.rule, self.token_accuracy, self.argmax = rule, token_accuracy, argmax
        self.loss, self.stats = rule.buffer(rows, True), rule.buffer((2, *rows), True)
        self.z_loss = rule.buffer(rows, z_loss)
        self.predicted = rule.buffer(rows, argmax or token_accuracy, torch.int64)
        self.logprobs, self.entropy = rule.buffer(rows, logprobs), rule.buffer(rows, entropy)

    def fill(
        self, logits, logits_stride, first_row, used_denominator=None, gradient=None, gradient_stride=None
    ):
        """Computes rows ``first_row`` to ``first_row + len(logits)``.

        With a denominator it also writes the gradient of (sum of losses / denominator), to ``gradient`` or
        over the logits.
        """
        rule = self.rule
        if logits.shape[0] == 0:
            return
        # Metrics, smoothing and softcap need more registers: the longest rows would spill.
        no_extras = (
            self.predicted is None and self.entropy is None and not rule.smoothing and rule.softcap is None
        )
        itemsize, with_gradient = logits.element_size(), used_denominator is not None
        longest = (_REGISTER_ROW_BYTES if no_extras else _REGISTER_ROW_BYTES // 2) // itemsize
        in_registers = with_gradient and rule.n_cols <= longest
        programs = logits.shape[0]
        if in_registers:
            block = triton.next_power_of_2(rule.n_cols)
            warps = min(max(block // (32 * _ELEMENTS_PER_THREAD), 4), 32)
            tile = 32 * warps, max(block * itemsize // (512 * warps), 1), 16 // itemsize
        else:
            tile, warps, rows_per_sm = streaming_tile(rule.n_cols, itemsize, with_gradient)
            if rows_per_sm is not None:
                programs = min(programs, rows_per_sm * sm_count(logits))
        if with_gradient and gradient is None:
            gradient, gradient_stride = logits, logits_stride
        with on_device_of(logits):
            forward_kernel[(programs,)](
                logits, logits_stride, gradient, gradient_stride, rule.target, rule.ce_weight, rule.token_weight,
                rule.class_weight_sum, used_denominator, self.loss, self.z_loss, self.predicted, self.logprobs,
                self.entropy, self.stats, self.loss.shape[0], first_row, logits.shape[0], rule.n_cols,
                rule.ignore_index, rule.label_smoothing, rule.lse_square_scale, rule.softcap, rule.smoothing,
                rule.check_targets, in_registers, *tile,
                num_warps=warps, debug=rule.check_targets,
            )  # fmt: skip

    def used_denominator(self, denominator, reduction):
        """The denominator of the reduction as a device scalar, before any row is computed."""
        used = self.rule.buffer((), True)
        self._reduce(denominator, reduction, None, None, None, used)
        return used

    def reduced(self, denominator, reduction, used_denominator=None):
        """(loss, z_loss, token_accuracy, argmax, logprobs, entropy) as the ops return them.

        Also writes the denominator to ``used_denominator``.
        """
        rule, scalar = self.rule, reduction != "none"
        loss = rule.buffer((), scalar)
        z_loss = rule.buffer((), scalar and self.z_loss is not None)
        accuracy = rule.buffer((), self.token_accuracy)
        if scalar or self.token_accuracy or used_denominator is not None:
            self._reduce(denominator, reduction, loss, z_loss, accuracy, used_denominator)
        results = [loss, z_loss, accuracy] if scalar else [self.loss, self.z_loss, accuracy]
        results += [
            self.predicted if self.argmax else rule.no_tensor(torch.int64),
            self.logprobs,
            self.entropy,
        ]
        return tuple(rule.no_tensor() if r is None else r for r in results)

    def _reduce(self, denominator, reduction, loss, z_loss, accuracy, used_denominator):
        rule = self.rule
        with on_device_of(rule.target):
            reduce_kernel[(1,)](
                rule.target, rule.ce_weight, denominator, self.loss, self.z_loss, self.predicted,
                loss, z_loss, accuracy, used_denominator, rule.target.shape[0], rule.n_cols, rule.ignore_index,
                reduction == "mean", 2048, num_warps=_REDUCE_WARPS,
            )  # fmt: skip
