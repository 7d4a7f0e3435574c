# SPDX-License-Identifier: BSD-3-Clause
"""The base class of the losses of preference pairs, a chosen and a rejected answer, and its metrics.

A batch has all chosen sequences, then all rejected ones in the same order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._core.op.arguments import (
    DIVISOR,
    FINITE,
    FLAG,
    FRACTION,
    INTEGER,
    NOT_NEGATIVE,
    POSITIVE,
    TEXT,
    arguments,
)
from .._core.op.named_results import serialisable
from .._core.op.tensors import check_given_classes, check_indices
from ..ops.fused_linear_logprobs.op import fused_linear_logprobs
from ._batch import as_scalar, sequence_scores
from .base import FusedLinearLoss
from .results import LossOptions


@serialisable
class PreferenceMetrics(NamedTuple):
    """Metrics of preference training, without gradients, in float32 (float64 for float64 inputs).

    Attributes:
        nll_loss: scalar, the mean negative log-likelihood of the chosen tokens in nats; None without that
            term.
        chosen_logps, rejected_logps: (pairs,) log-probabilities of the sequences in nats: sums over their
            tokens, or means with ``average_log_prob``.
        chosen_rewards, rejected_rewards: (pairs,) ``beta`` times the difference to the reference's
            log-probabilities.
        logprobs, entropy, argmax: the :class:`TokenMetrics` that the option ``metrics`` asks for, else None.
            With ``nll_mask`` or ``nll_target`` they include the tokens that only the likelihood term reads,
            with its target.

    Example::

        >>> loss_function = liger.losses.FusedLinearORPOLoss()
        >>> loss, metrics = loss_function(input, weight, target)
        >>> isinstance(metrics, liger.losses.PreferenceMetrics)
        True
    """

    nll_loss: Tensor | None
    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None


# Options of all losses of pairs; each has some of them.
RULES: dict[str, Any] = {
    **dict.fromkeys(("compute_nll_loss", "average_log_prob", "use_ref_model"), FLAG),
    **{"beta": NOT_NEGATIVE, "alpha": NOT_NEGATIVE, "gamma": FINITE},
    **{"loss_type": TEXT, "label_smoothing": FRACTION, "discopop_tau": POSITIVE},
}


_OPTIONS_OF_LOGPROBS = tuple(name for name in LossOptions.__annotations__ if name != "metrics")


class PreferenceLoss(FusedLinearLoss):
    """Base class of the losses of pairs: a subclass defines ``preference_loss``.

    The loss is the mean of ``preference_loss`` over pairs. ``compute_nll_loss`` adds ``alpha`` times the mean
    negative log-likelihood of the chosen tokens. A pair without valid tokens adds 0 to the sum.

    Args:
        beta: scale of the rewards.
        alpha: factor of the likelihood term.
        compute_nll_loss: whether to add the likelihood term.
        average_log_prob: the log-probability of a sequence is the mean over its tokens instead of their sum.
        use_ref_model: whether to subtract the log-probabilities of a reference model.
        options: see :class:`FusedLinearLoss`.

    Raises:
        TypeError, ValueError: as :class:`FusedLinearLoss`.

    Example::

        >>> class MarginLoss(liger.losses.PreferenceLoss):
        ...     def preference_loss(self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
        ...         return torch.nn.functional.softplus(1.0 - self.beta * (chosen_logps - rejected_logps))
        >>> loss, metrics = MarginLoss(beta=0.5)(input, weight, target, bias)
    """

    unit = "pair"

    @arguments(**RULES)
    def __init__(
        self,
        *,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        average_log_prob: bool = False,
        use_ref_model: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        self.beta, self.alpha, self.compute_nll_loss = beta, alpha, compute_nll_loss
        self.average_log_prob, self.use_ref_model = average_log_prob, use_ref_model

    def preference_loss(
        self,
        chosen_logps: Tensor,
        rejected_logps: Tensor,
        ref_chosen_logps: Tensor,
        ref_rejected_logps: Tensor,
    ) -> Tensor:
        """(pairs,) losses from the (pairs,) log-probabilities of the sequences; the reference's are 0 without
        a reference model."""
        raise NotImplementedError(f"{type(self).__name__} defines no preference_loss")

    def compute(self, logprobs, entropy, *, mask, ref_logps, pairs, nll_tokens, nll_mask=None) -> Tensor:
        lengths = mask.sum(-1)
        scores = sequence_scores(logprobs * mask, lengths, self.average_log_prob)
        losses = self.preference_loss(*scores, *ref_logps)
        terms = torch.where(lengths.sum(0) > 0, losses, 0.0) / pairs
        if nll_mask is None:
            return terms
        return terms - self.alpha * (logprobs[0] * nll_mask[0]).sum(-1) / nll_tokens

    @arguments(denominator=DIVISOR, nll_denominator=DIVISOR, max_length=INTEGER)
    def forward(
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
        nll_target: Tensor | None = None,
        nll_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_length: int | None = None,
        denominator: float | Tensor | None = None,
        nll_denominator: float | Tensor | None = None,
    ) -> tuple[Tensor, PreferenceMetrics]:
        """The loss of a batch of pairs, and its metrics.

        Args:
            input: (2 * pairs, L, H) hidden states, the chosen sequences first; or packed, (T, H) or (1, T,
                H); float16, bfloat16, float32 or float64, the same dtype for weight and bias.
            weight: (V, H).
            target: (2 * pairs, L), or (T,) or (1, T), int64 or int32: the class that each hidden state
                predicts.
            bias: (V,) or None.
            mask: the shape of target, 0 at tokens to ignore.
            ref_input, ref_weight, ref_bias: the same for the reference model. They cost one GEMM and get no
                gradient.
            ref_logps: instead of these, log-probabilities of the reference: per token in the shape of target,
                or sums per sequence, (2 * pairs,).
            nll_target: the targets of the likelihood term, in the shape of target; None for target itself. If
                a chosen token has two different valid targets, the log-probability of the second one costs
                another GEMM.
            nll_mask: instead of ``nll_target``, if the likelihood term has the same targets but other valid
                tokens (prompts, for example): the shape of target, 0 at tokens to ignore in that term.
                ``mask`` does not apply to it.
            cu_seqlens, max_length: of a packed batch: cumulative lengths (2 * pairs + 1,), int32 or int64,
                and the longest length.
            denominator: the divisor of the sum over pairs, a number or a tensor with one element; None means
                the number of pairs. For micro-batches, pass the number of pairs of all of them; if gradients
                are averaged over processes, the global number over the number of processes.
            nll_denominator: the same of the likelihood term, whose sum is over tokens of chosen sequences;
                None means the number of valid ones.

        Returns:
            (loss, :class:`PreferenceMetrics`); the loss is a scalar in float32, or float64 for float64
            inputs.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: no reference although ``use_ref_model`` is True, a reference although it is False, or
                both ``nll_target`` and ``nll_mask``.
            RuntimeError: an odd number of sequences; mismatched shapes, dtypes, devices or vocabularies;
                ref_input, ref_logps or a denominator that requires grad.
        """

        def make_batch(target, mask=None):
            return self.batch(input, target, mask=mask, cu_seqlens=cu_seqlens, max_length=max_length)

        # batch has the targets of the op: the targets of preference_batch, and the targets of tokens that
        # only the likelihood term reads.
        batch = preference_batch = nll_batch = make_batch(target, mask)
        valid = nll_valid = preference_batch.valid
        half = batch.shape[0] // 2
        if nll_target is not None and nll_mask is not None:
            raise ValueError(f"{batch.op}: both nll_target and nll_mask were given, expected one of them")
        for name, tensor in (("nll_target", nll_target), ("nll_mask", nll_mask)):
            if tensor is not None:
                preference_batch.check(name, tensor, target.shape)
        if self.compute_nll_loss and nll_target is not None:
            check_indices(batch.op, "nll_target", nll_target)
            check_given_classes(
                batch.op, "nll_target", nll_target, weight.shape[:1].numel(), self.ignore_index
            )
            nll_batch = make_batch(nll_target)
        elif self.compute_nll_loss and nll_mask is not None:
            nll_batch = make_batch(target, nll_mask)
        if nll_batch is not preference_batch:
            merged = torch.where(
                preference_batch.target != self.ignore_index, preference_batch.target, nll_batch.target
            )
            batch = make_batch(merged.view(target.shape))
            nll_valid = nll_batch.valid & batch.padded(nll_batch.target == batch.target)
        nll_tokens = nll_batch.valid[:half].sum().clamp_min(1)
        if nll_denominator is not None:
            nll_tokens = as_scalar("nll_denominator", nll_denominator, batch)
        pairs = max(batch.shape[0] // 2, 1) if denominator is None else denominator
        pairs = as_scalar("denominator", pairs, batch)
        reference = ref_input, ref_weight, ref_bias, ref_logps
        ref_logps = self.reference_scores(
            preference_batch, weight, *reference, self.use_ref_model, self.average_log_prob
        )
        given = {
            "mask": valid,
            "ref_logps": ref_logps,
            "nll_mask": nll_valid if self.compute_nll_loss else None,
        }
        shared = {"pairs": pairs, "nll_tokens": nll_tokens}

        def divisor():
            return pairs if nll_denominator is None else torch.minimum(pairs, nll_tokens)

        loss, logprobs, _, tokens = self.run(batch, weight, bias, given=given, shared=shared, divisor=divisor)
        scores = sequence_scores(logprobs * valid, valid.sum(-1), self.average_log_prob)
        rewards = self.beta * (scores - ref_logps)
        nll_loss = None
        if self.compute_nll_loss:
            nll_loss = -(logprobs * nll_valid)[:half].sum() / nll_tokens
            if nll_target is not None:
                others = self._sum_of_other_targets(batch, nll_batch, weight, bias) / nll_tokens
                loss, nll_loss = loss - self.alpha * others, nll_loss - others.detach()
        return loss, PreferenceMetrics(
            nll_loss, scores[:half], scores[half:], rewards[:half], rewards[half:], *tokens
        )

    def _sum_of_other_targets(self, batch, nll_batch, weight, bias):
        """The sum of the log-probabilities of the chosen tokens' targets in ``nll_batch``, where they differ
        from the targets in ``batch``."""
        chosen = batch.spread(torch.arange(batch.shape[0], device=batch.target.device) < batch.shape[0] // 2)
        other = torch.where(chosen & (nll_batch.target != batch.target), nll_batch.target, self.ignore_index)
        options = {name: getattr(self, name) for name in _OPTIONS_OF_LOGPROBS}
        logprobs = fused_linear_logprobs(batch.input, weight, other, bias, **options)
        return logprobs.sum()
