# SPDX-License-Identifier: BSD-3-Clause
"""DPOTrainer and KTOTrainer: the reference runs first, so the policy's head can compute the loss."""

import torch
from trl import DPOTrainer, KTOTrainer

from .._core.modules.overriding import overriding
from ..losses import FusedLinearDPOLoss, FusedLinearKTOLoss, FusedLinearLoss
from ..losses._batch import as_scalar
from ..losses.preference import DPO_LOSS_TYPES
from ..losses.unpaired import KTO_LOSS_TYPES
from ._adapter import LossProxy, LossWithTokenMetrics, add_heads, replace
from ._answers import AnswerWidth, crop_to_answers

_METRICS = ("entropy", "mean_logits", "is_top1")


def _reference(trainer):
    # Without a reference model it is the policy with its adapters disabled, by the trainer.
    return trainer.model if trainer.ref_model is None else trainer.ref_model


# --- DPO ----------------------------------------------------------------------------------------------------


def adapt_dpo(trainer):
    head = add_heads(trainer, (*_METRICS, "log_sum_sq_probs") if trainer.use_weighting else _METRICS)
    reason = _why_not_dpo(trainer)
    if reason is not None:
        return reason
    loss_of = LossWithTokenMetrics(_WeightedLosses, trainer=trainer, **head.transform._asdict())

    def compute_loss(original, model, inputs, return_outputs):
        ref_logps, answer_width = {}, AnswerWidth.of_tokens(inputs["completion_mask"])
        if not trainer.precompute_ref_logps:
            pair = trainer.compute_ref_log_probs(_reference(trainer), inputs)
            ref_logps = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), pair, strict=True))
        inputs = {**inputs, **ref_logps}
        references = torch.cat((inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]))
        # Tokens, not targets: the first token of a sequence is no target.
        lengths = inputs["completion_mask"].sum(1)

        def function(hidden, weight, bias, target):
            device = hidden.device
            reference = {"ref_logps": references.to(device), "lengths": lengths.to(device)}
            return loss_of(hidden, weight, target, bias, **reference)

        policy = LossProxy(model, crop_to_answers(function, answer_width))
        with overriding(trainer, precompute_ref_logps=True):
            result = original(policy, inputs, return_outputs)
        return policy.attach_gradient_to(result, return_outputs)

    replace(trainer, "_compute_loss", compute_loss)
    return None


# TRL's loss type for the negative log-likelihood of the chosen answers.
_LIKELIHOOD = "sft"


class _WeightedLosses(FusedLinearLoss):
    """The weighted sum of the loss types of a DPOTrainer, from one pass over the logits."""

    unit = "pair"

    def __init__(self, *, trainer, **options):
        super().__init__(**options)
        weights = list(zip(trainer.loss_types, trainer.loss_weights, strict=True))
        self.alpha = sum(weight for kind, weight in weights if kind == _LIKELIHOOD)
        self.terms = tuple(
            (self._loss(trainer, kind), weight) for kind, weight in weights if kind != _LIKELIHOOD
        )

    @staticmethod
    def _loss(trainer, kind):
        # TRL applies label smoothing to these loss types only.
        smoothing = trainer.label_smoothing if kind in ("exo_pair", "robust") else 0.0
        options = {"beta": trainer.beta, "discopop_tau": trainer.args.discopop_tau}
        return FusedLinearDPOLoss(loss_type=kind, label_smoothing=smoothing, **options)

    def compute(self, logprobs, entropy, *, ref_logps, lengths, pairs, tokens):
        ratios = logprobs.sum(-1) - ref_logps
        nothing = torch.zeros_like(ratios)
        total = -self.alpha * logprobs[0].sum(-1) / tokens
        for loss, weight in self.terms:
            of_term = ratios / lengths if loss.average_log_prob else ratios
            total = total + weight * loss.preference_loss(*of_term, *nothing) / pairs
        return total

    def forward(self, input, weight, target, bias, *, ref_logps, lengths):
        """(loss, TokenMetrics) of pairs; ``ref_logps``, ``lengths`` (S,): reference sums, answer tokens."""
        batch = self.batch(input, target)
        half = batch.shape[0] // 2
        pairs = as_scalar("pairs", max(half, 1), batch)
        given = {"ref_logps": batch.upcast(ref_logps), "lengths": lengths.clamp_min(1)}
        shared = {"pairs": pairs, "tokens": batch.valid[:half].sum().clamp_min(1)}
        result = self.run(batch, weight, bias, given=given, shared=shared, divisor=lambda: pairs)
        return result.loss, result.tokens


