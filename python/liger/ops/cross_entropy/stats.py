# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of logits of some of the classes, from which a loss over all classes follows, and their
gradient.

If several tensors or devices each have some of the classes, the statistics of these shards give the
log-sum-exp over all classes. A few coefficients per row then give the gradient of every shard:

    exp(l) * (coef_exp + coef_log * l) - coef_target * [v is the target] - coef_class * ce_weight[v]

where ``l = z[v] - reference``.

With ``reference`` the largest logit, ``coef_target = c`` and ``coef_exp`` c over the sum of ``exp(l)``, that
is ``c * (softmax - onehot)``: the gradient of any loss that depends on the logits through the log-probability
of the target alone. Not with the log-sum-exp as ``reference``, which is rounded where logits are large.
``coef_log`` adds the gradient of a loss of the entropy H: ``dH/dz[v] = -p[v] * (log p[v] + H)``.
"""

import torch

from ..._core.head.cross_entropy import capped, check_row_values
from ..._core.math.computed_rows import ignored_rows
from ..._core.math.dtypes import accumulate_dtype
from ..._core.math.row_blocks import row_blocks
from ..._core.op.autograd import differentiable, differentiable_once, forbid_autograd
from ..._core.op.fakes import register_fake
from ..._core.op.registration import register_family

# Lower bound of l in coef_log * l: exp(l) is 0 for a class without probability, and 0 * -inf would be NaN.
_MIN_LOG = -1e30

# --- torch backend ------------------------------------------------------------------------------------------


def _check(op, logits, target, ce_weight, softcap):
    torch.ops.liger.check_cross_entropy(op, logits, target, ce_weight, None, None, 0.0, softcap, "sum")


def _columns(target, vocab_start, classes):
    """((rows, 1) column of the target or 0, (rows,) whether the target is among these classes)"""
    column = target.long() - vocab_start
    present = (column >= 0) & (column < classes)
    return torch.where(present, column, 0).unsqueeze(1), present


def cross_entropy_stats_torch(
    logits, target, ce_weight, vocab_start, ignore_index, softcap, return_class_sum, return_square_sum=False
):
    _check("cross_entropy_stats", logits, target, ce_weight, softcap)
    rows, classes = logits.shape
    wide = accumulate_dtype(logits.dtype)
    column, present = _columns(target, vocab_start, classes)
    stats = logits.new_empty((3 + return_class_sum + return_square_sum, rows), dtype=wide)
    for block in row_blocks(logits):
        z = capped(logits[block], softcap)
        high = z.amax(-1)
        stats[0, block] = high
        # A row of -inf: avoids inf - inf.
        reference = torch.where(high == -torch.inf, 0.0, high)
        below = z - reference.unsqueeze(1)
        if return_class_sum:
            stats[3, block] = (below if ce_weight is None else below * ce_weight.to(wide)).sum(-1)
        exponentials = below.exp_()
        stats[1, block] = exponentials.sum(-1)
        if return_square_sum:
            stats[-1, block] = exponentials.square_().sum(-1)
        stats[2, block] = torch.where(present[block], z.gather(1, column[block]).squeeze(1), 0.0)
    ignored_stats = stats.new_zeros(stats.shape[0], 1)
    ignored_stats[1] = 1.0
    if return_square_sum:
        ignored_stats[-1] = 1.0
    return torch.where(ignored_rows(target, ignore_index), ignored_stats, stats)


def _write_gradient(op, out, logits, target, *rest):
    reference, coef_exp, coef_target, coef_class, ce_weight, vocab_start, ignore_index, softcap, coef_log = (
        rest
    )
    _check(op, logits, target, ce_weight, softcap)
    values = {"reference": reference, "coef_exp": coef_exp, "coef_target": coef_target}
    check_row_values(op, logits, **values, coef_class=coef_class, coef_log=coef_log)
    column, present = _columns(target, vocab_start, logits.shape[1])
    coef_target = torch.where(present, coef_target, 0.0).unsqueeze(1)
    reference = torch.where(reference == -torch.inf, 0.0, reference).unsqueeze(1)
    ignored = ignored_rows(target, ignore_index).unsqueeze(1)
    for block in row_blocks(logits):
        z = capped(logits[block], softcap)
        grad, factor = z - reference[block], coef_exp[block].unsqueeze(1)
        if coef_log is not None:
            factor = grad.clamp(min=_MIN_LOG).mul_(coef_log[block].unsqueeze(1)).add_(factor)
        grad.exp_().mul_(factor)
        if coef_class is not None:
            per_class = coef_class[block].unsqueeze(1)
            grad.sub_(per_class if ce_weight is None else per_class * ce_weight.to(z.dtype))
        grad.scatter_(1, column[block], grad.gather(1, column[block]) - coef_target[block])
        if softcap is not None:
            grad.mul_(1.0 - (z / softcap).square_())
        out[block] = grad.masked_fill_(ignored[block], 0.0)


def cross_entropy_stats_backward_torch(logits, *rest):
    grad_logits = torch.empty_like(logits)
    _write_gradient("cross_entropy_stats_backward", grad_logits, logits, *rest)
    return grad_logits


def cross_entropy_stats_backward__torch(logits, *rest):
    _write_gradient("cross_entropy_stats_backward_", logits, logits, *rest)


register_family(
    "cross_entropy_stats",
    cross_entropy_stats_torch,
    cross_entropy_stats_backward_torch,
    cross_entropy_stats_backward__torch,
)


# --- fakes --------------------------------------------------------------------------------------------------


@register_fake("liger::cross_entropy_stats")
def _(
    logits, target, ce_weight, vocab_start, ignore_index, softcap, return_class_sum, return_square_sum=False
):
    return logits.new_empty(
        (3 + return_class_sum + return_square_sum, logits.shape[0]), dtype=accumulate_dtype(logits.dtype)
    )


@register_fake("liger::cross_entropy_stats_backward")
def _(logits, *rest):
    return torch.empty_like(logits)


# --- autograd -----------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    logits, target, ce_weight, *ctx.options, ctx.class_sum, square_sum = inputs
    if square_sum:
        ctx.mark_non_differentiable(output)
    ctx.save_for_backward(logits, target, ce_weight, output)


@differentiable_once("cross_entropy_stats")
def _backward(ctx, grad_stats):
    logits, target, ce_weight, stats = ctx.saved_tensors
    coef_class = -grad_stats[3] if ctx.class_sum else None
    grad_logits = torch.ops.liger.cross_entropy_stats_backward.default(
        logits, target, stats[0], grad_stats[1], -grad_stats[2], coef_class, ce_weight, *ctx.options, None
    )
    return grad_logits, *(None,) * 7


cross_entropy_stats = differentiable(torch.ops.liger.cross_entropy_stats.default, _setup, _backward)
cross_entropy_stats_backward_ = forbid_autograd("cross_entropy_stats_backward_")
