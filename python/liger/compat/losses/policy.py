# SPDX-License-Identifier: BSD-3-Clause
"""GRPO and its variants, with the arguments of liger_kernel.

``compiled`` and ``chunk_size`` have no effect: the memory budget decides how many tokens a chunk has.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ...losses import FusedLinearGRPOLoss
from ..function_class import function_class

# Loss types that are divided by the number of tokens of all processes.
_GLOBAL_TOKEN_MEAN = ("cispo", "dapo", "vespo")


@functools.lru_cache(maxsize=256)
def _loss(options):
    return FusedLinearGRPOLoss(**dict(options))


def _tokens_per_process(mask, num_items_in_batch):
    """The number of tokens of all processes over the number of processes, at least 1."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = torch.distributed.get_world_size() if distributed else 1
    if num_items_in_batch is None:
        tokens = mask.sum().float()
        if distributed:
            torch.distributed.all_reduce(tokens)
    else:
        tokens = torch.as_tensor(num_items_in_batch, device=mask.device).float()
    return (tokens / processes).clamp_min(1.0)


def liger_fused_linear_grpo(
    _input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
    old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, beta=0.04, epsilon_low=0.2,
    epsilon_high=0.2, loss_type="dapo", max_completion_length=None, importance_sampling_level="token",
    sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, temperature=1.0, compiled=True, use_ref_model=True,
    chunk_size=1, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0,
    vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, num_items_in_batch=None,
):  # fmt: skip
    """(loss, metrics) of :class:`liger.losses.FusedLinearGRPOLoss`; metrics are (KL divergence, clip ratio),
    or (clip ratio,) if beta is 0.

    Args:
        num_items_in_batch: tokens of all processes and micro-batches, for cispo, dapo and vespo; None: the
            tokens of ``attention_mask`` in all processes, by one all-reduce.
        use_ref_model: False has the effect of a reference equal to the policy: the KL divergence is 0,
            whatever is given for the reference.
    """
    if not use_ref_model:
        ref_per_token_logps = None
    if ref_per_token_logps is not None or not use_ref_model:
        ref_input = ref_weight = ref_bias = None
    options = {
        "beta": beta if use_ref_model else 0.0, "epsilon_low": epsilon_low, "epsilon_high": epsilon_high,
        "loss_type": loss_type, "max_completion_length": max_completion_length,
        "importance_sampling_level": importance_sampling_level, "sapo_temperature_pos": sapo_temperature_pos,
        "sapo_temperature_neg": sapo_temperature_neg, "temperature": temperature, "delta": delta,
        "use_bias_correction_kl": use_bias_correction_kl, "vespo_k_pos": vespo_k_pos,
        "vespo_lambda_pos": vespo_lambda_pos, "vespo_k_neg": vespo_k_neg, "vespo_lambda_neg": vespo_lambda_neg,
    }  # fmt: skip
    divisor = None
    if loss_type in _GLOBAL_TOKEN_MEAN:
        mask = attention_mask if attention_mask is not None else torch.ones_like(selected_token_ids)
        divisor = _tokens_per_process(mask, num_items_in_batch)
    loss, metrics = _loss(tuple(options.items()))(
        _input, weight, selected_token_ids, bias, advantages=advantages, mask=attention_mask,
        ref_per_token_logps=ref_per_token_logps, old_per_token_logps=old_per_token_logps, ref_input=ref_input,
        ref_weight=ref_weight, ref_bias=ref_bias, vllm_is_ratio=vllm_is_ratio, denominator=divisor,
    )  # fmt: skip
    kl = () if beta == 0.0 else (loss.new_zeros(()) if metrics.kl is None else metrics.kl,)
    return loss, (*kl, metrics.clip_ratio)


LigerFusedLinearGRPOFunction = function_class("LigerFusedLinearGRPOFunction", liger_fused_linear_grpo)


class LigerFusedLinearGRPOLoss(nn.Module):
    """:class:`liger.losses.FusedLinearGRPOLoss`: (loss, list of metrics)."""

    def __init__(
        self, beta: float = 0.04, compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1,
        epsilon_low: float = 0.2, epsilon_high: float = 0.2, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.beta, self.compiled, self.use_ref_model, self.chunk_size = (
            beta,
            compiled,
            use_ref_model,
            chunk_size,
        )
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.loss_type, self.max_completion_length = loss_type, max_completion_length
        self.importance_sampling_level, self.temperature = importance_sampling_level, temperature
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.use_bias_correction_kl = use_bias_correction_kl
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg

    def forward(
        self, _input: torch.Tensor, lin_weight: torch.Tensor, selected_token_ids: torch.Tensor,
        attention_mask: torch.Tensor | None, advantages: torch.Tensor, bias: torch.Tensor | None = None,
        ref_per_token_logps: torch.Tensor | None = None, old_per_token_logps: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None, ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None, vllm_is_ratio: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:  # fmt: skip
        return liger_fused_linear_grpo(
            _input, lin_weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
            old_per_token_logps, ref_input, ref_weight, ref_bias, self.beta, self.epsilon_low, self.epsilon_high,
            self.loss_type, self.max_completion_length, self.importance_sampling_level, self.sapo_temperature_pos,
            self.sapo_temperature_neg, self.temperature, self.compiled, self.use_ref_model, self.chunk_size,
            vllm_is_ratio, self.delta, self.use_bias_correction_kl, self.vespo_k_pos, self.vespo_lambda_pos,
            self.vespo_k_neg, self.vespo_lambda_neg, num_items_in_batch,
        )  # fmt: skip
