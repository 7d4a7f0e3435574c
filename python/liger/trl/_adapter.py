# SPDX-License-Identifier: BSD-3-Clause
"""Helpers of the trainer adapters: fused heads, replaced methods, model proxies, divisors."""

import functools

import torch
from transformers.utils import is_peft_available

from ..losses import TokenMetrics
from ._head import FusedHead


def base_model(trainer, model):
    """The transformers model inside the wrappers of accelerate and PEFT."""
    model = trainer.accelerator.unwrap_model(model)
    if is_peft_available():
        from peft import PeftModel

        if isinstance(model, PeftModel):
            return model.get_base_model()
    return model


def add_heads(trainer, scores=(), temperature=1.0, cast_to_float32=False):
    """Installs a :class:`FusedHead` on policy and reference model, if any; returns the policy's."""
    options = {"temperature": temperature, "cast_to_float32": cast_to_float32}
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        # accelerate.prepare wrapped the forward in autocast; the fused forward replaces both.
        FusedHead(base_model(trainer, reference), autocast=trainer.accelerator.autocast, **options)
    return FusedHead(base_model(trainer, trainer.model), scores=scores, **options)


def replace(trainer, name, function):
    """Replaces the method ``name`` of one trainer by ``function(original, ...)``."""
    original = getattr(trainer, name)
    setattr(trainer, name, functools.wraps(original)(functools.partial(function, original)))


class LossWithTokenMetrics:
    """A loss of :mod:`liger.losses` that returns (loss, TokenMetrics) instead of (loss, all its metrics)."""

    def __init__(self, loss_class, **options):
        self.loss = loss_class(metrics=TokenMetrics._fields, **options)

    def __call__(self, *args, **kwargs):
        value, metrics = self.loss(*args, **kwargs)
        return value, TokenMetrics(*(getattr(metrics, name) for name in TokenMetrics._fields))


class KeywordProxy:
    """Proxy of a model, wrapped or not, that adds keywords to every fused call."""

    def __init__(self, model, **keywords):
        self.model, self.keywords = model, keywords

    def __call__(self, *args, **kwargs):
        if not kwargs.get("fused_lm_head"):
            return self.model(*args, **kwargs)
        return self.model(*args, **self.keywords, **kwargs)

    def __getattr__(self, name):
        return getattr(self.model, name)


class LossProxy(KeywordProxy):
    """Proxy of a model; its fused calls compute their loss by ``function``.

    Attributes:
        loss: the loss of the last fused call.
    """

    def __init__(self, model, function):
        super().__init__(model, liger_loss=function)
        self.loss = None

    def __call__(self, *args, **kwargs):
        outputs = super().__call__(*args, **kwargs)
        if kwargs.get("fused_lm_head"):
            self.loss = outputs.loss
        return outputs

    def attach_gradient(self, trainer_loss):
        """The value of the trainer's loss with the gradient of ``loss``.

        The trainer computed it from scores without gradients. Other terms, such as a router's auxiliary loss,
        keep their own gradient.
        """
        return trainer_loss + (self.loss - self.loss.detach())

    def attach_gradient_to(self, result, return_outputs):
        """The result of a trainer's ``compute_loss`` with that gradient: a loss, or (loss, outputs)."""
        if return_outputs:
            return self.attach_gradient(result[0]), result[1]
        return self.attach_gradient(result)


def items_per_process(num_items_in_batch, trainer):
    """The global number of items, at least 1, divided by the number of processes: a float32 tensor."""
    # The quotient of an integer tensor and a number would have the default dtype.
    return num_items_in_batch.clamp(min=1).to(torch.float32) / trainer.accelerator.num_processes


def token_count(target, num_items_in_batch):
    """``num_items_in_batch``, or the number of valid targets if it is None: a device tensor, at least 1."""
    if num_items_in_batch is None:
        return (target != -100).sum().clamp(min=1)
    if not isinstance(num_items_in_batch, torch.Tensor):
        # torch.tensor(number, device=...) would synchronise with the device.
        num_items_in_batch = torch.full((), num_items_in_batch, dtype=torch.float32, device=target.device)
    return num_items_in_batch.to(target.device).clamp(min=1)
