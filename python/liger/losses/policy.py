# SPDX-License-Identifier: BSD-3-Clause
"""Losses of policy optimisation on sampled answers: GRPO with its variants, and PPO.

docs/guides/losses.md defines every term. With importance weights per token, the gradient of a token depends
on that token alone, and a chunk is any number of tokens. With importance weights per sequence, a chunk is one
sequence or more.
"""

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._core.op.arguments import COUNT, FINITE, FLAG, INTEGER, ITEMS, NOT_NEGATIVE, POSITIVE, TEXT, arguments
from .._core.op.named_results import serialisable
from ._batch import as_scalar, sigmoid, where_scalar
from .base import FusedLinearLoss, check_choice
from .results import LossOptions

GRPOLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
GRPO_LOSS_TYPES: tuple[GRPOLossType, ...] = get_args(GRPOLossType)
# The loss types that clip importance weights from both sides.
_CLIPPED: tuple[str, ...] = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# The options that only some loss types read.
_USED_BY: dict[str, tuple[str, ...]] = {
    "epsilon_low": _CLIPPED,
    "epsilon_high": (*_CLIPPED, "cispo"),
    "delta": _CLIPPED,
    "max_completion_length": ("dr_grpo",),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), ("sapo",)),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), ("vespo",)),
}
ImportanceSamplingLevel = Literal["token", "sequence"]
_SMALLEST_LOG = math.log(1e-8)  # the smallest logarithm of an importance weight in vespo


@serialisable
class PolicyMetrics(NamedTuple):
    """Metrics of policy optimisation, without gradients; means are over valid tokens.

    Attributes:
        kl: scalar, the mean KL divergence from the reference in nats, with ``use_bias_correction_kl`` times
            the importance weights, as in the loss; None without a reference.
        mean_entropy: scalar, in nats; None if ``entropy_coef`` is 0.
        clip_ratio: scalar, the fraction of tokens with an importance weight clipped by ``epsilon_low`` and
            ``epsilon_high``, not by ``delta``; 0 with sapo and vespo, which do not clip.
        logprobs, entropy, argmax: the :class:`TokenMetrics`, per token in the shape of target. ``logprobs``
            is always there, the others are None unless the option ``metrics`` asks for them.

    Example::

        >>> loss_function = liger.losses.FusedLinearGRPOLoss(beta=0.0)
        >>> loss, metrics = loss_function(input, weight, target, advantages=advantages)
        >>> isinstance(metrics, liger.losses.PolicyMetrics)
        True
    """

    kl: Tensor | None
    mean_entropy: Tensor | None
    clip_ratio: Tensor
    logprobs: Tensor
    entropy: Tensor | None = None
    argmax: Tensor | None = None


class PolicyOptions(LossOptions, total=False):
    """Types of the options that all policy losses share. :class:`FusedLinearGRPOLoss` has their defaults."""

    use_ref_model: bool
    max_completion_length: int | None
    importance_sampling_level: ImportanceSamplingLevel
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    delta: float | None
    use_bias_correction_kl: bool
    entropy_coef: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float


_RULES: dict[str, Any] = {
    **dict.fromkeys(("beta", "epsilon", "epsilon_low", "epsilon_high"), NOT_NEGATIVE),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), NOT_NEGATIVE),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg", "delta"), POSITIVE),
    **dict.fromkeys(("use_ref_model", "use_bias_correction_kl"), FLAG),
    **dict.fromkeys(("loss_type", "importance_sampling_level"), TEXT),
    **{"max_completion_length": COUNT, "entropy_coef": FINITE},
}


