"""The row kernel of cross_entropy and fused_linear_ce; docs/cross_entropy.md defines every term.

A program takes one row. It walks over the logits once for the statistics, every lane keeping its own running maximum
and sums, which are merged at the end of the row; the gradient is a second walk, in place where the caller says so. A
last kernel of one program reduces the per-row results in a fixed order.
"""

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..ops._cross_entropy_math import check_targets
from .common import dense_vector, on_device_of

_BLOCK = 4096
WARPS = 8

# --- kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def _capped(x, softcap):
    """softcap * tanh(x / softcap), or x without a softcap. The interpreter has no tanh, hence the exponential form."""
    if softcap is not None:
        u = x / softcap
        t = tl.exp(-2.0 * tl.abs(u))
        far = (1.0 - t) / (1.0 + t)
        # Near zero 1 - t cancels, so there it is the Taylor series, exact to float32 up to 0.2.
        square = u * u
        near = u * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        x = softcap * tl.where(tl.abs(u) < 0.2, near, tl.where(u < 0, -far, far))
    return x


@triton.jit
def _statistics(
    row_ptr, ce_weight_ptr, n_cols, softcap, shift,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(log-sum-exp, entropy, index of the largest logit, sum of w * (z - shift)) of a row."""
    # Finite, so that z - high is -inf rather than nan for z = -inf.
    high = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    smooth = tl.zeros([BLOCK], tl.float32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    top_col = tl.arange(0, BLOCK)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        x = tl.load(row_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
        z = x
        if softcap is not None:
            z = tl.where(mask, _capped(x, softcap), float("-inf"))
        # One exponential per logit: the smaller of z and the maximum so far, relative to the larger.
        step = z - high
        e = tl.exp(-tl.abs(step))
        larger = step > 0
        if ENTROPY:
            # sum of exp(z - high) * (z - high)
            moment = tl.where(larger, (moment - total * step) * e, moment + tl.where(e > 0, e * step, 0.0))
        total = tl.where(larger, total * e + 1.0, total + e)
        high = tl.maximum(high, z)
        if ARGMAX:
            # By the logits themselves: a softcap maps different large ones to one number.
            top_col = tl.where(x > top, cols, top_col)
            top = tl.maximum(top, x)
        if SMOOTHING:
            cost = tl.where(mask, z - shift, 0.0)
            if ce_weight_ptr is not None:
                cost *= tl.load(ce_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
            smooth += cost

    row_high = tl.max(high, 0)
    scale = tl.exp(high - row_high)
    row_total = tl.sum(total * scale, 0)
    log_total = tl.log(row_total)
    entropy = 0.0
    if ENTROPY:
        entropy = log_total - tl.sum((moment + total * (high - row_high)) * scale, 0) / row_total
    best = 0
    if ARGMAX:
        best = tl.min(tl.where(top == tl.max(top, 0), top_col, n_cols), 0)
    return row_high + log_total, entropy, best, tl.sum(smooth, 0)


@triton.jit
def class_weight(ce_weight_ptr, target, valid):
    if ce_weight_ptr is None:
        weight = tl.where(valid, 1.0, 0.0)
    else:
        weight = tl.load(ce_weight_ptr + target, mask=valid, other=0.0).to(tl.float32)
    return weight


@triton.jit
def fill_zeros(row_ptr, n_cols, BLOCK: tl.constexpr):
    zeros = tl.zeros([BLOCK], row_ptr.dtype.element_ty)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        tl.store(row_ptr + cols, zeros, mask=cols < n_cols)


@triton.jit
def write_gradient(
    row_ptr, out_ptr, ce_weight_ptr, class_weight_sum_ptr, upstream, target, weight, lse, n_cols,
    label_smoothing, lse_square_scale, softcap, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    hard = (1.0 - label_smoothing) * weight
    of_p = hard + tl.where(lse_square_scale == 0.0, 0.0, 2.0 * lse_square_scale * weight * lse)
    per_class = label_smoothing / n_cols
    if SMOOTHING:
        of_p += label_smoothing if ce_weight_ptr is None else per_class * tl.load(class_weight_sum_ptr)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        z = _capped(tl.load(row_ptr + cols, mask=mask, other=0.0).to(tl.float32), softcap)
        grad = of_p * tl.exp(z - lse)
        if SMOOTHING:
            if ce_weight_ptr is None:
                grad -= per_class
            else:
                grad -= per_class * tl.load(ce_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        grad -= tl.where(cols == target, hard, 0.0)
        if softcap is not None:
            capped = z / softcap
            grad *= 1.0 - capped * capped
        tl.store(out_ptr + cols, (grad * upstream).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_row", "ignore_index"])
def forward_kernel(
    logits_ptr, logits_stride, target_ptr, ce_weight_ptr, token_weight_ptr, class_weight_sum_ptr, used_denominator_ptr,
    loss_ptr, z_loss_ptr, predicted_ptr, logprobs_ptr, entropy_ptr, lse_ptr,
    first_row, n_cols, ignore_index, label_smoothing, lse_square_scale, softcap,
    GRADIENT: tl.constexpr, SMOOTHING: tl.constexpr, CHECK_TARGETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss and metrics of a row and, with GRADIENT, its gradient over the logits. Logits start at ``first_row``."""
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * logits_stride
    row = first_row + tl.program_id(0).to(tl.int64)
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
        z_target = _capped(tl.load(row_ptr + target, mask=valid, other=0.0).to(tl.float32), softcap)
        weight = class_weight(ce_weight_ptr, target, valid)
        # Makes everything nan where the target is no class.
        share = tl.where(valid, 1.0, float("nan"))
        # Differences from the target's logit, so that a large common part of the logits cancels.
        shift = tl.where(tl.abs(z_target) < float("inf"), z_target, 0.0)
        lse, entropy, best, smooth = _statistics(
            row_ptr, ce_weight_ptr, n_cols, softcap, shift,
            predicted_ptr is not None, entropy_ptr is not None, SMOOTHING, BLOCK,
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
        if GRADIENT:
            write_gradient(
                row_ptr, row_ptr, ce_weight_ptr, class_weight_sum_ptr, share / tl.load(used_denominator_ptr), target,
                weight, lse, n_cols, label_smoothing, lse_square_scale, softcap, SMOOTHING, BLOCK,
            )  # fmt: skip
    elif GRADIENT:
        fill_zeros(row_ptr, n_cols, BLOCK)
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
        self.check_targets = self.target.is_cuda and os.environ.get("LIGER_CHECK_TARGETS") == "1"
        self.target, self.ce_weight, self.token_weight = map(
            dense_vector, (self.target, self.ce_weight, self.token_weight)
        )
        self.smoothing = self.label_smoothing != 0.0
        self.class_weight_sum = None
        if self.smoothing and self.ce_weight is not None:
            self.class_weight_sum = self.ce_weight.sum(dtype=torch.float32)
        self.block = min(triton.next_power_of_2(max(self.n_cols, 1)), _BLOCK)

    def buffer(self, shape, wanted, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=self.target.device) if wanted else None

    def no_tensor(self, dtype=torch.float32):
        return torch.empty(0, dtype=dtype, device=self.target.device)


class RowResults:
    """What the row kernel writes, for all rows of a call; None for what was not asked for."""

    def __init__(self, rule, z_loss, token_accuracy, predicted_tokens, logprobs, entropy):
        rows = rule.target.shape
        self.rule, self.token_accuracy, self.predicted_tokens = rule, token_accuracy, predicted_tokens
        self.loss, self.lse = rule.buffer(rows, True), rule.buffer(rows, True)
        self.z_loss = rule.buffer(rows, z_loss)
        self.predicted = rule.buffer(rows, predicted_tokens or token_accuracy, torch.int64)
        self.logprobs, self.entropy = rule.buffer(rows, logprobs), rule.buffer(rows, entropy)
        # Each of these keeps more numbers per lane; half the lanes keep two programs on a multiprocessor.
        self.block = rule.block if self.predicted is None and not entropy else min(rule.block, _BLOCK // 2)

    def fill(self, logits, logits_stride, first_row, used_denominator=None):
        """Computes rows ``first_row`` to ``first_row + len(logits)``. With a denominator it also writes the gradient
        of the summed loss over it, in place of the logits."""
        rule = self.rule
        if logits.shape[0] == 0:
            return
        with on_device_of(logits):
            forward_kernel[(logits.shape[0],)](
                logits, logits_stride, rule.target, rule.ce_weight, rule.token_weight, rule.class_weight_sum,
                used_denominator, self.loss, self.z_loss, self.predicted, self.logprobs, self.entropy, self.lse,
                first_row, rule.n_cols, rule.ignore_index, rule.label_smoothing, rule.lse_square_scale, rule.softcap,
                used_denominator is not None, rule.smoothing, rule.check_targets, self.block,
                num_warps=WARPS, debug=rule.check_targets,
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
                reduction == "mean", 2048, num_warps=WARPS,
            )  # fmt: skip
