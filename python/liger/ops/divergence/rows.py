# SPDX-License-Identifier: BSD-3-Clause
"""The divergence family of the torch backend."""

import torch

from ..._core.math.computed_rows import ignored_rows
from ..._core.math.dtypes import accumulate_dtype
from ..._core.math.row_blocks import row_blocks
from ..._core.op.registration import register_family


def mixture_beta(beta, dtype=torch.float32):
    """The weight of a mixture, no nearer to 0 and 1 than a rounding of 1.

    Where ``beta`` or ``1 - beta`` is rounded to 1, the mixture of a class that only one distribution has is
    0, and its logarithm infinite.
    """
    least = torch.finfo(dtype).eps / 2
    return min(max(beta, least), 1.0 - least)


def _weighted(weight, value):
    """``weight * value``; 0 where the weight is 0, even for an infinite value."""
    return torch.where(weight == 0, 0.0, weight * value)


def _forward_kl(d, p, q, beta):
    return _weighted(p, d), -p


def _reverse_kl(d, p, q, beta):
    value = _weighted(q, -d)
    return value, value + q


def _jsd(d, p, q, beta):
    beta = mixture_beta(beta, d.dtype)
    # log(max(p, q) / m) from the ratio of the smaller to the larger one: accurate for p near q, and finite.
    # Not torch.where with two numbers: its result has the default dtype.
    smaller_weight = torch.full_like(d, beta).masked_fill_(d > 0, 1.0 - beta)
    log_larger = -torch.log1p(smaller_weight * torch.expm1(-d.abs()))
    p_term = _weighted(beta * p, torch.where(d > 0, log_larger, log_larger + d))
    q_term = _weighted((1.0 - beta) * q, torch.where(d > 0, log_larger - d, log_larger))
    return p_term + q_term, q_term


def _tvd(d, p, q, beta):
    return 0.5 * (p - q).abs(), 0.5 * q * (q - p).sign()


# Divergence -> f(log(p / q), p, q, beta) = (value of each class, its derivative with respect to log q), with
# the probabilities p of the teacher and q of the student.
_TERMS = {"forward_kl": _forward_kl, "reverse_kl": _reverse_kl, "jsd": _jsd, "tvd": _tvd}


def _below_largest(logits, largest):
    return logits.to(accumulate_dtype(logits.dtype)) - largest.unsqueeze(1)


def _normaliser(logits, temperature):
    largest = logits.amax(-1).to(accumulate_dtype(logits.dtype))
    reference = torch.where(largest == -torch.inf, 0.0, largest)
    return largest, (_below_largest(logits, reference) / temperature).exp_().sum(-1).log_()


def _terms(student, teacher, stats, divergence, beta, temperature):
    """(values, derivatives with respect to log q, q) of some rows."""
    # Each row loses its own largest logit first: an offset of one would round the other.
    s, t = (_below_largest(x, largest) for x, largest in ((student, stats[0]), (teacher, stats[2])))
    log_sum_s, log_sum_t = stats[1].unsqueeze(1), stats[3].unsqueeze(1)
    d = (t - s) / temperature - (log_sum_t - log_sum_s)
    q, p = ((x / temperature - log_sum).exp_() for x, log_sum in ((s, log_sum_s), (t, log_sum_t)))
    return *_TERMS[divergence](d, p, q, beta), q


def _row_losses(student, teacher, target, divergence, beta, temperature, log_probs, ignore_index):
    """(loss of each row, stats)."""
    rows, wide = student.shape[0], accumulate_dtype(student.dtype)
    loss, stats = student.new_empty(rows, dtype=wide), student.new_zeros((5, rows), dtype=wide)
    for block in row_blocks(student):
        if not log_probs:
            stats[0, block], stats[1, block] = _normaliser(student[block], temperature)
            stats[2, block], stats[3, block] = _normaliser(teacher[block], temperature)
        values, slopes, _ = _terms(
            student[block], teacher[block], stats[:, block], divergence, beta, temperature
        )
        loss[block] = values.sum(-1)
        if not log_probs:
            stats[4, block] = slopes.sum(-1)
    if target is not None:
        ignored = ignored_rows(target, ignore_index)
        loss.masked_fill_(ignored, 0.0)
        stats.masked_fill_(ignored, 0.0)
    return loss, stats


def _write_gradient(out, weight, student, teacher, target, stats, options, cross_entropy=0.0):
    """Writes the gradient of ``sum(weight * loss)`` to ``out``; weight is (rows,), () or None for 1.

    The loss includes ``cross_entropy`` times the cross entropy of the target, at temperature 1 only.
    """
    divergence, beta, temperature, log_probs, ignore_index = options
    if cross_entropy:
        column, unknown = target_columns(target, student.shape[1], ignore_index)
        # Rows with a target out of range get nan.
        hard = torch.full_like(stats[4], cross_entropy).masked_fill_(unknown, torch.nan)
    for block in row_blocks(student):
        _, slopes, q = _terms(student[block], teacher[block], stats[:, block], divergence, beta, temperature)
        grad = slopes - q * stats[4, block].unsqueeze(1)
        if not log_probs:
            # The exact sum is 0. If one class has nearly all of q, its gradient is a difference of large
            # numbers, and this step removes the rounding error.
            grad -= q * grad.sum(1, keepdim=True)
        if cross_entropy:
            grad += q * hard[block].unsqueeze(1)
        grad /= temperature
        if cross_entropy:
            grad.scatter_(1, column[block], grad.gather(1, column[block]) - hard[block].unsqueeze(1))
        if weight is not None:
            grad *= weight[block].unsqueeze(1) if weight.dim() else weight
        if target is not None:
            grad.masked_fill_(ignored_rows(target[block], ignore_index).unsqueeze(1), 0.0)
        out[block] = grad


