"""What the adapters of all trainers share."""

import contextlib
import functools

import torch
from transformers.utils import is_peft_available

from ._head import FusedHead


def base_model(trainer, model):
    """The model of transformers inside what trainers and PEFT have wrapped around it."""
    model = trainer.accelerator.unwrap_model(model)
    if is_peft_available():
        from peft import PeftModel

        if isinstance(model, PeftModel):
            return model.get_base_model()
    return model


def add_heads(trainer, wanted=(), temperature=1.0, cast_to_float32=False):
    """Gives the policy, and the reference if there is one, a :class:`FusedHead`; returns the policy's."""
    options = {"temperature": temperature, "cast_to_float32": cast_to_float32}
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        # It has been prepared, with its own autocast around the forward that is replaced.
        FusedHead(base_model(trainer, reference), autocast=trainer.accelerator.autocast, **options)
    return FusedHead(base_model(trainer, trainer.model), wanted=wanted, **options)


def replace(trainer, name, function):
    """Makes ``trainer.name(...)`` call ``function(original, ...)``."""
    original = getattr(trainer, name)
    setattr(trainer, name, functools.wraps(original)(functools.partial(function, original)))


@contextlib.contextmanager
def overriding(trainer, **attributes):
    """While it lasts, attributes of the trainer have other values."""
    missing = object()
    before = {name: trainer.__dict__.get(name, missing) for name in attributes}
    trainer.__dict__.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                del trainer.__dict__[name]
            else:
                trainer.__dict__[name] = value


class Observed:
    """A loss of :mod:`liger.losses` that returns, in place of its own metrics, those of the tokens."""

    def __init__(self, loss_class, **options):
        self._seen = []
        self.loss = loss_class(observe=self._seen.append, **options)

    def __call__(self, *args, **kwargs):
        value, _ = self.loss(*args, **kwargs)
        return value, self._seen.pop()


class WithKeywords:
    """A model, or what wraps it, whose fused calls have more keywords."""

    def __init__(self, model, **keywords):
        self.model, self.keywords = model, keywords

    def __call__(self, *args, **kwargs):
        if not kwargs.get("fused_lm_head"):
            return self.model(*args, **kwargs)
        return self.model(*args, **self.keywords, **kwargs)

    def __getattr__(self, name):
        return getattr(self.model, name)


class WithLoss(WithKeywords):
    """A model whose fused calls take their loss from ``function``. ``loss`` is that of the last."""

    def __init__(self, model, function):
        super().__init__(model, liger_loss=function)
        self.loss = None

    def __call__(self, *args, **kwargs):
        outputs = super().__call__(*args, **kwargs)
        if kwargs.get("fused_lm_head"):
            self.loss = outputs.loss
        return outputs

    def gradient_for(self, theirs):
        """The trainer's loss, which it has computed from scores without gradients, with the gradient of ours. What
        else is in it, such as the loss of a router, keeps its own."""
        return theirs + (self.loss - self.loss.detach())


def over_processes(num_items_in_batch, trainer):
    """A tensor of the number of items of all processes, at least 1, over theirs. Float32: a tensor of integers over a
    number has the default dtype."""
    return num_items_in_batch.clamp(min=1).to(torch.float32) / trainer.accelerator.num_processes


def token_count(target, num_items_in_batch):
    """The number given, or else that of the targets that count, at least 1, on the device of the targets."""
    if num_items_in_batch is None:
        return (target != -100).sum().clamp(min=1)
    if not isinstance(num_items_in_batch, torch.Tensor):
        # Unlike a tensor made from the number, this waits for nothing.
        num_items_in_batch = torch.full((), num_items_in_batch, dtype=torch.float32, device=target.device)
    return num_items_in_batch.to(target.device).clamp(min=1)
