# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy of logits: launchers, and the backward kernel. The forward row kernel is in
:mod:`.cross_entropy_rows`.

backward_kernel: one program per row; it reads the logits once and computes probabilities from the saved
statistics.
"""

import torch
import triton
import triton.language as tl

from .._core.head.cross_entropy import CEOptions, Metrics, check_row_stats
from .._core.op.by_name import by_name
from .common import on_device_of, output_rows, require_dtype, require_same_shape, rows_of, write_back
from .cross_entropy_rows import RowResults, Rule, streaming_tile
from .cross_entropy_rule import (
    class_weight,
    coefficients,
    fill_zeros,
    store_target_gradient,
    target_logit,
    write_gradient,
)


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def backward_kernel(
    grad_loss_ptr, grad_loss_stride, logits_ptr, logits_stride, out_ptr, out_stride, target_ptr, stats_ptr,
    used_denominator_ptr, ce_weight_ptr, token_weight_ptr, class_weight_sum_ptr,
    n_rows, n_cols, ignore_index, label_smoothing, lse_square_scale, softcap, SMOOTHING: tl.constexpr,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr, out_row = logits_ptr + row * logits_stride, out_ptr + row * out_stride
    target = tl.load(target_ptr + row)
    if target != ignore_index:
        in_range = (target >= 0) & (target < n_cols)
        z_target = target_logit(row_ptr, target, in_range, softcap)
        # In place, another thread may overwrite the target's logit; all threads must have loaded it before.
        tl.debug_barrier()
        upstream = tl.load(grad_loss_ptr + row * grad_loss_stride).to(tl.float32) / tl.load(
            used_denominator_ptr
        )
        if token_weight_ptr is not None:
            upstream *= tl.load(token_weight_ptr + row).to(tl.float32)
        upstream = tl.where(in_range, upstream, float("nan"))
        weight = class_weight(ce_weight_ptr, target, in_range)
        z_max, e_sum = tl.load(stats_ptr + row), tl.load(stats_ptr + tl.cast(n_rows, tl.int64) + row)
        coef_exp, coef_target, coef_class = coefficients(
            ce_weight_ptr, class_weight_sum_ptr, weight, z_max, e_sum, n_cols, label_smoothing, lse_square_scale,
            SMOOTHING,
        )  # fmt: skip
        write_gradient(
            row_ptr, out_row, z_max, ce_weight_ptr, coef_exp, coef_class, upstream, n_cols, softcap, SMOOTHING,
            LANES, REPEATS, VECTOR,
        )  # fmt: skip
        store_target_gradient(
            out_row, target, in_range, z_target, z_max, weight, coef_exp, coef_target, coef_class, upstream, softcap,
            SMOOTHING,
        )  # fmt: skip
    else:
        fill_zeros(out_row, n_cols, LANES * REPEATS * VECTOR)


# --- launchers ----------------------------------------------------------------------------------------------


def _forward(gradient, logits, target, options, metrics):
    """(*reduced results, stats, denominator). Also writes ``gradient``, which may be the logits, unless it is
    None."""
    options.check("cross_entropy", logits, target)
    require_dtype("cross_entropy", "logits", logits)
    rule = Rule.of_options("cross_entropy", logits.shape[1], target, options)
    denominator, reduction = options.denominator, options.reduction
    results = RowResults(rule, *metrics)
    rows = rows_of(logits)
    if gradient is None:
        results.fill(*rows, 0)
        used_denominator = rule.buffer((), True)
        return *results.reduced(denominator, reduction, used_denominator), results.stats, used_denominator
    used_denominator = results.used_denominator(denominator, reduction)
    gradient_rows = rows if gradient is logits else output_rows(gradient)
    results.fill(*rows, 0, used_denominator, *gradient_rows)
    write_back(gradient, gradient_rows[0])
    return *results.reduced(used_denominator, reduction), results.stats, used_denominator


@by_name(torch.ops.liger.cross_entropy_forward.default)
def cross_entropy_forward(a):
    gradient = torch.empty_like(a.logits) if a.need_grad else None
    results = _forward(gradient, a.logits, a.target, CEOptions.of_op(a), Metrics.of_op(a))
    return *results, a.logits.new_empty(0) if gradient is None else gradient


@by_name(torch.ops.liger.cross_entropy_forward_.default)
def cross_entropy_forward_(a):
    return _forward(a.logits, a.logits, a.target, CEOptions.of_op(a), Metrics.of_op(a))[:6]


def _backward(op, out, a):
    grad_loss, logits, target, stats = a.grad_loss, a.logits, a.target, a.stats
    # Neither a denominator nor a reduction of their own: the defaults of both.
    options = CEOptions.of_op(a)
    options.check(op, logits, target)
    require_dtype(op, "logits", logits)
    check_row_stats(op, logits, stats)
    if grad_loss.dim():
        require_same_shape(op, "grad_loss", grad_loss, "target", target)
    rule = Rule.of_options(op, logits.shape[1], target, options)
    if logits.numel() == 0:
        return
    in_place = out is logits
    logits_rows, logits_stride = rows_of(logits)
    out_rows, out_stride = (logits_rows, logits_stride) if in_place else output_rows(out)
    tile, warps, _ = streaming_tile(rule.n_cols, logits.element_size(), False)
    with on_device_of(logits):
        backward_kernel[(logits.shape[0],)](
            grad_loss, grad_loss.stride(0) if grad_loss.dim() else 0, logits_rows, logits_stride, out_rows, out_stride,
            rule.target, stats.contiguous(), a.used_denominator, rule.ce_weight, rule.token_weight,
            rule.class_weight_sum, logits.shape[0], rule.n_cols, rule.ignore_index, rule.label_smoothing,
            rule.lse_square_scale, rule.softcap, rule.smoothing, *tile, num_warps=warps,
        )  # fmt: skip
    write_back(out, out_rows)


@by_name(torch.ops.liger.cross_entropy_backward.default)
def cross_entropy_backward(a):
    grad_logits = torch.empty_like(a.logits)
    _backward("cross_entropy_backward", grad_logits, a)
    return grad_logits


@by_name(torch.ops.liger.cross_entropy_backward_.default)
def cross_entropy_backward_(a):
    _backward("cross_entropy_backward_", a.logits, a)
