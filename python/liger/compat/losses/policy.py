# SPDX-License-Identifier: BSD-3-Clause
"""GRPO and its variants, with the arguments of liger_kernel.

``compiled`` and ``chunk_size`` have no effect: the memory budget decides how many tokens a chunk has.
"""

import torch

from ...losses import FusedLinearGRPOLoss
from ..parameters import OptionsModule, detached, loss_of, takes

# Tensors that keep their names.
_TENSORS = (
    *("advantages", "ref_per_token_logps", "old_per_token_logps", "ref_input", "ref_weight", "ref_bias"),
    "vllm_is_ratio",
)
# Loss types that are divided by the number of tokens of all processes.
_GLOBAL_TOKEN_MEAN = ("cispo", "dapo", "vespo")


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


@takes(
    "_input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None, "
    "old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, beta=0.04, epsilon_low=0.2, "
    "epsilon_high=0.2, loss_type='dapo', max_completion_length=None, importance_sampling_level='token', "
    "sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, temperature=1.0, compiled=True, use_ref_model=True, "
    "chunk_size=1, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0, "
    "vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, num_items_in_batch=None"
)
def liger_fused_linear_grpo(
    _input, weight, selected_token_ids, attention_mask, bias, use_ref_model, num_items_in_batch, beta, **given
):
    """(loss, metrics) of :class:`liger.losses.FusedLinearGRPOLoss`; metrics are (KL divergence, clip ratio),
    or (clip ratio,) if beta is 0.

    Args:
        num_items_in_batch: tokens of all processes and micro-batches, for cispo, dapo and vespo; None: the
            tokens of ``attention_mask`` in all processes, by one all-reduce.
        use_ref_model: False has the effect of a reference equal to the policy: the KL divergence is 0,
            whatever is given for the reference.
    """
    tensors = {name: detached(given.pop(name)) for name in _TENSORS}
    if not use_ref_model:
        tensors["ref_per_token_logps"] = None
    if tensors["ref_per_token_logps"] is not None or not use_ref_model:
        tensors |= {"ref_input": None, "ref_weight": None, "ref_bias": None}
    if given["loss_type"] in _GLOBAL_TOKEN_MEAN:
        mask = attention_mask if attention_mask is not None else torch.ones_like(selected_token_ids)
        tensors["denominator"] = _tokens_per_process(mask, num_items_in_batch)
    loss_function = loss_of(FusedLinearGRPOLoss, beta=beta if use_ref_model else 0.0, **given)
    loss, metrics = loss_function(_input, weight, selected_token_ids, bias, mask=attention_mask, **tensors)
    kl = () if beta == 0.0 else (loss.new_zeros(()) if metrics.kl is None else metrics.kl,)
    return loss, (*kl, metrics.clip_ratio)


class LigerFusedLinearGRPOLoss(
    OptionsModule,
    of=liger_fused_linear_grpo,
    options="beta compiled use_ref_model chunk_size epsilon_low epsilon_high loss_type max_completion_length "
    "importance_sampling_level sapo_temperature_pos sapo_temperature_neg temperature delta use_bias_correction_kl "
    "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
):
    """:class:`liger.losses.FusedLinearGRPOLoss`: (loss, list of metrics)."""

    @takes(
        "self, _input, lin_weight, selected_token_ids, attention_mask, advantages, bias=None, "
        "ref_per_token_logps=None, old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, "
        "vllm_is_ratio=None, num_items_in_batch=None"
    )
    def forward(self, lin_weight, **tensors):
        return self._call(weight=lin_weight, **tensors)
