"""Losses of policy optimisation on sampled answers: GRPO with its relatives, and PPO.

docs/losses.md defines every term. Of a loss whose importance weights are per token, a token's gradient depends on that
token alone: logits are kept a chunk of tokens at a time, whatever the lengths. Importance weights of whole sequences
keep the logits of one sequence.
"""

from typing import NamedTuple

import torch

from .._core.arguments import (
    COUNT,
    FINITE,
    FLAG,
    INTEGER,
    ITEMS,
    NOT_NEGATIVE,
    POSITIVE,
    TEXT,
    LayerNames,
    arguments,
)
from ._batch import as_scalar, either, sigmoid
from .base import FusedLinearLoss, choice

GRPO_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")


class PolicyMetrics(NamedTuple):
    """Means over the tokens that count, and the log-probabilities (S, L), without gradients.

    ``clip_ratio``: the share of tokens whose importance weight is clipped; 0 with sapo, which clips none.
    """

    kl: torch.Tensor | None
    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    clip_ratio: torch.Tensor


class FusedLinearGRPOLoss(FusedLinearLoss):
    """Group relative policy optimisation and its relatives.

    Args:
        beta: factor of the divergence from the reference model; 0 wants none.
        use_ref_model: whether there is a reference at all.
        epsilon_low, epsilon_high: the clip range of importance weights; for cispo ``epsilon_high`` is their largest.
        loss_type: ``"grpo"`` (arXiv 2402.03300: mean over the tokens of a sequence, then over sequences), ``"bnpo"``
            (mean over all tokens), ``"dr_grpo"`` (2503.20783: over ``max_completion_length``), ``"dapo"`` (2503.14476:
            over ``num_items_in_batch``), ``"cispo"`` (2506.13585) and ``"sapo"`` (2511.20347).
        max_completion_length: for dr_grpo; None means the length of the batch.
        importance_sampling_level: ``"token"``, or ``"sequence"`` for GSPO (2507.18071).
        sapo_temperature_pos, sapo_temperature_neg: of sapo, for positive and other advantages.
        temperature: that of sampling, which logits are divided by.
        delta: the upper bound of unclipped importance weights (two-sided clipping); None for none.
        use_bias_correction_kl: the divergence times the importance weight.
        entropy_coef: factor of the mean entropy, which is subtracted.
        options: those of :class:`liger.losses.FusedLinearLoss`.

    Raises:
        ValueError: an unknown loss type or level.
    """

    names = LayerNames("_input", "lin_weight", "selected_token_ids")

    @arguments(
        error=ValueError, beta=NOT_NEGATIVE, use_ref_model=FLAG, epsilon_low=NOT_NEGATIVE, epsilon_high=NOT_NEGATIVE,
        loss_type=TEXT, max_completion_length=COUNT, importance_sampling_level=TEXT, sapo_temperature_pos=POSITIVE,
        sapo_temperature_neg=POSITIVE, temperature=POSITIVE, delta=POSITIVE, use_bias_correction_kl=FLAG,
        entropy_coef=FINITE,
    )  # fmt: skip
    def __init__(
        self, *, beta=0.04, use_ref_model=True, epsilon_low=0.2, epsilon_high=0.2, loss_type="dapo",
        max_completion_length=None, importance_sampling_level="token", sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05, temperature=1.0, delta=None, use_bias_correction_kl=False, entropy_coef=0.0,
        **options,
    ):  # fmt: skip
        level = choice(self, "importance_sampling_level", importance_sampling_level, ("token", "sequence"))
        self.unit, self.uses_entropy = level, entropy_coef != 0.0
        super().__init__(temperature=temperature, **options)
        self.loss_type = choice(self, "loss_type", loss_type, GRPO_LOSS_TYPES)
        self.beta = beta if use_ref_model else 0.0
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.max_completion_length, self.use_bias_correction_kl = (
            max_completion_length,
            use_bias_correction_kl,
        )
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.entropy_coef = entropy_coef

    def _ratio(self, logprobs, old, mask):
        """Importance weights, per token or (sequences, 1)."""
        difference = logprobs - old
        if self.unit == "sequence":
            difference = (difference * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)
        return difference.exp()

    def _kl(self, logprobs, ref):
        """The estimate of the divergence by Schulman, never negative."""
        return (ref - logprobs).expm1() - (ref - logprobs)

    def compute(
        self, logprobs, entropy, *, weight, mask, advantages, old=None, ref=None, sampler_ratio=None, tokens=None
    ):  # fmt: skip
        ratio = self._ratio(logprobs, logprobs.detach() if old is None else old, mask)
        if self.loss_type == "cispo":
            losses = -ratio.clamp(max=self.epsilon_high).detach() * advantages * logprobs
        elif self.loss_type == "sapo":
            tau = either(advantages > 0, self.sapo_temperature_pos, self.sapo_temperature_neg, ratio)
            losses = -advantages * sigmoid(tau * (ratio - 1)) * 4 / tau
        else:
            clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
            free = ratio if self.delta is None else ratio.clamp(max=self.delta)
            losses = -torch.minimum(free * advantages, clipped * advantages)
        if sampler_ratio is not None:
            losses = losses * sampler_ratio
        if ref is not None:
            kl = self._kl(logprobs, ref)
            losses = losses + self.beta * (kl * ratio if self.use_bias_correction_kl else kl)
        # What the mask leaves out may not reach the sum, not even as 0 * inf.
        losses = torch.where(mask, losses, 0.0) * weight
        if entropy is None:
            return losses
        return losses - self.entropy_coef * torch.where(mask, entropy, 0.0) / tokens

    def _weights(self, batch, num_items_in_batch):
        """(S,) what the loss of a token counts."""
        lengths = batch.lengths()
        sequences, length = batch.shape
        count = max(sequences, 1)
        if self.loss_type in ("grpo", "sapo"):
            if num_items_in_batch is not None:
                count = as_scalar("num_items_in_batch", num_items_in_batch, batch)
            return (lengths.clamp_min(1) * count).to(batch.wide).reciprocal()
        if self.loss_type == "dr_grpo":
            divisor = count * (self.max_completion_length or length)
        else:
            divisor = lengths.sum().clamp_min(1)
        if num_items_in_batch is not None and self.loss_type != "dr_grpo":
            divisor = as_scalar("num_items_in_batch", num_items_in_batch, batch).clamp_min(1)
        return batch.live.new_ones(sequences, dtype=batch.wide) / divisor

    def _per_token(self, batch, name, tensor):
        """Numbers per token as ``compute`` sees them; None stays None."""
        if tensor is None:
            return None
        batch.check(name, tensor, batch.token_shape)
        return batch.rows(tensor, self.ignore_index) if self.unit == "token" else batch.sequences(tensor)

    @arguments(optional=("attention_mask",), num_items_in_batch=ITEMS, max_length=INTEGER)
    def forward(
        self, _input, lin_weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
        old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, vllm_is_ratio=None,
        num_items_in_batch=None, *, cu_seqlens=None, max_length=None,
    ):  # fmt: skip
        """The loss of sampled answers, and its metrics.

        Args:
            _input: (S, L, H) hidden states; or packed, (T, H) or (1, T, H).
            lin_weight: (V, H), of the projection.
            selected_token_ids: (S, L), (T,) or (1, T): the tokens that were sampled.
            attention_mask: shaped as they are, 0 for tokens that do not count; None for none but ``ignore_index``.
            advantages: (S,), or one per token.
            bias: (V,).
            ref_per_token_logps: log-probabilities of the reference model, per token.
            old_per_token_logps: those when the answers were sampled; None where the policy is still the same.
            ref_input, ref_weight, ref_bias: the reference model, in place of its log-probabilities: one more product.
            vllm_is_ratio: (S,), (S, 1) or per token: factors that correct for the sampler's own probabilities.
            num_items_in_batch: takes the place of what the sum is divided by: the number of tokens (of sequences for
                grpo and sapo; nothing for dr_grpo). Where gradients are averaged over processes, that of all of them
                over the number of processes.
            cu_seqlens, max_length: of a packed batch, (S + 1,) where sequences begin, and the longest length.

        Returns:
            (the loss, :class:`PolicyMetrics`).

        Raises:
            ValueError: no reference, with beta other than 0.
            RuntimeError: shapes that do not fit, another vocabulary of the reference.
        """
        batch = self.batch(
            _input, selected_token_ids, mask=attention_mask, cu_seqlens=cu_seqlens, max_length=max_length,
            mask_name="attention_mask",
        )  # fmt: skip
        batch.check("advantages", advantages, batch.shape[:1], batch.token_shape)
        if ref_per_token_logps is not None:
            batch.check("ref_per_token_logps", ref_per_token_logps, batch.token_shape)
        self.check_reference(batch, lin_weight, ref_input, ref_weight, ref_bias)
        if self.beta == 0.0:
            ref_per_token_logps = None
        elif ref_per_token_logps is None:
            if ref_input is None:
                raise ValueError(
                    f"{batch.op}: no reference: pass ref_per_token_logps, or ref_input and ref_weight, or beta=0"
                )
            ref_per_token_logps = self.reference(batch, lin_weight, ref_input, ref_weight, ref_bias)
        if vllm_is_ratio is not None:
            batch.check(
                "vllm_is_ratio", vllm_is_ratio, batch.token_shape, batch.shape[:1], (batch.shape[0], 1)
            )
        by_token = self.unit == "token"

        def of_sequences(tensor):
            return batch.spread(tensor) if by_token else tensor.unsqueeze(-1).expand(batch.shape)

        def spread(tensor):
            if tensor is None or tensor.shape == batch.token_shape:
                return self._per_token(batch, "", tensor)
            return of_sequences(batch.floats(tensor).reshape(-1))

        given = {
            "weight": of_sequences(self._weights(batch, num_items_in_batch)),
            "mask": batch.target != self.ignore_index if by_token else batch.live,
            "advantages": spread(advantages),
            "old": self._per_token(batch, "old_per_token_logps", old_per_token_logps),
            "ref": self._per_token(batch, "ref_per_token_logps", ref_per_token_logps),
            "sampler_ratio": spread(vllm_is_ratio),
        }
        shared = {}
        if self.uses_entropy:
            shared["tokens"] = batch.lengths().sum().clamp_min(1)
        loss, logprobs, entropy = self.run(batch, lin_weight, bias, given=given, shared=shared)
        return loss, self._metrics(
            batch, logprobs, entropy, advantages, old_per_token_logps, ref_per_token_logps
        )

    def _metrics(self, batch, logprobs, entropy, advantages, old, ref):
        count = batch.lengths().sum().clamp_min(1)

        def mean(x):
            return torch.where(batch.live, x, 0.0).sum() / count

        per_token = advantages.shape == batch.token_shape
        advantages = batch.sequences(advantages) if per_token else advantages.unsqueeze(-1)
        ratio = self._ratio(logprobs, logprobs if old is None else batch.sequences(old), batch.live)
        if self.loss_type == "sapo":
            clipped = torch.zeros_like(ratio)
        elif self.loss_type == "cispo":
            clipped = (ratio > self.epsilon_high) & (advantages > 0)
        else:
            clipped = ((ratio < 1 - self.epsilon_low) & (advantages < 0)) | (
                (ratio > 1 + self.epsilon_high) & (advantages > 0)
            )
        return PolicyMetrics(
            None if ref is None else mean(self._kl(logprobs, batch.sequences(ref))),
            logprobs,
            None if entropy is None else mean(entropy),
            mean(clipped.to(logprobs.dtype)),
        )


class FusedLinearPPOLoss(FusedLinearGRPOLoss):
    """The clipped policy loss of PPO, a mean over tokens: advantages per token, no reference unless ``beta`` is set.

    Args:
        epsilon: the clip range of importance weights, on either side.
        beta: factor of the divergence from a reference model.
        options: those of :class:`FusedLinearGRPOLoss`, ``entropy_coef`` among them.

    Source: Schulman et al., arXiv 1707.06347, equation 7.
    """

    @arguments(error=ValueError, epsilon=NOT_NEGATIVE, beta=NOT_NEGATIVE, loss_type=TEXT)
    def __init__(self, *, epsilon=0.2, beta=0.0, loss_type="bnpo", **options):
        super().__init__(beta=beta, epsilon_low=epsilon, epsilon_high=epsilon, loss_type=loss_type, **options)
