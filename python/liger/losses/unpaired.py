# SPDX-License-Identifier: BSD-3-Clause
"""Losses of single answers with a binary label, desirable or undesirable: KTO."""

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._core.op.arguments import DIVISOR, FLAG, INTEGER, NOT_NEGATIVE, NUMBER_OR_TENSOR, TEXT, arguments
from .._core.op.named_results import serialisable
from ._batch import as_scalar, sequence_scores, sigmoid, where_scalar
from .base import NAMES_OF_HEAD, FusedLinearLoss, check_choice
from .results import LossOptions

KTOLossType = Literal["kto", "apo_zero_unpaired"]
KTO_LOSS_TYPES: tuple[KTOLossType, ...] = get_args(KTOLossType)


@serialisable
class KTOMetrics(NamedTuple):
    """Metrics of KTO, without gradients: sums over the desirable ("chosen") and the undesirable ("rejected")
    sequences.

    Attributes:
        chosen_logps_sum, rejected_logps_sum: scalars, of the log-probabilities of the sequences, in nats.
        chosen_rewards_sum, rejected_rewards_sum: scalars, of ``beta`` times their difference to the
            reference.
        logprobs, entropy, argmax: the :class:`TokenMetrics` that the option ``metrics`` asks for, else None.

    Example::

        >>> loss_function = liger.losses.FusedLinearKTOLoss(use_ref_model=False)
        >>> loss, metrics = loss_function(input, weight, target, preference_labels=labels)
        >>> isinstance(metrics, liger.losses.KTOMetrics)
        True
    """

    chosen_logps_sum: Tensor
    rejected_logps_sum: Tensor
    chosen_rewards_sum: Tensor
    rejected_rewards_sum: Tensor
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None


_FACTORS: dict[str, Any] = dict.fromkeys(("beta", "desirable_weight", "undesirable_weight"), NOT_NEGATIVE)


