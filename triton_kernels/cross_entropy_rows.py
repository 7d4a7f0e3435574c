"""The row kernel of cross_entropy and fused_linear_ce, and its launches; docs/cross_entropy.md defines every term.

A program takes a row at a time, by the rule in :mod:`.cross_entropy_rule`. It walks over the logits once for the
statistics, every lane keeping its own running maximum and sums, which are merged at the end of the row; the gradient is
a second walk, backwards, and no more programs share the rows than the L2 cache keeps rows for. A row that fits into the
registers of its program is read once for both. A last kernel of one program reduces the per-row results in a fixed
order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .._core.cross_entropy_math import check_targets
from ..backend import targets_checked
from .common import dense_vector, multiprocessors, on_device_of
from .cross_entropy_rule import (
    capped,
    class_weight,
    coefficients,
    fill_zeros,
    load_row,
    statistics,
    store_gradient,
    store_target_gradient,
    tile_statistics,
    write_gradient,
)

# A row of up to so many bytes stays in registers for its gradient, so many elements to a thread.
_RESIDENT_BYTES = 32768
_RESIDENT_PER_THREAD = 16
# Vectors of a thread in a tile of a longer row, and in one of a row that is read twice.
_REPEATS, _REPEATS_TWICE = 2, 4
# Bytes of the L2 cache for each multiprocessor, 132 of which share 50 MB on an H100 or H200, with room for what is
# written. A row that is read twice should be there the second time.
_L2_SHARE = 294912
_REDUCE_WARPS = 8

# --- kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def _row(
    index, logits_ptr, logits_stride, out_ptr, out_stride, target_ptr, ce_weight_ptr, token_weight_ptr,
    class_weight_sum_ptr, used_denominator_ptr, loss_ptr, z_loss_ptr, predicted_ptr, logprobs_ptr, entropy_ptr, lse_ptr,
    first_row, n_cols, ignore_index, label_smoothing, lse_square_scale, softcap,
    SMOOTHING: tl.constexpr, CHECK_TARGETS: tl.constexpr, RESIDENT: tl.constexpr,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row_ptr = logits_ptr + index * logits_stride
    row = first_row + index
    if out_ptr is not None:
        out_ptr += index * out_stride
    target = tl.load(target_ptr + row)
    live = target != ignore_index
    valid = live & (target >= 0) & (target < n_cols)
    if CHECK_TARGETS:
        if live & (valid == 0):
            tl.device_print("liger: target out of range at row", row)
        tl.device_assert(valid | (live == 0), "liger: target out of range")
    loss, z_loss, logprob, entropy, lse = 0.0, 0.0, 0.0, 0.0, 0.0
    best = -1
    if live:
        # Read before the gradient overwrites it; every thread passes the barriers of the statistics in between.
        z_target = capped(tl.load(row_ptr + target, mask=valid, other=0.0).to(tl.float32), softcap)
        weight = class_weight(ce_weight_ptr, target, valid)
        # Makes everything nan where the target is no class.
        share = tl.where(valid, 1.0, float("nan"))
        # Differences from the target's logit, so that a large common part of the logits cancels.
        shift = tl.where(tl.abs(z_target) < float("inf"), z_target, 0.0)
        if RESIDENT:
            x, cols, mask = load_row(row_ptr, n_cols, LANES, REPEATS, VECTOR)
            lse, entropy, best, smooth = tile_statistics(
                x, cols, mask, ce_weight_ptr, n_cols, softcap, shift,
                predicted_ptr is not None, entropy_ptr is not None, SMOOTHING, LANES,
            )  # fmt: skip
        else:
            lse, entropy, best, smooth = statistics(
                row_ptr, ce_weight_ptr, n_cols, softcap, shift,
                predicted_ptr is not None, entropy_ptr is not None, SMOOTHING, out_ptr is not None,
                LANES, REPEATS, VECTOR,
            )  # fmt: skip
        logprob = share * (z_target - lse)
        if token_weight_ptr is not None:
            share *= tl.load(token_weight_ptr + row).to(tl.float32)
        # A part whose coefficient is zero is left out: its factor may be infinite.
        z_loss = tl.where(lse_square_scale == 0.0, 0.0, lse_square_scale * weight * lse * lse)
        loss = z_loss + tl.where(
            label_smoothing == 1.0, 0.0, (1.0 - label_smoothing) * weight * (lse - z_target)
        )
        if SMOOTHING:
            weight_sum = n_cols if ce_weight_ptr is None else tl.load(class_weight_sum_ptr)
            loss += label_smoothing / n_cols * (weight_sum * (lse - shift) - smooth)
        loss *= share
        z_loss *= share
        if out_ptr is not None:
            upstream = share / tl.load(used_denominator_ptr)
            coef_exp, coef_target, coef_class = coefficients(
                ce_weight_ptr, class_weight_sum_ptr, weight, lse, n_cols, label_smoothing, lse_square_scale, SMOOTHING
            )  # fmt: skip
            if RESIDENT:
                store_gradient(
                    out_ptr, x, cols, mask, lse, ce_weight_ptr, coef_exp, coef_class, upstream, softcap, SMOOTHING
                )  # fmt: skip
            else:
                write_gradient(
                    row_ptr, out_ptr, lse, ce_weight_ptr, coef_exp, coef_class, upstream, n_cols, softcap, SMOOTHING,
                    LANES, REPEATS, VECTOR,
                )  # fmt: skip
            store_target_gradient(
                out_ptr, target, valid, z_target, lse, weight, coef_exp, coef_target, coef_class, upstream, softcap,
                SMOOTHING,
            )  # fmt: skip
    elif out_ptr is not None:
        fill_zeros(out_ptr, n_cols, LANES * REPEATS * VECTOR)
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)
    if z_loss_ptr is not None:
        tl.store(z_loss_ptr + row, z_loss)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + row, best)
    if logprobs_ptr is not None:
        tl.store(logprobs_ptr + row, logprob)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)


@triton.jit(do_not_specialize=["first_row", "n_rows", "ignore_index"])
def forward_kernel(
    logits_ptr, logits_stride, out_ptr, out_stride, target_ptr, ce_weight_ptr, token_weight_ptr, class_weight_sum_ptr,
    used_denominator_ptr, loss_ptr, z_loss_ptr, predicted_ptr, logprobs_ptr, entropy_ptr, lse_ptr,
    first_row, n_rows, n_cols, ignore_index, label_smoothing, lse_square_scale, softcap,
    SMOOTHING: tl.constexpr, CHECK_TARGETS: tl.constexpr, RESIDENT: tl.constexpr,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Loss and metrics of rows and, with ``out_ptr``, their gradient. Logits and gradient start at ``first_row``.

    RESIDENT: a tile is a whole row, and a gradient is wanted.
    """
    for index in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        _row(
            tl.cast(index, tl.int64), logits_ptr, logits_stride, out_ptr, out_stride, target_ptr, ce_weight_ptr,
            token_weight_ptr, class_weight_sum_ptr, used_denominator_ptr, loss_ptr, z_loss_ptr, predicted_ptr,
            logprobs_ptr, entropy_ptr, lse_ptr, first_row, n_cols, ignore_index, label_smoothing, lse_square_scale,
            softcap, SMOOTHING, CHECK_TARGETS, RESIDENT, LANES, REPEATS, VECTOR,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def reduce_kernel(
    target_ptr, ce_weight_ptr, denominator_ptr, loss_rows_ptr, z_loss_rows_ptr, predicted_ptr,
    loss_ptr, z_loss_ptr, token_accuracy_ptr, used_denominator_ptr, n_rows, n_cols, ignore_index,
    MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scalars from per-row results. Each result is optional; the denominator is given, or counted for a mean, or 1."""
    weights = tl.zeros([BLOCK], tl.float32)
    losses = tl.zeros([BLOCK], tl.float32)
    z_losses = tl.zeros([BLOCK], tl.float32)
    hits = tl.zeros([BLOCK], tl.float32)
    lives = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_rows, BLOCK):
        rows = (start + tl.arange(0, BLOCK)).to(tl.int64)
        mask = rows < n_rows
        target = tl.load(target_ptr + rows, mask=mask, other=0)
        live = mask & (target != ignore_index)
        valid = live & (target >= 0) & (target < n_cols)
        if MEAN and denominator_ptr is None:
            weights += class_weight(ce_weight_ptr, target, valid)
        if loss_ptr is not None:
            losses += tl.load(loss_rows_ptr + rows, mask=mask, other=0.0)
        if z_loss_ptr is not None:
            z_losses += tl.load(z_loss_rows_ptr + rows, mask=mask, other=0.0)
        if token_accuracy_ptr is not None:
            predicted = tl.load(predicted_ptr + rows, mask=mask, other=-1)
            hits += tl.where(valid & (predicted == target), 1.0, 0.0)
            lives += tl.where(live, 1.0, 0.0)
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
        tl.store(token_accuracy_ptr, tl.sum(hits, 0) / tl.sum(lives, 0))
    if used_denominator_ptr is not None:
        tl.store(used_denominator_ptr, denominator)


# --- launchers ----------------------------------------------------------------------------------------------------


@dataclass
class Rule:
    """The options of a call, as the kernels take them. ``op`` is the name in the errors."""

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
        # On the CPU, which is to say under the interpreter, here: it ignores device_assert. On a GPU a target out of
        # range makes its row nan, or with LIGER_CHECK_TARGETS=1 stops the kernel by device_assert.
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

    def buffer(self, shape, wanted, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=self.target.device) if wanted else None

    def no_tensor(self, dtype=torch.float32):
        return torch.empty(0, dtype=dtype, device=self.target.device)


def walking_tile(n_cols, itemsize, read_again):
    """((lanes, repeats, vector), warps, rows under way per multiprocessor or None) of programs that walk over rows.

    ``read_again``: once for the statistics, and once for the gradient.
    """
    rows, repeats = None, _REPEATS
    if read_again:
        repeats = _REPEATS_TWICE
        rows = max(_L2_SHARE // (n_cols * itemsize), 1)
        warps = 32 if rows == 1 else 16 if rows <= 3 else 8
    else:
        warps = 4 if n_cols <= 4096 else 8
    return (32 * warps, repeats, 16 // itemsize), warps, rows


class RowResults:
    """What the row kernel writes, for all rows of a call; None for what was not asked for."""

    def __init__(self, rule, z_loss, token_accuracy, predicted_tokens, logprobs, entropy):
        rows = rule.target.shape
        self.rule, self.token_accuracy, self.predicted_tokens = rule, token_accuracy, predicted_tokens
        self.loss, self.lse = rule.buffer(rows, True), rule.buffer(rows, True)
        self.z_loss = rule.buffer(rows, z_loss)
        self.predicted = rule.buffer(rows, predicted_tokens or token_accuracy, torch.int64)
        self.logprobs, self.entropy = rule.buffer(rows, logprobs), rule.buffer(rows, entropy)

    def fill(
        self, logits, logits_stride, first_row, used_denominator=None, gradient=None, gradient_stride=None
    ):
        """Computes rows ``first_row`` to ``first_row + len(logits)``. With a denominator it also writes the gradient
        of the summed loss over it, in place of the logits if no other memory is given."""
        rule = self.rule
        if logits.shape[0] == 0:
            return
        # The extras need so many more registers that the longest rows would spill.
        plain = (
            self.predicted is None and self.entropy is None and not rule.smoothing and rule.softcap is None
        )
        itemsize, with_gradient = logits.element_size(), used_denominator is not None
        longest = (_RESIDENT_BYTES if plain else _RESIDENT_BYTES // 2) // itemsize
        resident = with_gradient and rule.n_cols <= longest
        programs = logits.shape[0]
        if resident:
            block = triton.next_power_of_2(rule.n_cols)
            warps = min(max(block // (32 * _RESIDENT_PER_THREAD), 4), 32)
            tile = 32 * warps, max(block * itemsize // (512 * warps), 1), 16 // itemsize
        else:
            tile, warps, at_once = walking_tile(rule.n_cols, itemsize, with_gradient)
            if at_once is not None:
                programs = min(programs, at_once * multiprocessors(logits))
        if with_gradient and gradient is None:
            gradient, gradient_stride = logits, logits_stride
        with on_device_of(logits):
            forward_kernel[(programs,)](
                logits, logits_stride, gradient, gradient_stride, rule.target, rule.ce_weight, rule.token_weight,
                rule.class_weight_sum, used_denominator, self.loss, self.z_loss, self.predicted, self.logprobs,
                self.entropy, self.lse, first_row, logits.shape[0], rule.n_cols, rule.ignore_index,
                rule.label_smoothing, rule.lse_square_scale, rule.softcap, rule.smoothing, rule.check_targets,
                resident, *tile,
                num_warps=warps, debug=rule.check_targets,
            )  # fmt: skip

    def used_denominator(self, denominator, reduction):
        """The scalar that the reduction divides by, before any row is computed."""
        used = self.rule.buffer((), True)
        self._reduce(denominator, reduction, None, None, None, used)
        return used

    def reduced(self, denominator, reduction, used_denominator=None):
        """(loss, z_loss, token_accuracy, predicted_tokens, logprobs, entropy) as the ops return them. The denominator
        that it divides by is also written to ``used_denominator``."""
        rule, scalar = self.rule, reduction != "none"
        loss = rule.buffer((), scalar)
        z_loss = rule.buffer((), scalar and self.z_loss is not None)
        accuracy = rule.buffer((), self.token_accuracy)
        if scalar or self.token_accuracy or used_denominator is not None:
            self._reduce(denominator, reduction, loss, z_loss, accuracy, used_denominator)
        results = [loss, z_loss, accuracy] if scalar else [self.loss, self.z_loss, accuracy]
        results += [
            self.predicted if self.predicted_tokens else rule.no_tensor(torch.int64),
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
