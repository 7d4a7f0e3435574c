"""Losses of single answers that are marked desirable or not: KTO."""

from typing import NamedTuple

import torch

from .._core.arguments import (
    DIVISOR,
    FLAG,
    INTEGER,
    NOT_NEGATIVE,
    NUMBER_OR_TENSOR,
    TEXT,
    LayerNames,
    arguments,
)
from ._batch import as_scalar, either, sequence_scores, sigmoid
from .base import FusedLinearLoss, choice

KTO_LOSS_TYPES = ("kto", "apo_zero_unpaired")


class KTOMetrics(NamedTuple):
    """Sums over the desirable ("chosen") and the other ("rejected") sequences, without gradients."""

    chosen_logps_sum: torch.Tensor
    rejected_logps_sum: torch.Tensor
    chosen_rewards_sum: torch.Tensor
    rejected_rewards_sum: torch.Tensor


class FusedLinearKTOLoss(FusedLinearLoss):
    """Kahneman-Tversky optimisation, a mean over sequences; one without a token that counts adds nothing to the sum.

    Args:
        beta: scale of the rewards.
        use_ref_model: whether log-probabilities are compared with those of a reference model.
        average_log_prob: the log-probability of a sequence is the mean over its tokens, not their sum.
        loss_type: ``"kto"``, or ``"apo_zero_unpaired"`` (arXiv 2408.06266), which has no divergence.
        desirable_weight, undesirable_weight: factors of the losses of either kind.
        options: those of :class:`FusedLinearLoss`.

    Raises:
        ValueError: an unknown loss type.

    Source: Ethayarajh et al., arXiv 2402.01306, equation 7.
    """

    unit = "sequence"
    names = LayerNames("_input", "lin_weight")

    @arguments(
        error=ValueError, beta=NOT_NEGATIVE, use_ref_model=FLAG, average_log_prob=FLAG, loss_type=TEXT,
        desirable_weight=NOT_NEGATIVE, undesirable_weight=NOT_NEGATIVE,
    )  # fmt: skip
    def __init__(
        self, *, beta=0.1, use_ref_model=True, average_log_prob=False, loss_type="kto", desirable_weight=1.0,
        undesirable_weight=1.0, **options,
    ):  # fmt: skip
        super().__init__(**options)
        self.loss_type = choice(self, "loss_type", loss_type, KTO_LOSS_TYPES)
        self.beta, self.use_ref_model, self.average_log_prob = beta, use_ref_model, average_log_prob
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    def compute(self, logprobs, entropy, *, mask, ref_logps, desirable, kl, sequences):
        lengths = mask.sum(-1)
        ratio = sequence_scores(logprobs * mask, lengths, self.average_log_prob) - ref_logps - kl
        losses = sigmoid(either(desirable, -self.beta, self.beta, ratio) * ratio)
        weight = either(desirable, self.desirable_weight, self.undesirable_weight, ratio)
        return torch.where(lengths > 0, losses * weight, 0.0) / sequences

    @arguments(num_items_in_batch=DIVISOR, max_length=INTEGER, kl=NUMBER_OR_TENSOR)
    def forward(
        self, _input, lin_weight, target, bias=None, preference_labels=None, ref_input=None, ref_weight=None,
        ref_bias=None, kl=None, *, ref_logps=None, mask=None, cu_seqlens=None, max_length=None,
        num_items_in_batch=None,
    ):  # fmt: skip
        """The loss of a batch of answers, and its metrics.

        Args:
            _input: (S, L, H) hidden states; or packed, (T, H) or (1, T, H).
            lin_weight: (V, H), of the projection.
            target: (S, L), (T,) or (1, T): the token that each hidden state is to predict.
            bias: (V,).
            preference_labels: (S,), true or 1 for desirable answers.
            ref_input, ref_weight, ref_bias: the same of the reference model, which costs one product.
            kl: one element, the divergence from the reference, for example from :meth:`estimate_kl`; None means 0.
            ref_logps: in place of the reference model, log-probabilities per token, or their sums per sequence, (S,).
            mask: shaped as target, 0 for tokens that do not count.
            cu_seqlens, max_length: of a packed batch, (S + 1,) where sequences begin, and the longest length.
            num_items_in_batch: takes the place of the number of sequences, which the sum is divided by.

        Returns:
            (the loss, :class:`KTOMetrics`).

        Raises:
            ValueError: no preference labels; a reference that is missing or not wanted.
            RuntimeError: shapes that do not fit, another vocabulary of the reference.
        """
        batch = self.batch(_input, target, mask=mask, cu_seqlens=cu_seqlens, max_length=max_length)
        if preference_labels is None:
            raise ValueError(
                f"{batch.op}: no preference_labels: one per sequence says whether it is desirable"
            )
        batch.check("preference_labels", preference_labels, batch.shape[:1])
        desirable = preference_labels != 0
        ref_logps = self.reference_scores(
            batch, lin_weight, ref_input, ref_weight, ref_bias, ref_logps, self.use_ref_model,
            self.average_log_prob,
        )  # fmt: skip
        sequences = max(batch.shape[0], 1) if num_items_in_batch is None else num_items_in_batch
        if kl is None or self.loss_type == "apo_zero_unpaired":
            kl = 0.0
        loss, logprobs, _ = self.run(
            batch, lin_weight, bias,
            given={"mask": batch.live, "ref_logps": ref_logps, "desirable": desirable},
            shared={"kl": as_scalar("kl", kl, batch), "sequences": as_scalar("num_items_in_batch", sequences, batch)},
        )  # fmt: skip
        scores = sequence_scores(logprobs, batch.lengths(), self.average_log_prob)
        rewards = self.beta * (scores - ref_logps)
        chosen, rejected = (
            [torch.where(which, x, 0.0).sum() for x in (scores, rewards)] for which in (desirable, ~desirable)
        )
        return loss, KTOMetrics(chosen[0], rejected[0], chosen[1], rejected[1])

    @torch.no_grad()
    @arguments(max_length=INTEGER)
    def estimate_kl(
        self, _input, lin_weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, *,
        ref_logps=None, mask=None, cu_seqlens=None, max_length=None,
    ):  # fmt: skip
        """The divergence that :meth:`forward` takes as ``kl``: of answers that belong to other prompts, the mean of the
        log-ratios of policy and reference, at least 0. Arguments as there. Average it over processes where there are
        several."""
        batch = self.batch(_input, target, mask=mask, cu_seqlens=cu_seqlens, max_length=max_length)
        ref_logps = self.reference_scores(
            batch, lin_weight, ref_input, ref_weight, ref_bias, ref_logps, True, self.average_log_prob
        )
        own = self.reference(batch, lin_weight, _input, lin_weight, bias)
        scores = sequence_scores(batch.sequences(own), batch.lengths(), self.average_log_prob)
        mean = (scores - ref_logps).sum() / max(batch.shape[0], 1)
        return (mean if batch.fits is None else mean * batch.fits).clamp_min(0.0)