class FusedLinearKTOLoss(FusedLinearLoss):
    """Kahneman-Tversky optimisation: a mean over sequences. A sequence without valid tokens adds 0 to the
    sum.

    Args:
        beta: scale of the rewards.
        use_ref_model: whether to subtract the log-probabilities of a reference model.
        average_log_prob: the log-probability of a sequence is the mean over its tokens instead of their sum.
        loss_type: ``"kto"``, or ``"apo_zero_unpaired"`` (arXiv 2408.06266), which does not subtract ``kl``.
        desirable_weight, undesirable_weight: factors of the losses of desirable and of undesirable answers.
        options: see :class:`FusedLinearLoss`.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an unknown loss type, or an option out of range.

    Source: Ethayarajh et al., arXiv 2402.01306, equation 7.

    Example::

        >>> loss_function = liger.losses.FusedLinearKTOLoss(use_ref_model=False)
        >>> loss, metrics = loss_function(input, weight, target, preference_labels=labels)
    """

    unit = "sequence"

    @arguments(use_ref_model=FLAG, average_log_prob=FLAG, loss_type=TEXT, **_FACTORS)
    def __init__(
        self,
        *,
        beta: float = 0.1,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        loss_type: KTOLossType = "kto",
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        self.loss_type = check_choice(self, "loss_type", loss_type, KTO_LOSS_TYPES)
        self.beta, self.use_ref_model, self.average_log_prob = beta, use_ref_model, average_log_prob
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    def compute(self, logprobs, entropy, *, mask, ref_logps, desirable, kl, sequences) -> Tensor:
        lengths = mask.sum(-1)
        ratio = sequence_scores(logprobs * mask, lengths, self.average_log_prob) - ref_logps - kl
        losses = sigmoid(where_scalar(desirable, -self.beta, self.beta, ratio) * ratio)
        weight = where_scalar(desirable, self.desirable_weight, self.undesirable_weight, ratio)
        return torch.where(lengths > 0, losses * weight, 0.0) / sequences

    @arguments(denominator=DIVISOR, max_length=INTEGER, kl=NUMBER_OR_TENSOR)
    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        preference_labels: Tensor,
        kl: float | Tensor | None = None,
        mask: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        ref_logps: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_length: int | None = None,
        denominator: float | Tensor | None = None,
    ) -> tuple[Tensor, KTOMetrics]:
        """The loss of a batch of answers, and its metrics.

        Args:
            input: (S, L, H) hidden states, or packed, (T, H) or (1, T, H); float16, bfloat16, float32 or
                float64, the same dtype for weight and bias.
            weight: (V, H).
            target: (S, L), (T,) or (1, T), int64 or int32: the class that each hidden state predicts.
            bias: (V,) or None.
            preference_labels: (S,), true or 1 for desirable answers.
            kl: a number or a tensor with one element, the KL divergence from the reference in nats, for
                example from :meth:`estimate_kl`; None means 0.
            mask: the shape of target, 0 at tokens to ignore.
            ref_input, ref_weight, ref_bias: the same for the reference model. They cost one GEMM and get no
                gradient.
            ref_logps: instead of the reference model, its log-probabilities per token in the shape of target,
                or their sums per sequence, (S,).
            cu_seqlens, max_length: of a packed batch: cumulative lengths (S + 1,), int32 or int64, and the
                longest length.
            denominator: the divisor of the sum over sequences, a number or a tensor with one element; None
                means the number of sequences.

        Returns:
            (loss, :class:`KTOMetrics`); the loss is a scalar in float32, or float64 for float64 inputs.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: no reference although ``use_ref_model`` is True, or a reference although it is False.
            RuntimeError: mismatched shapes, dtypes, devices or vocabularies; ref_input, ref_logps, kl or a
                denominator that requires grad.
        """
        batch = self.batch(input, target, mask=mask, cu_seqlens=cu_seqlens, max_length=max_length)
        batch.check("preference_labels", preference_labels, batch.shape[:1])
        desirable = preference_labels != 0
        reference = ref_input, ref_weight, ref_bias, ref_logps
        ref_logps = self.reference_scores(
            batch, weight, *reference, self.use_ref_model, self.average_log_prob
        )
        sequences = max(batch.shape[0], 1) if denominator is None else denominator
        sequences = as_scalar("denominator", sequences, batch)
        kl = as_scalar("kl", 0.0 if kl is None else kl, batch)
        if self.loss_type == "apo_zero_unpaired":
            kl = torch.zeros_like(kl)
        given = {"mask": batch.valid, "ref_logps": ref_logps, "desirable": desirable}
        shared = {"kl": kl, "sequences": sequences}
        loss, logprobs, _, tokens = self.run(
            batch, weight, bias, given=given, shared=shared, divisor=lambda: sequences
        )
        scores = sequence_scores(logprobs, batch.lengths(), self.average_log_prob)
        rewards = self.beta * (scores - ref_logps)
        chosen, rejected = (
            [torch.where(which, x, 0.0).sum() for x in (scores, rewards)] for which in (desirable, ~desirable)
        )
        return loss, KTOMetrics(chosen[0], rejected[0], chosen[1], rejected[1], *tokens)

    @torch.no_grad()
    @arguments(max_length=INTEGER)
    def estimate_kl(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        ref_logps: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_length: int | None = None,
    ) -> Tensor:
        """Estimates the KL divergence that :meth:`forward` takes as ``kl``, from answers paired with other
        prompts.

        The arguments are as for :meth:`forward`; ``target`` has the mismatched answers.

        Returns:
            A scalar in nats: the mean over sequences of the log-ratio of policy and reference, clamped to at
            least 0. In distributed training, average it over processes.

        Raises:
            ValueError: no reference.
            RuntimeError: mismatched shapes, dtypes, devices or vocabularies.

        Source: the reference point of Ethayarajh et al., arXiv 2402.01306.
        """
        batch = self.batch(input, target, mask=mask, cu_seqlens=cu_seqlens, max_length=max_length)
        ref_logps = self.reference_scores(
            batch, weight, ref_input, ref_weight, ref_bias, ref_logps, True, self.average_log_prob
        )
        own = self.scored(batch, NAMES_OF_HEAD, input, weight, bias)
        scores = sequence_scores(batch.padded_valid(own), batch.lengths(), self.average_log_prob)
        mean = (scores - ref_logps).sum() / max(batch.shape[0], 1)
        factor = batch.packing_factor
        return (mean if factor is None else mean * factor).clamp_min(0.0)