class FusedLinearGRPOLoss(FusedLinearLoss):
    """Group relative policy optimisation and its variants.

    Args:
        beta: factor of the KL divergence from the reference model; 0: no divergence and no reference.
        use_ref_model: False has the effect of ``beta=0``.
        epsilon_low, epsilon_high: importance weights are clipped to ``[1 - epsilon_low, 1 + epsilon_high]``;
            for cispo ``epsilon_high`` is their upper bound.
        loss_type: ``"grpo"`` (arXiv 2402.03300: mean over the tokens of a sequence, then over sequences),
            ``"bnpo"`` (mean over all tokens), ``"dr_grpo"`` (2503.20783: over ``max_completion_length``),
            ``"dapo"`` (2503.14476: over ``denominator``), ``"cispo"`` (2506.13585), ``"sapo"`` (2511.20347),
            ``"luspo"`` (2602.05261: sum over the tokens of a sequence, mean over sequences) and ``"vespo"``
            (2602.10693: a gamma weight of the sequence; not with ``importance_sampling_level="sequence"``).
        max_completion_length: in tokens, for dr_grpo; None means the padded length of the batch, or, packed,
            ``max_length`` or the longest sequence.
        importance_sampling_level: ``"token"``, or ``"sequence"`` for GSPO (2507.18071).
        sapo_temperature_pos, sapo_temperature_neg: of sapo, for positive and for all other advantages.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: of vespo, exponent and rate of the gamma
            weight, for advantages of at least 0 and for negative ones.
        delta: upper bound of the unclipped importance weights (two-sided clipping); None: no bound.
        use_bias_correction_kl: multiplies the divergence by the importance weight.
        entropy_coef: factor of the mean entropy, which is subtracted from the loss. The mean is over the
            valid tokens of a call for every loss type, whatever ``denominator`` is: with micro-batches,
            divide the factor by their number.
        options: see :class:`FusedLinearLoss`; ``temperature`` is the sampling temperature.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an unknown loss type or level, or an option out of range.

    Source: Shao et al., "DeepSeekMath", arXiv 2402.03300, equation 3; the variants as named above.

    Example::

        >>> loss_function = liger.losses.FusedLinearGRPOLoss(beta=0.0, temperature=0.9)
        >>> loss, metrics = loss_function(input, weight, target, advantages=advantages, mask=mask)
    """

    @arguments(used_by=_USED_BY, **_RULES)
    def __init__(
        self,
        *,
        beta: float = 0.04,
        use_ref_model: bool = True,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: GRPOLossType = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: ImportanceSamplingLevel = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        entropy_coef: float = 0.0,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        **options: Unpack[LossOptions],
    ) -> None:
        levels = get_args(ImportanceSamplingLevel)
        self.level = check_choice(self, "importance_sampling_level", importance_sampling_level, levels)
        self.loss_type = check_choice(self, "loss_type", loss_type, GRPO_LOSS_TYPES)
        if loss_type == "vespo" and self.level != "token":
            raise ValueError(
                f"{type(self).__name__}: importance_sampling_level is '{self.level}', expected 'token' with "
                "loss_type='vespo', whose weight covers the whole sequence already"
            )
        # The weights of vespo depend on all tokens of a sequence.
        self.unit = "sequence" if loss_type == "vespo" else self.level
        self.uses_entropy = entropy_coef != 0.0
        super().__init__(**options)
        # The metrics have the log-probabilities in any case.
        self.metrics = tuple(dict.fromkeys(("logprobs", *self.metrics)))
        self.beta = beta if use_ref_model else 0.0
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.max_completion_length, self.use_bias_correction_kl = (
            max_completion_length,
            use_bias_correction_kl,
        )
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.entropy_coef = entropy_coef
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg

    def _ratio(self, logprobs, old, mask):
        """Importance weights: in the shape of logprobs, or (sequences, 1)."""
        difference = logprobs - old
        if self.level == "sequence":
            difference = (difference * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)
        return difference.exp()

    def _gamma_weights(self, logprobs, old, mask, advantages, sampler_ratio):
        """The factors of vespo, ``w^k exp(lambda (1 - w))`` with w the importance weight of the sequence, in
        the shape of advantages; 1 where w is 1. The logarithms are clamped as TRL clamps them."""
        log_w = torch.where(mask, (logprobs - old).clamp(-20.0, 20.0), 0.0).sum(-1, keepdim=True)
        if sampler_ratio is not None:
            # (S, 1) is the weight of the sequence, (S, L) has one of each token.
            log_sampler = sampler_ratio.log().clamp(_SMALLEST_LOG, 20.0)
            if log_sampler.shape == mask.shape:
                log_sampler = torch.where(mask, log_sampler, 0.0).sum(-1, keepdim=True)
            log_w = log_w + log_sampler
        log_w = log_w.clamp(_SMALLEST_LOG, 20.0)
        k = where_scalar(advantages >= 0, self.vespo_k_pos, self.vespo_k_neg, log_w)
        rate = where_scalar(
            advantages >= 0, max(self.vespo_lambda_pos, 1e-4), max(self.vespo_lambda_neg, 1e-4), log_w
        )
        return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def _kl(self, logprobs, ref):
        """The k3 estimator of the KL divergence (Schulman, "Approximating KL divergence", 2020), never
        negative."""
        return (ref - logprobs).expm1() - (ref - logprobs)

    def compute(
        self,
        logprobs,
        entropy,
        *,
        weight,
        mask,
        advantages,
        old=None,
        ref=None,
        sampler_ratio=None,
        tokens=None,
    ) -> Tensor:
        ratio = self._ratio(logprobs, logprobs.detach() if old is None else old, mask)
        if self.loss_type == "cispo":
            losses = -ratio.clamp(max=self.epsilon_high).detach() * advantages * logprobs
        elif self.loss_type == "sapo":
            tau = where_scalar(advantages > 0, self.sapo_temperature_pos, self.sapo_temperature_neg, ratio)
            losses = -advantages * sigmoid(tau * (ratio - 1)) * 4 / tau
        elif self.loss_type == "vespo":
            detached = logprobs.detach()
            phi = self._gamma_weights(
                detached, detached if old is None else old, mask, advantages, sampler_ratio
            )
            losses, sampler_ratio = -phi * advantages * logprobs, None
        else:
            clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
            unclipped = ratio if self.delta is None else ratio.clamp(max=self.delta)
            losses = -torch.minimum(unclipped * advantages, clipped * advantages)
        if sampler_ratio is not None:
            losses = losses * sampler_ratio
        if ref is not None:
            kl = self._kl(logprobs, ref)
            losses = losses + self.beta * (kl * ratio if self.use_bias_correction_kl else kl)
        # Ignored tokens may have infinite losses, which a factor of 0 would turn into NaN.
        losses = torch.where(mask, losses, 0.0) * weight
        if entropy is None or tokens is None:
            return losses
        return losses - self.entropy_coef * torch.where(mask, entropy, 0.0) / tokens

    def _weights(self, batch, denominator):
        """(S,) weight of the loss of each token of a sequence."""
        lengths = batch.lengths()
        sequences = batch.shape[0]
        count = max(sequences, 1)
        items = None
        if denominator is not None:
            items = as_scalar("denominator", denominator, batch)
            # No items: the sum is also 0.
            items = torch.where(items > 0, items, 1.0)
        if self.loss_type in ("grpo", "sapo", "luspo"):
            count = count if items is None else items
            if self.loss_type == "luspo":
                return torch.ones_like(lengths, dtype=batch.accumulate_dtype) / count
            return (lengths.clamp_min(1) * count).to(batch.accumulate_dtype).reciprocal()
        if self.loss_type == "dr_grpo":
            divisor = count * (self.max_completion_length or batch.longest)
        else:
            divisor = lengths.sum().clamp_min(1) if items is None else items
        return batch.valid.new_ones(sequences, dtype=batch.accumulate_dtype) / divisor

    def _per_token(self, batch, name, tensor):
        """A tensor with one value per token in the shape of ``compute``'s arguments; None for None."""
        if tensor is None:
            return None
        batch.check(name, tensor, batch.token_shape)
        if self.unit == "token":
            return batch.valid_rows(tensor, self.ignore_index)
        return batch.padded_valid(tensor)

    def _per_sequence(self, batch, tensor):
        """A tensor (S,), expanded to all tokens in the shape of ``compute``'s arguments."""
        return batch.spread(tensor) if self.unit == "token" else tensor.unsqueeze(-1).expand(batch.shape)

    def _per_token_or_sequence(self, batch, name, tensor):
        if tensor is None or tensor.shape == batch.token_shape:
            return self._per_token(batch, name, tensor)
        tensor = batch.upcast(tensor).reshape(-1)
        if self.loss_type == "vespo" and name == "vllm_is_ratio":
            return tensor.unsqueeze(-1)
        return self._per_sequence(batch, tensor)

    @arguments(denominator=ITEMS, max_length=INTEGER)
    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        advantages: Tensor,
        mask: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_length: int | None = None,
        denominator: float | Tensor | None = None,
    ) -> tuple[Tensor, PolicyMetrics]:
        """The loss of sampled answers, and its metrics.

        Args:
            input: (S, L, H) hidden states, or packed, (T, H) or (1, T, H); float16, bfloat16, float32 or
                float64, the same dtype for weight and bias.
            weight: (V, H).
            target: (S, L), (T,) or (1, T), int64 or int32: the sampled tokens.
            bias: (V,) or None.
            advantages: (S,), or the shape of target.
            mask: the shape of target, 0 at tokens to ignore; None: only tokens equal to ``ignore_index`` are
                ignored.
            ref_per_token_logps: log-probabilities of the reference model, in the shape of target.
            old_per_token_logps: log-probabilities of the policy that sampled the answers, in the same shape;
                None means that the policy has not changed since.
            ref_input, ref_weight, ref_bias: the reference model, instead of its log-probabilities. It costs
                one GEMM and gets no gradient.
            vllm_is_ratio: (S,), (S, 1) or the shape of target: factors of the loss that correct for different
                probabilities of the sampler.
            cu_seqlens, max_length: of a packed batch: cumulative lengths (S + 1,), int32 or int64, and the
                longest length.
            denominator: the divisor of the sum, a number or a tensor with one element; None means the number
                of valid tokens (of sequences for grpo, sapo and luspo). Without effect for dr_grpo. If
                gradients are averaged over processes, pass the global number over the number of processes.

        Returns:
            (loss, :class:`PolicyMetrics`); the loss is a scalar in float32, or float64 for float64 inputs.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: no reference although beta is not 0.
            RuntimeError: mismatched shapes, dtypes, devices or vocabularies; a tensor that requires grad,
                except for the first four, ref_weight and ref_bias.
        """
        batch = self.batch(input, target, mask=mask, cu_seqlens=cu_seqlens, max_length=max_length)
        batch.check("advantages", advantages, batch.shape[:1], batch.token_shape)
        if ref_per_token_logps is not None:
            batch.check("ref_per_token_logps", ref_per_token_logps, batch.token_shape)
        self.check_reference(batch, weight, ref_input, ref_weight, ref_bias)
        if self.beta == 0.0:
            ref_per_token_logps = None
        elif ref_per_token_logps is None:
            if ref_input is None:
                raise ValueError(
                    f"{batch.op}: no reference: pass ref_per_token_logps, or ref_input and ref_weight, or beta=0"
                )
            ref_per_token_logps = self.reference(batch, weight, ref_input, ref_weight, ref_bias)
        if vllm_is_ratio is not None:
            batch.check(
                "vllm_is_ratio", vllm_is_ratio, batch.token_shape, batch.shape[:1], (batch.shape[0], 1)
            )
        weights = self._weights(batch, denominator)
        given = {
            "weight": self._per_sequence(batch, weights),
            "mask": batch.target != self.ignore_index if self.unit == "token" else batch.valid,
            "advantages": self._per_token_or_sequence(batch, "advantages", advantages),
            "old": self._per_token(batch, "old_per_token_logps", old_per_token_logps),
            "ref": self._per_token(batch, "ref_per_token_logps", ref_per_token_logps),
            "sampler_ratio": self._per_token_or_sequence(batch, "vllm_is_ratio", vllm_is_ratio),
        }
        shared = {"tokens": batch.lengths().sum().clamp_min(1) if self.uses_entropy else None}
        divisor = (lambda: weights.amax().reciprocal()) if batch.shape[0] else None
        result = self.run(batch, weight, bias, given=given, shared=shared, divisor=divisor)
        return result.loss, self._metrics(batch, result, advantages, old_per_token_logps, ref_per_token_logps)

    def _metrics(self, batch, result, advantages, old, ref):
        _, logprobs, entropy, tokens = result
        count = batch.lengths().sum().clamp_min(1)

        def mean(x):
            return torch.where(batch.valid, x, 0.0).sum() / count

        per_token = advantages.shape == batch.token_shape
        advantages = batch.padded_valid(advantages) if per_token else advantages.unsqueeze(-1)
        ratio = self._ratio(logprobs, logprobs if old is None else batch.padded_valid(old), batch.valid)
        if self.loss_type in ("sapo", "vespo"):
            clipped = torch.zeros_like(ratio)
        elif self.loss_type == "cispo":
            clipped = (ratio > self.epsilon_high) & (advantages > 0)
        else:
            clipped = ((ratio < 1 - self.epsilon_low) & (advantages < 0)) | (
                (ratio > 1 + self.epsilon_high) & (advantages > 0)
            )
        kl = None
        if ref is not None:
            kl = self._kl(logprobs, batch.padded_valid(ref))
            kl = mean(kl * ratio if self.use_bias_correction_kl else kl)
        mean_entropy = None if entropy is None else mean(entropy)
        return PolicyMetrics(kl, mean_entropy, mean(clipped.to(logprobs.dtype)), *tokens)


