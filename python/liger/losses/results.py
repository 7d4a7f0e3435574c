# SPDX-License-Identifier: BSD-3-Clause
"""The options and the results that all losses share."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor

from .._core.op.arguments import names_among
from .._core.op.named_results import serialisable

TokenMetric = Literal["logprobs", "entropy", "argmax"]
TOKEN_METRICS = names_among(*get_args(TokenMetric))


@serialisable
class TokenMetrics(NamedTuple):
    """The results of the option ``metrics``: one value per token in the shape of target, without gradient;
    else None.

    Attributes:
        logprobs: the log-probability of the target in nats, float32 (float64 for float64 inputs); 0 at
            ignored tokens.
        entropy: the entropy of the distribution in nats, in the same dtype; 0 at ignored tokens.
        argmax: the most probable class, int64; -1 at ignored tokens.

    Example, with the subclass in the example of :class:`FusedLinearLoss`::

        >>> loss_function = Likelihood(metrics=("entropy",))
        >>> tokens = loss_function.run(loss_function.batch(input, target), weight).tokens
        >>> isinstance(tokens, liger.losses.TokenMetrics), tokens.entropy.shape == target.shape
        (True, True)
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None


@serialisable
class LossResult(NamedTuple):
    """The result of :meth:`FusedLinearLoss.run`.

    Attributes:
        loss: scalar in float32, or float64 for float64 inputs.
        logprobs: (S, L) log-probabilities of the targets in nats, without gradient; 0 at ignored tokens and
            padding.
        entropy: (S, L) entropies in nats, likewise; None unless ``uses_entropy``.
        tokens: the metrics that the option ``metrics`` asks for.

    Example, with the subclass in the example of :class:`FusedLinearLoss`::

        >>> loss_function = Likelihood()
        >>> result = loss_function.run(loss_function.batch(input, target), weight)
        >>> isinstance(result, liger.losses.LossResult), result.loss.shape
        (True, torch.Size([]))
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    tokens: TokenMetrics


class LossOptions(TypedDict, total=False):
    """Types of the options of every :class:`FusedLinearLoss`; the defaults are in its constructor."""

    ignore_index: int
    metrics: Sequence[TokenMetric]
    accum_dtype: torch.dtype | None
    logits_dtype: torch.dtype | None
    memory_budget: int | None
    softcap: float | None
    temperature: float
    accumulate_grad_weight: bool
