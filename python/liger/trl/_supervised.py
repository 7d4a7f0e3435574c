# SPDX-License-Identifier: BSD-3-Clause
"""SFTTrainer: cross entropy without materialised logits, and the logged entropies and accuracy."""

from trl import SFTTrainer

from ..losses import FusedLinearLoss, TokenMetrics
from ..ops.fused_linear_ce.op import fused_linear_ce
from ._adapter import LossProxy, LossWithTokenMetrics, add_heads, replace, token_count


class _TokenLoss(FusedLinearLoss):
    """Negative log-likelihood with a temperature, or the loss of dynamic fine-tuning (arXiv 2508.05629)."""

    unit = "token"

    def __init__(self, *, dynamic, **options):
        super().__init__(**options)
        self.dynamic = dynamic

    def compute(self, logprobs, entropy, *, tokens):
        return -(logprobs * logprobs.detach().exp() if self.dynamic else logprobs) / tokens

    def forward(self, input, weight, target, bias, *, tokens):
        result = self.run(self.batch(input, target), weight, bias, shared={"tokens": tokens})
        return result.loss, result.tokens


def adapt_sft(trainer):
    head = add_heads(trainer, ("entropy", "is_top1"))
    reason = _why_not_sft(trainer)
    if reason is not None:
        return reason
    transform, dynamic = head.transform, trainer.args.loss_type == "dft"
    loss_of = None
    if dynamic or transform.temperature != 1.0:
        loss_of = LossWithTokenMetrics(_TokenLoss, dynamic=dynamic, **transform._asdict())

    def compute_loss(original, model, inputs, return_outputs=False, num_items_in_batch=None):
        def function(hidden, weight, bias, target):
            tokens = token_count(target, num_items_in_batch)
            if loss_of is not None:
                value, metrics = loss_of(hidden, weight, target, bias, tokens=tokens.float())
            else:
                value, metrics = _cross_entropy(hidden, weight, bias, target, tokens, transform.softcap)
            if trainer.args.average_tokens_across_devices and num_items_in_batch is not None:
                # The number of tokens is global, and gradients are averaged over processes.
                value = value * (trainer.accelerator.num_processes // trainer.get_tp_size())
            return value, metrics

        policy = LossProxy(model, function)
        result = original(policy, inputs, return_outputs, num_items_in_batch)
        return policy.attach_gradient_to(result, return_outputs)

    replace(trainer, "compute_loss", compute_loss)
    return None


def _cross_entropy(hidden, weight, bias, target, tokens, softcap):
    options = {"denominator": tokens, "softcap": softcap}
    metrics = ("logprobs", "entropy", "argmax")
    result = fused_linear_ce(hidden, weight, target, bias, metrics=metrics, **options)
    return result.loss, TokenMetrics(result.logprobs, result.entropy, result.argmax)


def _why_not_sft(trainer):
    """The reason why the trainer computes its own loss from log-probabilities by liger, or None."""
    if type(trainer).compute_loss is not SFTTrainer.compute_loss:
        return f"{type(trainer).__name__} has a loss of its own"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func"
    if trainer.label_smoother is not None and trainer.args.loss_type == "nll":
        return f"label_smoothing_factor={trainer.args.label_smoothing_factor}"
    parallelism = trainer.accelerator.parallelism_config
    return "sequence parallelism" if parallelism is not None and parallelism.sp_enabled else None
