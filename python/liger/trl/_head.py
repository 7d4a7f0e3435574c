"""A fused head: what a model returns for ``model(..., labels=labels, fused_lm_head=True)``, as TRL's trainers call it.

The head's weight is used within the head's own call, where the hooks of FSDP2 and ZeRO-3 have gathered it, and the head
within the model's, where those of DDP, FSDP and ZeRO-3 expect it.
"""

import contextlib
import functools
import types

import torch
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput

from .._core.dtensor import is_dtensor
from ..transformers._loss import linear_heads
from ._scores import Scores, Transform, score, top1, with_logit_statistics


class _HeadCall:
    """One call of a head, whose linear layers return what ``function(hidden, weight, bias)`` makes of their input."""

    def __init__(self, function):
        self.function, self.result = function, None

    def compute(self, linear, hidden):
        if is_dtensor(linear.weight):
            return ()
        self.result = self.function(hidden, linear.weight, linear.bias)
        # Hooks on the head, which gather its weight before the backward, have to see what is differentiated.
        return tuple(t for t in self.result if t is not None and t.requires_grad)

    @contextlib.contextmanager
    def through(self, linear):
        """While it lasts, the linear layer computes this. Its hooks run as ever, be they of modules or of accelerate's,
        which keep the forward under another name."""
        name = "_old_forward" if "_old_forward" in linear.__dict__ else "forward"
        before = linear.__dict__.get(name)
        linear.__dict__[name] = functools.partial(self.compute, linear)
        try:
            yield
        finally:
            if before is None:
                del linear.__dict__[name]
            else:
                linear.__dict__[name] = before


def call_head(head, hidden, function):
    """What ``function(hidden, weight, bias)``, a tuple of tensors and None, returns within a call of the head.

    Raises:
        RuntimeError: the head is not a linear layer whose weight is whole.
    """
    call = _HeadCall(function)
    linears = linear_heads(head)
    if linears:
        with contextlib.ExitStack() as stack:
            for linear in linears:
                stack.enter_context(call.through(linear))
            differentiated = head(hidden)
    if call.result is None:
        raise RuntimeError(
            f"liger.trl: the head is a {type(head).__module__}.{type(head).__qualname__}, expected a torch.nn.Linear "
            "with a whole weight (no adapter in target_modules, no tensor parallelism)"
        )
    seen = iter(differentiated)
    made = (t if t is None or not t.requires_grad else next(seen) for t in call.result)
    return type(call.result)(*made)


class FusedHead:
    """The fused head of one model.

    A fused call with ``liger_loss``, a function of (hidden, weight, bias, target), takes its loss from there: it
    returns the loss, and the :class:`liger.losses.TokenStatistics` of the targets or of their last columns. The scores
    of such a call have no gradients. With ``liger_keep`` only so many of the last targets have scores.

    Args:
        model: of transformers, with a linear head; not the wrapper of PEFT.
        temperature: that logits are divided by.
        wanted: the names in :class:`Scores` that the trainer looks at, beside the log-probabilities.
        cast_to_float32: whether the head computes in float32, outside of autocast.
        autocast: a context manager for calls of a model that was prepared for evaluation, or None.
    """

    def __init__(self, model, temperature=1.0, wanted=(), cast_to_float32=False, autocast=None):
        self.transform = Transform.of(model.config.get_text_config(), temperature)
        self.wanted, self.cast_to_float32, self.autocast = frozenset(wanted), cast_to_float32, autocast
        self._install(model)

    def _install(self, model):
        fused, plain = self, model.forward

        # `generate` looks at the signature.
        @functools.wraps(type(model).forward)
        def forward(self, *args, fused_lm_head=False, **kwargs):
            if not fused_lm_head:
                return plain(*args, **kwargs)
            with contextlib.nullcontext() if fused.autocast is None else fused.autocast():
                return fused.run(self, *args, **kwargs)

        forward.liger_trainer_loss = True  # for patch_report
        model.forward = types.MethodType(forward, model)

    def run(
        self, model, *args, labels=None, shift_labels=None, num_items_in_batch=None, liger_loss=None,
        liger_keep=None, **kwargs,
    ):  # fmt: skip
        config = model.config.get_text_config()
        kwargs["use_cache"] = False
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        outputs = model.base_model(*args, **kwargs)
        hidden, target = outputs.last_hidden_state, shift_labels
        if target is None:
            # The last token predicts nothing. Taking it off would copy all hidden states.
            target = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        if liger_keep is not None:
            hidden, target = hidden[:, -liger_keep - 1 :], target[:, -liger_keep - 1 :]
        if self.cast_to_float32:
            hidden = hidden.float()
        with torch.autocast(hidden.device.type, enabled=False) if self.cast_to_float32 else _NOTHING:
            scores = self._scores(model.get_output_embeddings(), hidden, target, liger_loss)
        if shift_labels is None:
            scores = Scores(scores.loss, *(t if t is None else t[:, :-1] for t in scores[1:]))
            target = target[:, :-1]
        return self._output(scores, target, num_items_in_batch, outputs, config, kwargs)

    def _scores(self, head, hidden, target, loss):
        def function(hidden, weight, bias):
            # A model that is split over devices ends on that of its head.
            tokens = target.to(hidden.device)
            given = hidden, weight, bias, tokens
            if loss is None:
                return score(*given, self.transform, self.wanted)
            value, found = loss(*given)
            scores = Scores(value, found.logprobs, found.entropy)
            if "is_top1" in self.wanted:
                scores = scores._replace(is_top1=top1(found.argmax, tokens))
            return with_logit_statistics(scores, *given, self.transform, self.wanted)

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
        named = scores._asdict() | {"loss": total, "label_mask": mask, "aux_loss": aux_loss}
        return FusedCausalLMOutput(**named)


_NOTHING = contextlib.nullcontext()


def _load_balancing_loss(router_logits, config, attention_mask):
    # All mixtures of experts in transformers have this one.
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = getattr(config, "num_experts", None) or config.num_local_experts
    return load_balancing_loss_func(router_logits, experts, config.num_experts_per_tok, attention_mask)
