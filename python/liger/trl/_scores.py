"""What trainers want to know of every token, computed where the head's weight is at hand."""

from typing import NamedTuple

import torch

from .._core.dtypes import accumulate_dtype
from .._core.lm_head import row_chunks
from .._core.memory_budget import default_memory_budget
from ..ops.fused_linear_logprobs import fused_linear_logprobs


class Scores(NamedTuple):
    """Per token, shaped as the targets, and a loss where one was asked for. None is what nobody wants to know.

    Where the target is -100 all but ``mean_logits`` are zero.
    """

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None


class Transform(NamedTuple):
    """What becomes of ``hidden @ weight.T + bias`` before the softmax, in the terms of the ops."""

    temperature: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config, temperature):
        """As a text configuration of transformers says, with a temperature of sampling on top.

        With s the factor and c the cap of a model, ``c * tanh(s * z / c) / T`` is ``C * tanh(z / C) / (T / s)`` for a
        C of ``c / s``.
        """
        scale = _logit_scale(config)
        if not scale > 0.0:
            raise ValueError(
                f"liger.trl: the logits of {config.model_type} are scaled by {scale}, expected a positive number"
            )
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(temperature / scale, None if softcap is None else softcap / scale)


def _logit_scale(config):
    """The factor of the logits, under the names that architectures have for it."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if value is not None:
            return value
    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return 1.0
    return divisor if config.model_type == "hyperclovax" else 1.0 / divisor


def score(hidden, weight, bias, target, transform, wanted):
    """The :class:`Scores` of tokens, the names in ``wanted`` beside the log-probabilities; differentiable are these and
    the entropies."""
    found = fused_linear_logprobs(
        hidden, weight, target, bias, transform.temperature, -100, transform.softcap,
        return_entropy="entropy" in wanted, return_argmax="is_top1" in wanted,
    )  # fmt: skip
    logprobs, entropy, argmax = found if isinstance(found, tuple) else (found, None, None)
    return with_logit_statistics(
        Scores(None, logprobs, entropy, top1(argmax, target)), hidden, weight, bias, target, transform, wanted
    )


def top1(argmax, target):
    """Whether the target is the most probable token; None of None."""
    return None if argmax is None else (argmax == target) & (target != -100)


@torch.no_grad()
def with_logit_statistics(scores, hidden, weight, bias, target, transform, wanted):
    """The scores, and of the statistics of logits those that are wanted.

    The mean of logits is the projection by the mean of the weight's rows. After a softcap it is not; that, and the sum
    of squares, take the logits once more, a chunk at a time.
    """
    wide, rows = accumulate_dtype(hidden.dtype), hidden.flatten(0, -2)
    functions = {}
    if "log_sum_sq_probs" in wanted:
        functions["log_sum_sq_probs"] = lambda x: _log_sum_sq_probs(_logits(x, weight, bias, transform))
    if "mean_logits" in wanted and transform.softcap is not None:
        functions["mean_logits"] = lambda x: _logits(x, weight, bias, transform).mean(-1)
    elif "mean_logits" in wanted:
        row = weight.mean(0, dtype=wide) / transform.temperature
        constant = 0.0 if bias is None else bias.mean(dtype=wide) / transform.temperature
        # No product of matrices, which autocast would round.
        functions["mean_logits"] = lambda x: (x.to(wide) * row).sum(-1) + constant
    budget = default_memory_budget()
    for name, function in functions.items():
        width = hidden.shape[-1] if name == "mean_logits" and transform.softcap is None else weight.shape[0]
        chunks = row_chunks(rows.shape[0], max(budget // (wide.itemsize * width), 1))
        made = torch.cat([function(rows[chunk]) for chunk in chunks] or [rows.new_zeros(0, dtype=wide)])
        scores = scores._replace(**{name: made.view(target.shape)})
    if scores.log_sum_sq_probs is None:
        return scores
    return scores._replace(log_sum_sq_probs=torch.where(target != -100, scores.log_sum_sq_probs, 0.0))


def _logits(x, weight, bias, transform):
    z = torch.nn.functional.linear(x, weight, bias).to(accumulate_dtype(x.dtype))
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    return z / transform.temperature


def _log_sum_sq_probs(logits):
    return (2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)
