# SPDX-License-Identifier: BSD-3-Clause
"""cross_entropy of the torch backend.

It processes blocks of rows, which bounds the size of float32 temporaries.
"""

import torch

from ..._core.head.cross_entropy import (
    CEOptions,
    Metrics,
    RowResults,
    check_row_stats,
    make_rule,
    row_gradient,
)
from ..._core.math.row_blocks import row_blocks
from ..._core.op.by_name import by_name
from ..._core.op.registration import register_family


def _forward(gradient, logits, target, options, metrics):
    """(the reduced results, stats, the denominator). Writes the gradient to ``gradient``, which may be the
    logits, unless it is None."""
    options.check("cross_entropy", logits, target)
    rule = make_rule("cross_entropy", logits.dtype, logits.shape[1], target, options)
    results = RowResults(rule, metrics)
    used_denominator = rule.denominator(options.denominator, options.reduction)
    upstream = 1.0 / used_denominator
    for block in row_blocks(logits):
        if gradient is None:
            results.fill(block, logits[block])
        else:
            results.fill_with_gradient(block, logits[block], upstream, gradient[block])
    return *results.reduced(used_denominator, options.reduction), results.stats, used_denominator


@by_name(torch.ops.liger.cross_entropy_forward.default)
def cross_entropy_forward_torch(a):
    gradient = torch.empty_like(a.logits) if a.need_grad else None
    results = _forward(gradient, a.logits, a.target, CEOptions.of_op(a), Metrics.of_op(a))
    return *results, a.logits.new_empty(0) if gradient is None else gradient


@by_name(torch.ops.liger.cross_entropy_forward_.default)
def cross_entropy_forward__torch(a):
    return _forward(a.logits, a.logits, a.target, CEOptions.of_op(a), Metrics.of_op(a))[:6]


def _write_gradient(out, a):
    logits, stats = a.logits, a.stats
    check_row_stats("cross_entropy_backward", logits, stats)
    rule = make_rule("cross_entropy", logits.dtype, logits.shape[1], a.target, CEOptions.of_op(a))
    upstream = a.grad_loss.to(rule.wide) / a.used_denominator
    for block in row_blocks(logits):
        per_row = upstream[block] if upstream.dim() else upstream
        out[block] = row_gradient(rule, block, rule.capped(logits[block]), stats[:, block], per_row)


@by_name(torch.ops.liger.cross_entropy_backward.default)
def cross_entropy_backward_torch(a):
    grad_logits = torch.empty_like(a.logits)
    _write_gradient(grad_logits, a)
    return grad_logits


@by_name(torch.ops.liger.cross_entropy_backward_.default)
def cross_entropy_backward__torch(a):
    _write_gradient(a.logits, a)


register_family(
    "cross_entropy",
    cross_entropy_forward_torch,
    cross_entropy_forward__torch,
    cross_entropy_backward_torch,
    cross_entropy_backward__torch,
)