def target_columns(target, classes, ignore_index):
    """((N, 1) column of each row's target or 0, (N,) mask of rows with a target out of range that are not
    ignored)"""
    known = (target >= 0) & (target < classes)
    unknown = ~known & ~ignored_rows(target, ignore_index)
    return torch.where(known, target, 0).long().unsqueeze(1), unknown


def target_logits(logits, target, ignore_index):
    """(N,) the logit of each row's target in the dtype of the statistics; nan where the target is out of
    range."""
    column, unknown = target_columns(target, logits.shape[1], ignore_index)
    chosen = logits.gather(1, column).squeeze(1).to(accumulate_dtype(logits.dtype))
    return chosen.masked_fill_(unknown, torch.nan)


def _forward(op, out, student, teacher, target, row_weight, *options, per_row, cross_entropy=0.0):
    """(loss, stats). Writes the gradient to ``out`` unless it is None."""
    torch.ops.liger.check_divergence(op, student, teacher, target, row_weight, *options[:4])
    loss, stats = _row_losses(student, teacher, target, *options)
    if out is not None:
        _write_gradient(out, row_weight, student, teacher, target, stats, options, cross_entropy)
    if row_weight is not None:
        loss *= row_weight
    return loss if per_row else loss.sum(), stats


def entry_points(forward):
    """(divergence_forward, divergence_forward_, divergence_ce_forward_) of a backend.

    ``forward(op, out, student, teacher, target, row_weight, *options, per_row, cross_entropy)`` is the kernel
    of the backend: it returns (losses, statistics) and, unless ``out`` is None, writes the gradient to
    ``out``.
    """

    def divergence_forward(student, teacher, target, row_weight, *options):
        *options, per_row, need_grad = options
        grad_student = torch.empty_like(student) if need_grad else None
        rows = student, teacher, target, row_weight
        results = forward("divergence_forward", grad_student, *rows, *options, per_row=per_row)
        return *results, grad_student if need_grad else student.new_empty(0)

    def divergence_forward_(student, teacher, target, row_weight, *options):
        *options, per_row = options
        return forward(
            "divergence_forward_", student, student, teacher, target, row_weight, *options, per_row=per_row
        )[0]

    def divergence_ce_forward_(student, teacher, target, row_weight, *options):
        divergence, beta, temperature, cross_entropy, ignore_index, gradient = options
        op, rows = "divergence_ce_forward_", (student, teacher, target, row_weight)
        options = divergence, beta, temperature, False, ignore_index
        torch.ops.liger.check_divergence(op, *rows, *options[:4])
        torch.ops.liger.check_divergence_gradient(op, student, target, temperature, cross_entropy, gradient)
        chosen = target_logits(student, target, ignore_index) if cross_entropy else None
        losses, stats = forward(op, gradient, *rows, *options, per_row=True, cross_entropy=cross_entropy)
        if not cross_entropy:
            return losses, losses.new_empty(0)
        hard = cross_entropy * (stats[1] - (chosen - stats[0]))
        if row_weight is not None:
            hard *= row_weight
        return losses, hard.masked_fill_(ignored_rows(target, ignore_index), 0.0)

    return divergence_forward, divergence_forward_, divergence_ce_forward_


divergence_forward_torch, divergence_forward__torch, divergence_ce_forward__torch = entry_points(_forward)


def check_stats(op, student, grad_loss, stats):
    """Raises RuntimeError if grad_loss or stats do not have the shapes and dtypes of the forward's
    results."""
    rows, wide = student.shape[0], accumulate_dtype(student.dtype)
    for name, tensor, shapes, expected in (
        ("grad_loss", grad_loss, ((), (rows,)), "one value, or one per row of student"),
        ("stats", stats, ((5, rows),), "5 values per row of student"),
    ):
        if tensor.shape not in shapes or tensor.dtype != wide:
            found, right = (str(d).removeprefix("torch.") for d in (tensor.dtype, wide))
            raise RuntimeError(
                f"{op}: {name} has shape {tuple(tensor.shape)} and dtype {found}, expected {right} with {expected}"
            )


def divergence_backward_torch(grad_loss, student, teacher, target, stats, *options):
    op = "divergence_backward"
    torch.ops.liger.check_divergence(op, student, teacher, target, None, *options[:4])
    check_stats(op, student, grad_loss, stats)
    grad_student = torch.empty_like(student)
    _write_gradient(grad_student, grad_loss, student, teacher, target, stats, options)
    return grad_student


register_family(
    "divergence",
    divergence_forward_torch,
    divergence_forward__torch,
    divergence_ce_forward__torch,
    divergence_backward_torch,
)
