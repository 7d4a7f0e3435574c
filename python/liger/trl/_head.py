# SPDX-License-Identifier: BSD-3-Clause
"""The fused lm_head of TRL's calls ``model(..., labels=labels, fused_lm_head=True)``, which return no logits.

The weight of the head is read inside the call of the head module, where the hooks of FSDP2 and ZeRO-3 have
gathered it, and the head is called in the forward of the model, as hooks of DDP, FSDP and ZeRO-3 require.
"""

import contextlib
import functools
import types

import torch
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput

from .._core.dtensor.inputs import is_dtensor
from .._core.modules.overriding import overriding
from ..transformers.head.kind import linear_layers
from ._scores import Scores, score, with_mean_logits
from ._transform import Transform, model_without_head


def call_head(head, hidden, function):
    """``function(hidden, weight, bias)``, a NamedTuple of tensors and None, within a call of the head.

    Raises:
        RuntimeError: the head is not a linear layer with an unsharded weight.
    """
    result, linears = None, linear_layers(head)

    def compute(linear, hidden):
        nonlocal result
        if is_dtensor(linear.weight):
            return ()
        result = function(hidden, linear.weight, linear.bias)
        # Hooks of the head gather its weight for the backward: return every differentiable tensor.
        return tuple(t for t in result if t is not None and t.requires_grad)

    if linears:
        with contextlib.ExitStack() as stack:
            for linear in linears:
                # The hooks of the layer still run; accelerate's call the attribute _old_forward.
                name = "_old_forward" if "_old_forward" in linear.__dict__ else "forward"
                stack.enter_context(overriding(linear, **{name: functools.partial(compute, linear)}))
            differentiable = head(hidden)
    if result is None:
        raise RuntimeError(
            f"liger.trl: the head is a {type(head).__module__}.{type(head).__qualname__}, expected a torch.nn.Linear "
            "with a whole weight (no adapter in target_modules, no quantisation, no tensor parallelism)"
        )
    outputs = iter(differentiable)
    return type(result)(*(t if t is None or not t.requires_grad else next(outputs) for t in result))


class FusedHead:
    """The fused lm_head of one model; the constructor replaces the forward of the model.

    Keywords of a fused call: ``liger_loss`` is a function of (hidden, weight, bias, target) that returns the
    loss and the :class:`liger.losses.TokenMetrics` of the targets, or of their last columns; the scores of
    such a call have no gradient. ``liger_keep``: the number of last targets to compute.

    Args:
        model: a transformers model with a linear head; not the PEFT wrapper.
        temperature: divisor of the logits.
        scores: names in :class:`Scores` that the trainer reads besides the log-probabilities.
        cast_to_float32: logits are as exact as in float32, by ``logits_dtype=torch.float32``, with autocast
            disabled.
        autocast: a function that returns a context manager, for models that were prepared for evaluation; or
            None.
    """

    def __init__(self, model, temperature=1.0, scores=(), cast_to_float32=False, autocast=None):
        self.transform = Transform.of(model, temperature)
        if cast_to_float32:
            self.transform = self.transform._replace(logits_dtype=torch.float32)
        self.scores, self.cast_to_float32, self.autocast = frozenset(scores), cast_to_float32, autocast
        self._install(model)

    def _install(self, model):
        fused_head, original = self, model.forward

        # `generate` inspects the signature.
        @functools.wraps(type(model).forward)
        def forward(self, *args, fused_lm_head=False, **kwargs):
            if not fused_lm_head:
                return original(*args, **kwargs)
            with contextlib.nullcontext() if fused_head.autocast is None else fused_head.autocast():
                return fused_head.run(self, *args, **kwargs)

        forward.liger_trainer_loss = True  # read by patch_report
        model.forward = types.MethodType(forward, model)

    def run(self, model, *args, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs):
        liger_loss, liger_keep = (kwargs.pop(name, None) for name in ("liger_loss", "liger_keep"))
        config = model.config.get_text_config()
        kwargs["use_cache"] = False
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        outputs = model_without_head(model)(*args, **kwargs)
        hidden, target = outputs.last_hidden_state, shift_labels
        if target is None:
            # The last token has no target. Slicing it off would copy all hidden states.
            target = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        if liger_keep is not None:
            hidden, target = hidden[:, -liger_keep - 1 :], target[:, -liger_keep - 1 :]
        with torch.autocast(hidden.device.type, enabled=False) if self.cast_to_float32 else _NULL_CONTEXT:
            scores = self._scores(model.get_output_embeddings(), hidden, target, liger_loss)
        if shift_labels is None:
            scores = Scores(scores.loss, *(t if t is None else t[:, :-1] for t in scores[1:]))
            target = target[:, :-1]
        return self._output(scores, target, num_items_in_batch, outputs, config, kwargs)

    def _scores(self, head, hidden, target, loss):
        def function(hidden, weight, bias):
            # With device_map, the head may be on another device than the targets.
            tokens = target.to(hidden.device)
            inputs = hidden, weight, bias, tokens
            if loss is None:
                return score(*inputs, self.transform, self.scores)
            value, metrics = loss(*inputs)
            scores = Scores(value, metrics.logprobs, metrics.entropy)
            if "is_top1" in self.scores:
                scores = scores._replace(is_top1=metrics.argmax == tokens)
            return with_mean_logits(scores, hidden, weight, bias, self.transform, self.scores)

        return call_head(head, hidden, function)

    def _output(self, scores, target, num_items_in_batch, outputs, config, kwargs):
        mask = target != -100
        total, aux_loss = scores.loss, None
        if total is None:
            tokens = mask.sum().clamp_min(1) if num_items_in_batch is None else num_items_in_batch
            total = -scores.log_probs.sum() / tokens
        if kwargs.get("output_router_logits"):
            aux_loss = _load_balancing_loss(outputs.router_logits, config, kwargs.get("attention_mask"))
            if scores.loss is None:
                total = total + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        fields = scores._asdict() | {"loss": total, "label_mask": mask, "aux_loss": aux_loss}
        return FusedCausalLMOutput(**fields)


_NULL_CONTEXT = contextlib.nullcontext()


def _load_balancing_loss(router_logits, config, attention_mask):
    # Every mixture-of-experts model of transformers uses this function.
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = getattr(config, "num_experts", None) or config.num_local_experts
    return load_balancing_loss_func(router_logits, experts, config.num_experts_per_tok, attention_mask)
