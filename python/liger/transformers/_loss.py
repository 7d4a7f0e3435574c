"""The loss of a causal language model, computed inside its lm_head.

The forward of a model calls ``self.lm_head(hidden)`` and then ``self.loss_function(logits=..., labels=...)``. A patched
model stores the labels of the call in a thread-local variable. The head reads them there and returns the loss instead
of logits, and the loss function passes it through. So the weight is read inside the call of the head, where the hooks
of FSDP2 and ZeRO-3 have gathered it. A head that is not patched (a LoRA layer, a sharded weight) returns logits, and
the loss function computes the loss from them.
"""

import functools
import inspect
import logging
import threading
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from .._core.dtensor import is_dtensor
from ..ops.cross_entropy import cross_entropy
from ..ops.fused_linear_ce import fused_linear_ce
from ._classes import recipe_of
from ._reuse import can_share, lookup

logger = logging.getLogger("liger.transformers")


class _Active(threading.local):
    """The innermost call of a patched model in this thread whose head computes the loss; None if there is none."""

    def __init__(self):
        # threading.local calls this in every thread. torch.compile treats a class attribute as a constant.
        self.call = None


_active = _Active()


class _LossCall:
    """One forward of a model: the inputs of the head's loss besides the hidden states, and then the loss."""

    def __init__(self, heads, labels, keywords, softcap):
        self.heads, self.labels, self.keywords, self.softcap = heads, labels, keywords, softcap
        self.loss = None
        self.shared = (
            None,
            None,
        )  # (a tied weight, the output of the embedding's autograd node that replaces it)

    def lookup(self, embedding, ids):
        """The rows of an embedding that shares its weight with a head; None if the two need separate gradients."""
        if self.shared[0] is not None or not any(can_share(embedding, head) for head in self.heads):
            return None
        rows, weight = lookup(embedding, ids)
        self.shared = embedding.weight, weight
        return rows

    def compute(self, hidden, weight, bias):
        if self.shared[0] is weight:
            weight = self.shared[1]
        target, options = _target_and_options(hidden, self.labels, **self.keywords)
        self.loss = fused_linear_ce(
            hidden.reshape(-1, hidden.shape[-1]), weight, target, bias, softcap=self.softcap, **options
        )
        return self.loss


def _target_and_options(
    rows, labels, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **ignored
):
    """(flat target, options of the loss) from the keywords that transformers' ForCausalLMLoss reads."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(rows.device)
    options = {"denominator": num_items_in_batch, "ignore_index": ignore_index}
    return shift_labels.reshape(-1).to(rows.device), options


def _loss_from_logits(logits, labels, vocab_size=None, **keywords):
    """Replaces ForCausalLMLoss and has its arguments. ``logits`` is the output of the head, perhaps transformed."""
    call = _active.call
    if call is not None and call.loss is not None:
        # The output of the head's call, not call.loss: hooks on the head may have wrapped it, to gather the weight
        # before the backward. After a softcap the value is wrong, and the sum with factor 0 keeps its graph node.
        return logits if call.softcap is None else call.loss + 0.0 * logits
    target, options = _target_and_options(logits, labels, **keywords)
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), target, **options)


@dataclass(frozen=True)
class HeadRecipe:
    """An nn.Linear that returns the loss if a call of its model is active, and logits otherwise."""

    kind: ClassVar[None] = None  # reported as part of CausalLMRecipe

    def members(self, original):
        def forward(self, input):
            call = _active.call
            # A tensor-parallel weight is a DTensor; this rank has only a shard of it.
            if call is None or is_dtensor(self.weight) or not any(head is self for head in call.heads):
                return original.forward(self, input)
            return call.compute(input, self.weight, self.bias)

        return {"forward": functools.wraps(original.forward)(forward)}


@dataclass(frozen=True)
class EmbeddingRecipe:
    """An nn.Embedding tied to the head: in an active call one autograd node adds up the gradients of both."""

    kind: ClassVar[None] = None  # reported as part of CausalLMRecipe

    def members(self, original):
        def forward(self, input):
            rows = None if _active.call is None else _active.call.lookup(self, input)
            return original.forward(self, input) if rows is None else rows

        return {"forward": functools.wraps(original.forward)(forward)}


@dataclass(frozen=True)
class CausalLMRecipe:
    """A model whose head computes the loss (``fused``), or whose loss function is replaced."""

    head_name: str
    fused: bool
    softcap: float | None = None

    @property
    def kind(self):
        return "fused_linear_cross_entropy" if self.fused else "cross_entropy"

    def members(self, original):
        loss_function = property(_get_loss_function, _set_loss_function)
        if not self.fused:
            return {"loss_function": loss_function}
        return {"loss_function": loss_function, "forward": _fused_forward(original, self)}


def _get_loss_function(self):
    custom = getattr(self, "_loss_function", None)
    return _loss_from_logits if custom is None else custom


def _set_loss_function(self, value):
    self._loss_function = value


def linear_heads(head):
    """The nn.Linear modules of a head: itself, or the copies in PEFT's wrapper for ``modules_to_save``."""
    if isinstance(head, nn.Linear):
        return [head]
    copies = getattr(head, "modules_to_save", None)
    inner = (
        [getattr(head, "original_module", None), *copies.values()]
        if isinstance(copies, nn.ModuleDict)
        else [None]
    )
    return inner if all(isinstance(module, nn.Linear) for module in inner) else []


def sharing_embeddings(module, heads):
    """The nn.Embedding modules with the weight shape of a head. Models may be tied after patching, so shapes decide."""
    shapes = [head.weight.shape for head in heads]
    return [
        m for m in module.modules() if type(m).forward is nn.Embedding.forward and m.weight.shape in shapes
    ]


def _fused_forward(original, recipe):
    labels_at = list(inspect.signature(original.forward).parameters).index("labels") - 1

    @functools.wraps(original.forward)
    def forward(self, *args, skip_logits=None, **kwargs):
        labels = args[labels_at] if len(args) > labels_at else kwargs.get("labels")
        if skip_logits and labels is None:
            raise ValueError("skip_logits=True needs labels: without them the logits are the only result")
        skip = labels is not None and (self.training if skip_logits is None else skip_logits)
        call = None
        if skip and getattr(self, "_loss_function", None) is None:
            heads = [h for h in linear_heads(getattr(self, recipe.head_name)) if recipe_of(h) is not None]
            if not heads and not torch.compiler.is_compiling():
                _warn_about_head(type(getattr(self, recipe.head_name)))
            call = _LossCall(
                heads, labels, {n: kwargs[n] for n in _LOSS_KEYWORDS if n in kwargs}, recipe.softcap
            )
        before, _active.call = _active.call, call
        try:
            output = original.forward(self, *args, **kwargs)
        finally:
            _active.call = before
        return _without_logits(output) if skip else output

    return forward


_LOSS_KEYWORDS = ("num_items_in_batch", "ignore_index", "shift_labels")


@functools.cache
def _warn_about_head(cls):
    logger.warning(
        "liger: the head is a %s.%s, not the linear layer that was patched: the loss is computed from full logits",
        cls.__module__,
        cls.__name__,
    )


def _without_logits(output):
    if isinstance(output, tuple):
        return (output[0], *output[2:])
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})
