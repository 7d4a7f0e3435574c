"""Losses of pairs, a chosen and a rejected answer: DPO, ORPO, CPO, SimPO.

The batch holds the chosen sequences, then as many rejected ones, in the same order. docs/losses.md defines every term.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .._core.arguments import (
    DIVISOR,
    FINITE,
    FLAG,
    FRACTION,
    INTEGER,
    NOT_NEGATIVE,
    POSITIVE,
    TEXT,
    LayerNames,
    arguments,
    check,
    check_indices,
)
from ..ops.fused_linear_logprobs import fused_linear_logprobs
from ._batch import as_scalar, sequence_scores, sigmoid
from .base import FusedLinearLoss, choice


class PreferenceMetrics(NamedTuple):
    """What preference training logs, one number per pair except for the first, without gradients.

    ``chosen_logps`` and ``rejected_logps`` are what the loss saw: sums over the tokens of a sequence, or means of them.
    """

    nll_loss: torch.Tensor | None
    chosen_logps: torch.Tensor
    rejected_logps: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor


class PreferenceLoss(FusedLinearLoss):
    """The base of losses of pairs: a subclass defines ``preference_loss``.

    The loss is the sum over pairs of ``preference_loss`` over the number of pairs, plus, with ``compute_nll_loss``,
    ``alpha`` times the negative log-likelihood of the chosen tokens over their number. A pair without a token that
    counts adds nothing to the sum.

    Args:
        beta: scale of the rewards.
        alpha: factor of the likelihood term.
        compute_nll_loss: whether there is one.
        average_log_prob: the log-probability of a sequence is the mean over its tokens, not their sum.
        use_ref_model: whether log-probabilities are compared with those of a reference model.
        options: those of :class:`FusedLinearLoss`.
    """

    unit = "pair"
    names = LayerNames("_input", "lin_weight")

    @arguments(
        error=ValueError, beta=NOT_NEGATIVE, alpha=NOT_NEGATIVE, compute_nll_loss=FLAG, average_log_prob=FLAG,
        use_ref_model=FLAG,
    )  # fmt: skip
    def __init__(
        self, *, beta=0.1, alpha=1.0, compute_nll_loss=False, average_log_prob=False, use_ref_model=False, **options
    ):  # fmt: skip
        super().__init__(**options)
        self.beta, self.alpha, self.compute_nll_loss = beta, alpha, compute_nll_loss
        self.average_log_prob, self.use_ref_model = average_log_prob, use_ref_model

    def preference_loss(self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
        """(pairs,) losses of pairs from the log-probabilities of their sequences; those of the reference are 0 where
        there is none."""
        raise NotImplementedError(f"{type(self).__name__} defines no preference_loss")

    def compute(self, logprobs, entropy, *, mask, ref_logps, pairs, nll_mask=None, nll_tokens=None):
        lengths = mask.sum(-1)
        scores = sequence_scores(logprobs * mask, lengths, self.average_log_prob)
        losses = self.preference_loss(*scores, *ref_logps)
        terms = torch.where(lengths.sum(0) > 0, losses, 0.0) / pairs
        if nll_mask is None:
            return terms
        return terms - self.alpha * (logprobs[0] * nll_mask[0]).sum(-1) / nll_tokens

    @arguments(num_items_in_batch=DIVISOR, max_length=INTEGER)
    def forward(
        self, lin_weight, _input, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, *,
        ref_logps=None, nll_target=None, nll_mask=None, mask=None, cu_seqlens=None, max_length=None,
        num_items_in_batch=None,
    ):  # fmt: skip
        """The loss of a batch of pairs, and its metrics.

        Args:
            lin_weight: (V, H), of the projection.
            _input: (2 * pairs, L, H) hidden states, the chosen sequences first; or packed, (T, H) or (1, T, H).
            target: (2 * pairs, L), or (T,) or (1, T): the token that each hidden state is to predict.
            bias: (V,).
            ref_input, ref_weight, ref_bias: the same of the reference model, which costs one product.
            ref_logps: in their place, log-probabilities per token, shaped as target, or their sums per sequence,
                (2 * pairs,).
            nll_target: shaped as target, the tokens of the likelihood term; None for those of target. Where a token of
                a chosen sequence differs from that of target, and both count, its log-probability is computed apart.
            nll_mask: shaped as target, in place of ``nll_target`` where only more tokens of target are to count
                (prompts, too): 0 for those that do not count in the likelihood term, whatever ``mask`` is there.
            mask: shaped as target, 0 for tokens that do not count.
            cu_seqlens, max_length: of a packed batch, (2 * pairs + 1,) where sequences begin, and the longest length.
            num_items_in_batch: takes the place of the number of pairs, which the sum is divided by.

        Returns:
            (the loss, :class:`PreferenceMetrics`).

        Raises:
            ValueError: a reference that is missing or not wanted, both ``nll_target`` and ``nll_mask``.
            RuntimeError: an odd number of sequences, shapes that do not fit, another vocabulary of the reference.
        """
        where = {"cu_seqlens": cu_seqlens, "max_length": max_length}
        batch = preferred = likely = self.batch(_input, target, mask=mask, **where)
        live = of_likelihood = preferred.live
        half = batch.shape[0] // 2
        if nll_target is not None and nll_mask is not None:
            raise ValueError(f"{batch.op}: both nll_target and nll_mask were given, expected one of them")
        for name, tensor in (("nll_target", nll_target), ("nll_mask", nll_mask)):
            if tensor is not None:
                preferred.check(name, tensor, target.shape)
        if self.compute_nll_loss and nll_target is not None:
            check_indices(batch.op, "nll_target", nll_target)
            likely = self.batch(_input, nll_target, **where)
        elif self.compute_nll_loss and nll_mask is not None:
            likely = self.batch(_input, target, mask=nll_mask, **where)
        if likely is not preferred:
            both = torch.where(preferred.target != self.ignore_index, preferred.target, likely.target)
            batch = self.batch(_input, both.view(target.shape), **where)
            of_likelihood = likely.live & batch.placed(likely.target == batch.target)
        nll_tokens = likely.live[:half].sum().clamp_min(1)
        pairs = max(batch.shape[0] // 2, 1) if num_items_in_batch is None else num_items_in_batch
        ref_logps = self.reference_scores(
            preferred, lin_weight, ref_input, ref_weight, ref_bias, ref_logps, self.use_ref_model,
            self.average_log_prob,
        )  # fmt: skip
        loss, logprobs, _ = self.run(
            batch, lin_weight, bias,
            given={
                "mask": live, "ref_logps": ref_logps, "nll_mask": of_likelihood if self.compute_nll_loss else None,
            },
            shared={"pairs": as_scalar("num_items_in_batch", pairs, batch), "nll_tokens": nll_tokens},
        )  # fmt: skip
        scores = sequence_scores(logprobs * live, live.sum(-1), self.average_log_prob)
        rewards = self.beta * (scores - ref_logps)
        nll_loss = None
        if self.compute_nll_loss:
            nll_loss = -(logprobs * of_likelihood)[:half].sum() / nll_tokens
            if nll_target is not None:
                others = self._of_other_tokens(batch, likely, lin_weight, bias) / nll_tokens
                loss, nll_loss = loss - self.alpha * others, nll_loss - others.detach()
        return loss, PreferenceMetrics(nll_loss, scores[:half], scores[half:], rewards[:half], rewards[half:])

    def _of_other_tokens(self, batch, likely, weight, bias):
        """The sum of the log-probabilities of chosen tokens of ``likely`` where those of ``batch`` are others."""
        chosen = batch.spread(torch.arange(batch.shape[0], device=batch.target.device) < batch.shape[0] // 2)
        other = torch.where(chosen & (likely.target != batch.target), likely.target, self.ignore_index)
        options = self.temperature, self.ignore_index, self.softcap, self.memory_budget
        return fused_linear_logprobs(batch.hidden, weight, other, bias, *options).sum()


# --- DPO ----------------------------------------------------------------------------------------------------------

DPO_LOSS_TYPES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop",
)  # fmt: skip


def _smoothed_sigmoid(x, smoothing):
    """The cross entropy of ``sigmoid(x)`` with the label 1, which is wrong with probability ``smoothing``."""
    return -(1 - smoothing) * F.logsigmoid(x) - smoothing * F.logsigmoid(-x)


class FusedLinearDPOLoss(PreferenceLoss):
    """Direct preference optimisation, with the losses that go by its name.

    Args:
        beta, alpha, compute_nll_loss, average_log_prob, use_ref_model: as in :class:`PreferenceLoss`.
        loss_type: ``"sigmoid"`` (arXiv 2305.18290), ``"hinge"`` (2305.10425), ``"ipo"`` (2310.12036, of means over
            tokens), ``"exo_pair"`` (2402.00856), ``"nca_pair"`` (2402.05369), ``"robust"`` (2403.00409),
            ``"bco_pair"`` (2404.04656), ``"sppo_hard"`` (2405.00675), ``"apo_zero"`` and ``"apo_down"`` (2408.06266),
            ``"discopop"`` (2406.08414).
        label_smoothing: the probability that a label is wrong; for sigmoid, robust (below 0.5) and exo_pair (positive;
            0 stands for 1e-3).
        discopop_tau: temperature of discopop.
        options: those of :class:`FusedLinearLoss`.

    Raises:
        ValueError: an unknown loss type, a label smoothing out of range.
    """

    @arguments(
        error=ValueError, loss_type=TEXT, beta=NOT_NEGATIVE, label_smoothing=FRACTION, discopop_tau=POSITIVE,
        use_ref_model=FLAG,
    )  # fmt: skip
    def __init__(
        self, *, loss_type="sigmoid", beta=0.1, label_smoothing=0.0, discopop_tau=0.05, use_ref_model=True, **options
    ):  # fmt: skip
        super().__init__(beta=beta, use_ref_model=use_ref_model, **options)
        self.loss_type = choice(self, "loss_type", loss_type, DPO_LOSS_TYPES)
        if loss_type in ("ipo", "sppo_hard"):
            # Their target margins are divided by beta.
            check(type(self).__name__, "beta", beta, POSITIVE, error=ValueError)
        below = 0.5 if loss_type == "robust" else 1.0
        if not 0.0 <= label_smoothing < below:
            raise ValueError(
                f"FusedLinearDPOLoss: label_smoothing is {label_smoothing}, expected at least 0 and less than {below}"
            )
        self.label_smoothing, self.discopop_tau = label_smoothing, discopop_tau
        self.average_log_prob |= loss_type == "ipo"

    def preference_loss(self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
        chosen, rejected = chosen_logps - ref_chosen_logps, rejected_logps - ref_rejected_logps
        a, b = self.beta * chosen, self.beta * rejected
        margin, smoothing = a - b, self.label_smoothing
        match self.loss_type:
            case "sigmoid":
                return _smoothed_sigmoid(margin, smoothing)
            case "hinge":
                return torch.relu(1 - margin)
            case "ipo":
                return (chosen - rejected - 1 / (2 * self.beta)).square()
            case "exo_pair":
                wrong = torch.full_like(margin, smoothing or 1e-3)
                return sigmoid(margin) * (F.logsigmoid(margin) - (-wrong).log1p()) + sigmoid(-margin) * (
                    F.logsigmoid(-margin) - wrong.log()
                )
            case "nca_pair":
                return -F.logsigmoid(a) - 0.5 * (F.logsigmoid(-a) + F.logsigmoid(-b))
            case "robust":
                flipped = smoothing * F.logsigmoid(-margin)
                return (flipped - (1 - smoothing) * F.logsigmoid(margin)) / (1 - 2 * smoothing)
            case "bco_pair":
                return -F.logsigmoid(a) - F.logsigmoid(-b)
            case "sppo_hard":
                return (chosen - 0.5 / self.beta).square() + (rejected + 0.5 / self.beta).square()
            case "apo_zero":
                return sigmoid(-a) + sigmoid(b)
            case "apo_down":
                return sigmoid(a) + sigmoid(-margin)
        mix = sigmoid(margin / self.discopop_tau)
        return sigmoid(-margin / self.discopop_tau) * -F.logsigmoid(margin) + mix * torch.exp(-margin)


# --- without a reference ------------------------------------------------------------------------------------------


def _log1mexp(x):
    """``log(1 - exp(x))`` of x <= 0, finite at 0."""
    x = x.clamp_max(-torch.finfo(x.dtype).eps)
    return torch.where(x > -0.693, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


class FusedLinearORPOLoss(PreferenceLoss):
    """Odds ratio preference optimisation: the likelihood of the chosen answers and ``beta`` times the log-odds term.

    Args:
        beta, compute_nll_loss, options: as in :class:`PreferenceLoss`.

    Source: Hong et al., arXiv 2403.07691, equations 4 to 7.
    """

    @arguments(error=ValueError, beta=NOT_NEGATIVE, compute_nll_loss=FLAG)
    def __init__(self, *, beta=0.1, compute_nll_loss=True, **options):
        super().__init__(beta=beta, compute_nll_loss=compute_nll_loss, average_log_prob=True, **options)

    def preference_loss(self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
        log_odds = chosen_logps - rejected_logps - (_log1mexp(chosen_logps) - _log1mexp(rejected_logps))
        return -self.beta * F.logsigmoid(log_odds)


CPO_LOSS_TYPES = ("sigmoid", "hinge", "ipo")


class FusedLinearCPOLoss(PreferenceLoss):
    """Contrastive preference optimisation.

    Args:
        beta, alpha, compute_nll_loss, average_log_prob, options: as in :class:`PreferenceLoss`.
        loss_type: ``"sigmoid"``, ``"hinge"`` or ``"ipo"``.
        label_smoothing: the probability that a label is wrong, for sigmoid.

    Source: Xu et al., arXiv 2401.08417.
    """

    @arguments(
        error=ValueError, beta=NOT_NEGATIVE, alpha=NOT_NEGATIVE, label_smoothing=FRACTION, loss_type=TEXT,
        compute_nll_loss=FLAG,
    )  # fmt: skip
    def __init__(
        self, *, beta=0.1, alpha=1.0, label_smoothing=0.0, loss_type="sigmoid", compute_nll_loss=True, **options
    ):  # fmt: skip
        super().__init__(beta=beta, alpha=alpha, compute_nll_loss=compute_nll_loss, **options)
        self.loss_type = choice(self, "loss_type", loss_type, CPO_LOSS_TYPES)
        if loss_type == "ipo":
            check(type(self).__name__, "beta", beta, POSITIVE, error=ValueError)
        self.label_smoothing = label_smoothing

    def preference_loss(self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
        difference = chosen_logps - rejected_logps
        if self.loss_type == "ipo":
            return (difference - 1 / (2 * self.beta)).square()
        if self.loss_type == "hinge":
            return torch.relu(1 - self.beta * difference)
        return _smoothed_sigmoid(self.beta * difference, self.label_smoothing)


class FusedLinearSimPOLoss(PreferenceLoss):
    """Simple preference optimisation: means over tokens, and a target margin ``gamma``.

    Args:
        beta, alpha, compute_nll_loss, options: as in :class:`PreferenceLoss`.
        gamma: the margin by which the scaled mean of the chosen answer is to be larger.
        label_smoothing: the probability that a label is wrong.

    Source: Meng et al., arXiv 2405.14734.
    """

    @arguments(
        error=ValueError, beta=NOT_NEGATIVE, alpha=NOT_NEGATIVE, gamma=FINITE, label_smoothing=FRACTION,
        compute_nll_loss=FLAG,
    )  # fmt: skip
    def __init__(
        self, *, beta=0.1, alpha=1.0, gamma=0.5, label_smoothing=0.0, compute_nll_loss=True, **options
    ):  # fmt: skip
        super().__init__(
            beta=beta, alpha=alpha, compute_nll_loss=compute_nll_loss, average_log_prob=True, **options
        )
        self.gamma, self.label_smoothing = gamma, label_smoothing

    def preference_loss(self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
        margin = self.beta * (chosen_logps - rejected_logps) - self.gamma
        return _smoothed_sigmoid(margin, self.label_smoothing)
