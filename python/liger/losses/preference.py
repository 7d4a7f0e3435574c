# SPDX-License-Identifier: BSD-3-Clause
"""Losses of preference pairs: DPO, ORPO, CPO, SimPO. docs/guides/losses.md defines every term."""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from typing_extensions import Unpack

from .._core.op.arguments import POSITIVE, arguments, check
from ._batch import sigmoid
from ._pairs import RULES, PreferenceLoss
from .base import check_choice
from .results import LossOptions

DPOLossType = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
]
DPO_LOSS_TYPES: tuple[DPOLossType, ...] = get_args(DPOLossType)
# The loss types that read ``label_smoothing``.
_SMOOTHED: tuple[str, ...] = ("sigmoid", "exo_pair", "robust")


def _smoothed_sigmoid(x, smoothing):
    """Cross entropy of ``sigmoid(x)`` with the label 1, smoothed by the probability ``smoothing`` of the
    label 0."""
    return -(1 - smoothing) * F.logsigmoid(x) - smoothing * F.logsigmoid(-x)


class FusedLinearDPOLoss(PreferenceLoss):
    """Direct preference optimisation and its variants.

    Args:
        beta, use_ref_model, alpha, compute_nll_loss, average_log_prob: as in :class:`PreferenceLoss`.
        loss_type: ``"sigmoid"`` (arXiv 2305.18290), ``"hinge"`` (2305.10425), ``"ipo"`` (2310.12036, of means
            over tokens), ``"exo_pair"`` (2402.00856), ``"nca_pair"`` (2402.05369), ``"robust"`` (2403.00409),
            ``"bco_pair"`` (2404.04656), ``"sppo_hard"`` (2405.00675), ``"apo_zero"`` and ``"apo_down"``
            (2408.06266), ``"discopop"`` (2406.08414).
        label_smoothing: the probability that a label is wrong; for sigmoid, robust (below 0.5) and exo_pair
            (positive; 0 stands for 1e-3).
        discopop_tau: temperature of discopop.
        options: see :class:`FusedLinearLoss`.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an unknown loss type, or an option out of range.

    Source: Rafailov et al., arXiv 2305.18290, equation 7; the variants as named above, with the formulas of
    TRL.

    Example::

        >>> loss_function = liger.losses.FusedLinearDPOLoss(beta=0.1)
        >>> loss, metrics = loss_function(
        ...     input, weight, target, ref_input=ref_input, ref_weight=ref_weight
        ... )
    """

    @arguments(used_by={"label_smoothing": _SMOOTHED, "discopop_tau": ("discopop",)}, **RULES)
    def __init__(
        self,
        *,
        loss_type: DPOLossType = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        use_ref_model: bool = True,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        average_log_prob: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        scales: Any = {"beta": beta, "alpha": alpha, "average_log_prob": average_log_prob}
        flags: Any = {"compute_nll_loss": compute_nll_loss, "use_ref_model": use_ref_model}
        super().__init__(**scales, **flags, **options)
        self.loss_type = check_choice(self, "loss_type", loss_type, DPO_LOSS_TYPES)
        if loss_type in ("ipo", "sppo_hard"):
            # Their target margin is inversely proportional to beta.
            check(type(self).__name__, "beta", beta, POSITIVE)
        below = 0.5 if loss_type == "robust" else 1.0
        if loss_type in _SMOOTHED and not label_smoothing < below:
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
        # One exponential: exp(-margin) alone overflows where its weight is 0.
        exponential = torch.exp(F.logsigmoid(margin / self.discopop_tau) - margin)
        return sigmoid(-margin / self.discopop_tau) * -F.logsigmoid(margin) + exponential


# --- without a reference model ------------------------------------------------------------------------------


def _log1mexp(x):
    """``log(1 - exp(x))`` for x <= 0, finite at 0."""
    x = x.clamp_max(-torch.finfo(x.dtype).eps)
    return torch.where(x > -0.693, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


class FusedLinearORPOLoss(PreferenceLoss):
    """Odds ratio preference optimisation: negative log-likelihood of the chosen answers, and ``beta`` times
    the odds-ratio term.

    Args:
        beta: factor of the odds-ratio term.
        alpha, compute_nll_loss, use_ref_model, options: as in :class:`PreferenceLoss`. Log-probabilities of
            sequences are means over tokens.

    Raises:
        TypeError, ValueError: as :class:`PreferenceLoss`.

    Source: Hong et al., arXiv 2403.07691, equations 4 to 7.

    Example::

        >>> loss_function = liger.losses.FusedLinearORPOLoss(beta=0.1)
        >>> loss, metrics = loss_function(input, weight, target, bias)
    """

    @arguments(**RULES)
    def __init__(
        self,
        *,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = True,
        use_ref_model: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        scales: Any = {"beta": beta, "alpha": alpha, "average_log_prob": True}
        flags: Any = {"compute_nll_loss": compute_nll_loss, "use_ref_model": use_ref_model}
        super().__init__(**scales, **flags, **options)

    def preference_loss(self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
        log_odds = chosen_logps - rejected_logps - (_log1mexp(chosen_logps) - _log1mexp(rejected_logps))
        return -self.beta * F.logsigmoid(log_odds)


CPOLossType = Literal["sigmoid", "hinge", "ipo"]
CPO_LOSS_TYPES: tuple[CPOLossType, ...] = get_args(CPOLossType)


class FusedLinearCPOLoss(PreferenceLoss):
    """Contrastive preference optimisation.

    Args:
        beta, alpha, compute_nll_loss, average_log_prob, use_ref_model, options: as in
            :class:`PreferenceLoss`.
        loss_type: ``"sigmoid"``, ``"hinge"`` or ``"ipo"``.
        label_smoothing: the probability that a label is wrong, for sigmoid.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an unknown loss type, or an option out of range.

    Source: Xu et al., arXiv 2401.08417.

    Example::

        >>> loss_function = liger.losses.FusedLinearCPOLoss(loss_type="hinge")
        >>> loss, metrics = loss_function(input, weight, target, bias)
    """

    @arguments(used_by={"label_smoothing": ("sigmoid",)}, **RULES)
    def __init__(
        self,
        *,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        loss_type: CPOLossType = "sigmoid",
        compute_nll_loss: bool = True,
        average_log_prob: bool = False,
        use_ref_model: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        scales: Any = {"beta": beta, "alpha": alpha, "average_log_prob": average_log_prob}
        flags: Any = {"compute_nll_loss": compute_nll_loss, "use_ref_model": use_ref_model}
        super().__init__(**scales, **flags, **options)
        self.loss_type = check_choice(self, "loss_type", loss_type, CPO_LOSS_TYPES)
        if loss_type == "ipo":
            check(type(self).__name__, "beta", beta, POSITIVE)
        self.label_smoothing = label_smoothing

    def preference_loss(self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
        difference = chosen_logps - rejected_logps
        if self.loss_type == "ipo":
            return (difference - 1 / (2 * self.beta)).square()
        if self.loss_type == "hinge":
            return torch.relu(1 - self.beta * difference)
        return _smoothed_sigmoid(self.beta * difference, self.label_smoothing)


class FusedLinearSimPOLoss(PreferenceLoss):
    """Simple preference optimisation: length-normalised rewards without a reference, and a target margin
    ``gamma``.

    Args:
        beta, alpha, compute_nll_loss, use_ref_model, options: as in :class:`PreferenceLoss`.
        gamma: target margin between the rewards of the chosen and the rejected answer.
        label_smoothing: the probability that a label is wrong.

    Raises:
        TypeError, ValueError: as :class:`PreferenceLoss`.

    Source: Meng et al., arXiv 2405.14734.

    Example::

        >>> loss_function = liger.losses.FusedLinearSimPOLoss(gamma=0.5)
        >>> loss, metrics = loss_function(input, weight, target, bias)
    """

    @arguments(**RULES)
    def __init__(
        self,
        *,
        beta: float = 0.1,
        alpha: float = 1.0,
        gamma: float = 0.5,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        use_ref_model: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        scales: Any = {"beta": beta, "alpha": alpha, "average_log_prob": True}
        flags: Any = {"compute_nll_loss": compute_nll_loss, "use_ref_model": use_ref_model}
        super().__init__(**scales, **flags, **options)
        self.gamma, self.label_smoothing = gamma, label_smoothing

    def preference_loss(self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
        margin = self.beta * (chosen_logps - rejected_logps) - self.gamma
        return _smoothed_sigmoid(margin, self.label_smoothing)