def _why_not_dpo(trainer):
    """The reason why TRL's own formula computes the loss from log-probabilities by liger, or None."""
    if type(trainer)._compute_loss is not DPOTrainer._compute_loss:
        return f"{type(trainer).__name__} has a loss of its own"
    weights = dict(zip(trainer.loss_types, trainer.loss_weights, strict=True))
    likelihood = weights.pop(_LIKELIHOOD, 0.0)
    if not set(weights) <= set(DPO_LOSS_TYPES) or likelihood < 0:
        return f"loss_type={trainer.loss_types}, loss_weights={trainer.loss_weights}"
    if trainer.ld_alpha is not None:
        return f"ld_alpha={trainer.ld_alpha}"
    if trainer.f_divergence_type != "reverse_kl":
        return f"f_divergence_type='{trainer.f_divergence_type}'"
    return "use_weighting=True" if trainer.use_weighting else None


# --- KTO ----------------------------------------------------------------------------------------------------


def adapt_kto(trainer):
    head = add_heads(trainer, _METRICS)
    reason = _why_not_kto(trainer)
    if reason is not None:
        return reason
    names = "loss_type", "beta", "desirable_weight", "undesirable_weight"
    options = {name: getattr(trainer, name) for name in names}
    loss_of = LossWithTokenMetrics(FusedLinearKTOLoss, **options, **head.transform._asdict())

    def compute_loss(original, model, inputs, return_outputs):
        device = trainer.accelerator.device
        inputs = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
        answer_width = AnswerWidth.of_tokens(inputs["completion_mask"])
        mismatched = trainer._compute_kl_logps(model, inputs)
        if not trainer.precompute_ref_logps:
            pair = trainer.compute_ref_log_probs(_reference(trainer), inputs)
            inputs |= dict(zip(("ref_logps", "ref_KL_logps"), pair, strict=True))
        kl = None
        if trainer.calculate_KL:
            # The only term that depends on other processes; the trainer computes it in the same way.
            kl = (mismatched - inputs["ref_KL_logps"]).mean()
            kl = trainer.accelerator.gather_for_metrics(kl).mean().clamp(min=0)

        def function(hidden, weight, bias, target):
            labels, ref_logps = (inputs[name].to(hidden.device) for name in ("label", "ref_logps"))
            rows = {"preference_labels": labels, "ref_logps": ref_logps, "kl": kl}
            return loss_of(hidden, weight, target, bias, **rows)

        policy = LossProxy(model, crop_to_answers(function, answer_width))
        with overriding(trainer, precompute_ref_logps=True, _compute_kl_logps=lambda *_: mismatched):
            result = original(policy, inputs, return_outputs)
        return policy.attach_gradient_to(result, return_outputs)

    replace(trainer, "_compute_loss", compute_loss)
    return None


def _why_not_kto(trainer):
    if type(trainer)._compute_loss is not KTOTrainer._compute_loss:
        return f"{type(trainer).__name__} has a loss of its own"
    if trainer.loss_type not in KTO_LOSS_TYPES:
        return f"loss_type='{trainer.loss_type}'"
    # compute_ref_log_probs of the trainer passes text inputs only.
    return "images" if trainer._is_vision_dataset and not trainer.precompute_ref_logps else None
