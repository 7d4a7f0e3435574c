"""cross_entropy of the torch backend.

It processes blocks of rows, which bounds the size of float32 temporaries.
"""

import torch

from .._core.cross_entropy_math import (
    CEOptions,
    Metrics,
    RowResults,
    check_row_stats,
    make_rule,
    row_gradient,
)
from .._core.row_blocks import row_blocks


def _forward(gradient, logits, target, options, metrics):
    """(the reduced results, stats, the denominator). Writes the gradient to ``gradient``, which may be the logits,
    unless it is None."""
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


def cross_entropy_forward_torch(logits, target, *rest):
    *rest, need_grad = rest
    gradient = torch.empty_like(logits) if need_grad else None
    results = _forward(gradient, logits, target, CEOptions(*rest[:8]), Metrics(*rest[8:]))
    return *results, logits.new_empty(0) if gradient is None else gradient


def cross_entropy_forward__torch(logits, target, *rest):
    return _forward(logits, logits, target, CEOptions(*rest[:8]), Metrics(*rest[8:]))[:6]


def _write_gradient(out, grad_loss, logits, target, stats, used_denominator, *options):
    options = CEOptions.of_backward(*options)
    check_row_stats("cross_entropy_backward", logits, stats)
    rule = make_rule("cross_entropy", logits.dtype, logits.shape[1], target, options)
    upstream = grad_loss.to(rule.wide) / used_denominator
    for block in row_blocks(logits):
        per_row = upstream[block] if upstream.dim() else upstream
        out[block] = row_gradient(rule, block, rule.capped(logits[block]), stats[:, block], per_row)


def cross_entropy_backward_torch(grad_loss, logits, *rest):
    grad_logits = torch.empty_like(logits)
    _write_gradient(grad_logits, grad_loss, logits, *rest)
    return grad_logits


def cross_entropy_backward__torch(grad_loss, logits, *rest):
    _write_gradient(logits, grad_loss, logits, *rest)
