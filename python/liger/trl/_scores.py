# SPDX-License-Identifier: BSD-3-Clause
"""Scores of tokens that trainers read or log, computed inside the call of the lm_head."""

from typing import NamedTuple

import torch

from .._core.math.computed_rows import row_chunks
from .._core.math.dtypes import accumulate_dtype
from .._core.runtime.memory_budget import default_memory_budget
from ..ops.fused_linear_logprobs.op import fused_linear_logprobs


class Scores(NamedTuple):
    """A scalar loss, and scores per token in the shape of the targets. Fields that are not computed are None.

    At ignored tokens (-100) all scores except ``mean_logits`` are 0.
    """

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None


def score(hidden, weight, bias, target, transform, names):
    """The :class:`Scores` of tokens: log-probabilities, and the scores in ``names``.

    Log-probabilities and entropies are differentiable.
    """
    metrics = {"entropy": "entropy", "is_top1": "argmax", "log_sum_sq_probs": "log_sum_sq_probs"}
    wanted = [metrics[name] for name in metrics if name in names]
    options = {"softcap": transform.softcap, "temperature": transform.temperature}
    result = fused_linear_logprobs(
        hidden, weight, target, bias, metrics=wanted, logits_dtype=transform.logits_dtype, **options
    )
    if isinstance(result, torch.Tensor):
        scores = Scores(None, result)
    else:
        # The argmax of an ignored token is -1.
        is_top1 = None if result.argmax is None else result.argmax == target
        scores = Scores(
            None, result.logprobs, result.entropy, is_top1, log_sum_sq_probs=result.log_sum_sq_probs
        )
    return with_mean_logits(scores, hidden, weight, bias, transform, names)


@torch.no_grad()
def with_mean_logits(scores, hidden, weight, bias, transform, names):
    """Adds ``mean_logits`` to the scores, if ``names`` has it.

    The mean of the logits is the product with the mean of the rows of the weight. With a softcap it is not.
    Then the logits are computed again, a chunk at a time. Trainers log the mean of ignored tokens, too, which
    :func:`liger.fused_linear_logprobs` does not return.
    """
    if "mean_logits" not in names:
        return scores
    wide, rows = accumulate_dtype(hidden.dtype), hidden.flatten(0, -2)
    if transform.softcap is None:
        row = weight.mean(0, dtype=wide) / transform.temperature
        constant = 0.0 if bias is None else bias.mean(dtype=wide) / transform.temperature

        def mean(x):
            # Elementwise: autocast would round the operands of a matrix product.
            return (x.to(wide) * row).sum(-1) + constant
    else:

        def mean(x):
            return _logits(x, weight, bias, transform).mean(-1)

    width = weight.shape[1 if transform.softcap is None else 0]
    chunks = row_chunks(rows.shape[0], max(default_memory_budget() // (wide.itemsize * width), 1))
    means = torch.cat([mean(rows[chunk]) for chunk in chunks] or [rows.new_zeros(0, dtype=wide)])
    return scores._replace(mean_logits=means.view(hidden.shape[:-1]))


def _logits(x, weight, bias, transform):
    if transform.logits_dtype is not None:
        x, weight, bias = (t if t is None else t.to(transform.logits_dtype) for t in (x, weight, bias))
    return transform(torch.nn.functional.linear(x, weight, bias).to(accumulate_dtype(x.dtype)))