class FusedLinearPPOLoss(FusedLinearGRPOLoss):
    """The clipped policy loss of PPO: a mean over tokens, advantages per token, no reference unless ``beta``
    is set.

    Args:
        epsilon: importance weights are clipped to ``[1 - epsilon, 1 + epsilon]``.
        beta: factor of the KL divergence from a reference model.
        loss_type: as in :class:`FusedLinearGRPOLoss`; ``"bnpo"`` is the mean over tokens.
        options: see :class:`FusedLinearGRPOLoss`, ``entropy_coef`` for example.

    Raises:
        TypeError, ValueError: as :class:`FusedLinearGRPOLoss`.

    Source: Schulman et al., arXiv 1707.06347, equation 7.

    Example::

        >>> loss_function = liger.losses.FusedLinearPPOLoss(entropy_coef=0.01)
        >>> loss, metrics = loss_function(
        ...     input, weight, target, advantages=advantages, old_per_token_logps=logps
        ... )
    """

    @arguments(used_by={"epsilon": _USED_BY["epsilon_high"]}, **_RULES)
    def __init__(
        self,
        *,
        epsilon: float = 0.2,
        beta: float = 0.0,
        loss_type: GRPOLossType = "bnpo",
        **options: Unpack[PolicyOptions],
    ) -> None:
        super().__init__(beta=beta, epsilon_low=epsilon, epsilon_high=epsilon, loss_type=loss_type, **options)
