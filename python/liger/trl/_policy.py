# SPDX-License-Identifier: BSD-3-Clause
"""GRPOTrainer and RLOOTrainer: their own losses read log-probabilities by liger."""

from torch.nn.functional import pad
from trl import GRPOTrainer

from ..losses import FusedLinearGRPOLoss, TokenMetrics
from ..losses.policy import GRPO_LOSS_TYPES
from ._adapter import KeywordProxy, LossProxy, LossWithTokenMetrics, add_heads, items_per_process, replace

# Loss types that are divided by the global number of tokens.
_GLOBAL_TOKEN_MEAN = ("cispo", "dapo", "vespo")
# Options of the loss with the names that TRL gives them.
_OF_TRAINER = (
    *("loss_type", "beta", "epsilon_low", "epsilon_high"),
    *("max_completion_length", "importance_sampling_level"),
)
_OF_ARGUMENTS = (
    *("delta", "sapo_temperature_pos", "sapo_temperature_neg", "use_bias_correction_kl"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)


def _skip_prompts(trainer):
    def log_probabilities(original, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        model = KeywordProxy(model, liger_keep=logits_to_keep)
        return original(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    replace(trainer, "_get_per_token_logps_and_entropies", log_probabilities)


def adapt_rloo(trainer):
    add_heads(trainer, ("entropy",), trainer.temperature)
    _skip_prompts(trainer)
    return "RLOO has no loss in liger.losses"


def adapt_grpo(trainer):
    args = trainer.args
    head = add_heads(trainer, ("entropy",), trainer.temperature, args.cast_lm_head_to_fp32)
    _skip_prompts(trainer)
    reason = _why_not_grpo(trainer)
    if reason is not None:
        return reason
    options = {name: getattr(trainer, name) for name in _OF_TRAINER}
    options |= {name: getattr(args, name) for name in _OF_ARGUMENTS}
    loss_of = LossWithTokenMetrics(FusedLinearGRPOLoss, **options, **head.transform._asdict())

    def compute_loss(original, model, inputs):
        mask = inputs["completion_mask"]
        length = mask.shape[1]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        sampler = None
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
            sampler = inputs["importance_sampling_ratio"]
        training = trainer.model.training
        steps = trainer.current_gradient_accumulation_steps if training else 1
        divisor, factor = None, 1.0 / steps
        if trainer.loss_type in _GLOBAL_TOKEN_MEAN:
            # The number covers all processes and all steps between two generations.
            divisor = items_per_process(inputs["num_items_in_batch"], trainer)
            divisor, factor = divisor * (steps / args.steps_per_generation if training else 1.0), 1.0

        def function(hidden, weight, bias, target):
            # The last hidden state has no target.
            answer = slice(-length - 1, -1)
            value, tokens = loss_of(
                hidden[:, answer],
                weight,
                target[:, answer],
                bias,
                advantages=inputs["advantages"],
                mask=mask,
                ref_per_token_logps=inputs.get("ref_per_token_logps"),
                old_per_token_logps=inputs.get("old_per_token_logps"),
                vllm_is_ratio=sampler,
                denominator=divisor,
            )
            return value * factor, TokenMetrics(*(pad(t, (0, 1)) for t in tokens))

        policy = LossProxy(model, function)
        return policy.attach_gradient(original(policy, inputs))

    replace(trainer, "_compute_loss", compute_loss)
    return None


def _why_not_grpo(trainer):
    """The reason why TRL's own formula computes the loss from log-probabilities by liger, or None."""
    for name in ("_compute_loss", "_get_per_token_logps_and_entropies"):
        if getattr(type(trainer), name) is not getattr(GRPOTrainer, name):
            return f"{type(trainer).__name__} has a {name} of its own"
    if trainer.loss_type not in GRPO_LOSS_TYPES:
        return f"loss_type='{trainer.loss_type}'"
    if trainer.top_entropy_quantile < 1.0:
        return f"top_entropy_quantile={trainer.top_entropy_quantile}"
    if trainer.off_policy_mask_threshold is not None:
        return f"off_policy_mask_threshold={trainer.off_policy_mask_threshold}"
    return "an entropy bonus" if trainer._entropy_bonus_enabled else None
