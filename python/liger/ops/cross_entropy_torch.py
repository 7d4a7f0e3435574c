"""cross_entropy of the torch backend.

It processes blocks of rows, which bounds the size of float32 temporaries.
"""

import torch

from .._core.cross_entropy_math import Metrics, RowResults, make_rule, row_gradient
from .._core.row_blocks import row_blocks


def _forward(
    gradient, logits, target, ce_weight, token_weight, denominator, ignore_index, label_smoothing, lse_square_scale,
    softcap, reduction, *metrics,
):  # fmt: skip
    """(the reduced results, lse, the denominator). Writes the gradient to ``gradient``, which may be the logits, unless
    it is None."""
    torch.ops.liger.check_cross_entropy(
        "cross_entropy", logits, target, ce_weight, token_weight, denominator, label_smoothing, softcap, reduction,
    )  # fmt: skip
    rule = make_rule(
        "cross_entropy", logits.dtype, logits.shape[1], target, ce_weight, token_weight, ignore_index,
        label_smoothing, lse_square_scale, softcap,
    )  # fmt: skip
    results = RowResults(rule, Metrics(*metrics))
    used_denominator = rule.denominator(denominator, reduction)
    upstream = 1.0 / used_denominator
    for block in row_blocks(logits):
        if gradient is None:
            results.fill(block, logits[block])
        else:
            results.fill_with_gradient(block, logits[block], upstream, gradient[block])
    return *results.reduced(used_denominator, reduction), results.lse, used_denominator


def cross_entropy_forward_torch(
    logits, target, ce_weight, token_weight, denominator, ignore_index, label_smoothing, lse_square_scale, softcap,
    reduction, return_z_loss, return_token_accuracy, return_predicted_tokens, return_logprobs, return_entropy,
    need_grad,
):  # fmt: skip
    gradient = torch.empty_like(logits) if need_grad else None
    results = _forward(
        gradient, logits, target, ce_weight, token_weight, denominator, ignore_index, label_smoothing,
        lse_square_scale, softcap, reduction, return_z_loss, return_token_accuracy, return_predicted_tokens,
        return_logprobs, return_entropy,
    )  # fmt: skip
    return *results, logits.new_empty(0) if gradient is None else gradient


def cross_entropy_forward__torch(logits, target, *rest):
    return _forward(logits, logits, target, *rest)[:6]


def _write_gradient(
    out, grad_loss, logits, target, lse, used_denominator, ce_weight, token_weight, ignore_index, label_smoothing,
    lse_square_scale, softcap,
):  # fmt: skip
    rule = make_rule(
        "cross_entropy", logits.dtype, logits.shape[1], target, ce_weight, token_weight, ignore_index,
        label_smoothing, lse_square_scale, softcap,
    )  # fmt: skip
    upstream = grad_loss.to(rule.wide) / used_denominator
    for block in row_blocks(logits):
        per_row = upstream[block] if upstream.dim() else upstream
        out[block] = row_gradient(rule, block, rule.capped(logits[block]), lse[block], per_row)


def cross_entropy_backward_torch(grad_loss, logits, *rest):
    grad_logits = torch.empty_like(logits)
    _write_gradient(grad_logits, grad_loss, logits, *rest)
    return grad_logits


def cross_entropy_backward__torch(grad_loss, logits, *rest):
    _write_gradient(logits, grad_loss, logits, *rest)
