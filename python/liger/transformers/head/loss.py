# SPDX-License-Identifier: BSD-3-Clause
"""The loss of a causal language model, computed inside its lm_head.

The forward of a model calls ``self.lm_head(hidden)`` and then ``self.loss_function(logits=..., labels=...)``.
A patched model stores the labels of the call in a thread-local variable. The head reads them there and
returns the loss instead of logits, and the loss function passes it through. The weight is therefore read
inside the call of the head, where the hooks of FSDP2 and ZeRO-3 have gathered it. A head that is not patched
(a quantised weight, for example) returns logits, and the loss function computes the loss from them. A head
that is sharded by tensor parallelism is in head/sharded.py.
"""

import functools
import inspect
import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ...ops.cross_entropy.op import cross_entropy
from ..recipe import trials
from ..recipe.classes import give_class, patched_class, recipe_of
from .deferred_logits import DeferredLogits, traceable
from .kind import kind_of, reads_lora
from .lora import low_rank_parts
from .loss_call import HeadCall, LossCall, active, target_and_options, warn_about_head
from .sharded import KIND, is_tensor_parallel, tensor_parallel_forward, why_from_logits


def loss_from_logits(logits, labels, vocab_size=None, *, shift=True, **keywords):
    """Replaces ForCausalLMLoss. ``logits`` is the output of the head, perhaps transformed."""
    call = active.call
    if call is not None and call.has_loss_in(logits):
        return call.loss_of(logits, labels, keywords)
    if call is not None:
        call.logits = logits
    target, options = target_and_options(logits, labels, shift, **keywords)
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), target, **options)


_unshifted_loss_from_logits = functools.partial(loss_from_logits, shift=False)


@dataclass(frozen=True)
class HeadRecipe:
    """An nn.Linear that returns the loss if a call of its model is active, and logits otherwise."""

    kind: ClassVar[None] = None  # reported as part of CausalLMRecipe

    def members(self, original):
        def forward(self, input):
            loss = LossCall.at_head(self, input, self.weight, self.bias)
            if loss is None:
                return original.forward(self, input)
            return LossCall.output_of_head(loss, input)

        return {"forward": functools.wraps(original.forward)(forward), "__call__": _call(original)}


def _call(original):
    """The ``__call__`` of a patched head, whose hooks do not see what it returns as logits."""

    def call(self, *args, **kwargs):
        return LossCall.result_of_call(original.__call__(self, *args, **kwargs))

    return call


def compute_loss_first(head):
    """Replaces the forward that transformers gave a tensor-parallel head: in an active call it is the loss.

    That forward calls the layer with local shards and without gradients, so the loss must come before it.
    """
    replaced = tensor_parallel_forward(head)
    if replaced is None:
        return

    @functools.wraps(replaced)
    def forward(*args, **kwargs):
        if not LossCall.reaches(head):
            return replaced(*args, **kwargs)
        loss = LossCall.at_head(head, *args, **kwargs, weight=head.weight, bias=head.bias)
        if loss is not None:
            return loss
        with HeadCall(None):
            return replaced(*args, **kwargs)

    # For accelerate: see _fused_forward. __module__ would make it look like the forward that it replaces.
    del forward.__wrapped__
    forward.__module__ = __name__
    forward.liger_replaced = replaced
    head.forward = forward


def restore_forward(module):
    """Undoes :func:`compute_loss_first`."""
    replaced = getattr(module.__dict__.get("forward"), "liger_replaced", None)
    if replaced is not None:
        module.forward = replaced


@dataclass(frozen=True)
class LoraHeadRecipe:
    """A LoRA layer that returns the loss if a call of its model is active, and logits otherwise."""

    kind: ClassVar[None] = None  # reported as part of CausalLMRecipe

    def members(self, original):
        def forward(self, x, *args, **kwargs):
            unmerges = self.disable_adapters and self.merged
            if args or kwargs or unmerges or not LossCall.reaches(self) or not reads_lora(self):
                return original.forward(self, x, *args, **kwargs)
            low_rank, bias = low_rank_parts(self, x)
            loss = LossCall.at_head(self, x, self.base_layer.weight, bias, low_rank)
            return original.forward(self, x) if loss is None else loss

        return {"forward": functools.wraps(original.forward)(forward), "__call__": _call(original)}


def _rows(embedding, input):
    """The rows of an embedding in an active call; None if they need no node of their own."""
    return None if active.call is None else active.call.lookup(embedding, input)


class _Lookup(nn.Embedding):
    """The lookup that the forward of a subclass of nn.Embedding calls instead of nn.Embedding's."""

    def forward(self, input):
        rows = _rows(self, input)
        return super().forward(input) if rows is None else rows


@dataclass(frozen=True)
class EmbeddingRecipe:
    """An nn.Embedding tied to the head: in an active call one autograd node adds up the gradients of both.

    inherits: its class has a forward that calls nn.Embedding's and scales the rows, for example (Gemma).
    """

    inherits: bool = False
    kind: ClassVar[None] = None  # reported as part of CausalLMRecipe

    @property
    def bases(self):
        return (_Lookup,) if self.inherits else ()

    def members(self, original):
        if self.inherits:
            return {}

        def forward(self, input):
            rows = _rows(self, input)
            return original.forward(self, input) if rows is None else rows

        return {"forward": functools.wraps(original.forward)(forward)}


@dataclass(frozen=True)
class CausalLMRecipe:
    """A model with a head that computes the loss (``fused``), or with a replaced loss function.

    With hidden states h, weight W and bias b, the logits are ``softcap(scale * (h W^T + b))``.

    Args:
        head_name: of the head among the submodules.
        softcap, scale: of the logits.
        keywords: the LOSS_KEYWORDS that the model passes on to its loss function.
        shift: the label of a token is at the next position.
        classes: the number of classes if the model cuts off the logits of the others.
        shaped: the model reads the shape of the logits, so the loss has as many dimensions as they have.
        accumulate_grad_weight: as in :func:`liger.fused_linear_ce`.
        like_liger_kernel: without labels, ``shift_labels`` ask for the loss, and ``skip_logits=True`` without
            both has no effect.
        deferred: the forward calls torch's cross entropy, so the head returns a :class:`DeferredLogits`.
        added: the name of a tensor with a number per class that is added to the logits after the head.
    """

    head_name: str
    fused: bool
    softcap: float | None = None
    scale: float = 1.0
    keywords: tuple = ()
    shift: bool = True
    classes: int | None = None
    shaped: bool = False
    accumulate_grad_weight: bool = False
    like_liger_kernel: bool = False
    deferred: bool = False
    added: str | None = None

    @property
    def follows_head(self):
        """True if a layer that replaces the head is another such head: no class decided the trial."""
        return self.classes is None and not self.shaped

    def head_of(self, model):
        return operator.attrgetter(self.head_name)(model)

    def unused_because(self, model):
        """Why the loss is computed from full logits in a patched model; None if the head computes it."""
        if not self.fused:
            return None
        head = self.head_of(model)
        layers, _, reason = kind_of(head)
        if reason is None and not self.follows_head and any(recipe_of(layer) is None for layer in layers):
            return "its head was replaced: the loss is computed from full logits until liger.patch is called again"
        if reason is None and is_tensor_parallel(head):
            reason = why_from_logits(head, head.weight, head.bias, self, gathered=False)
        return reason

    def kind_in(self, model):
        """The kind in a model that is patched now: its head may shard its classes."""
        sharded = (
            self.fused and isinstance(head := self.head_of(model), nn.Linear) and is_tensor_parallel(head)
        )
        return KIND if sharded else self.kind

    @property
    def loss_function(self):
        return loss_from_logits if self.shift else _unshifted_loss_from_logits

    @property
    def kind(self):
        return "fused_linear_cross_entropy" if self.fused else "cross_entropy"

    def members(self, original):
        loss_function = property(
            functools.partial(_get_loss_function, self.loss_function), _set_loss_function
        )
        if not self.fused:
            return {"loss_function": loss_function}
        return {"loss_function": loss_function, "forward": _fused_forward(original, self)}


def _get_loss_function(ours, self):
    custom = getattr(self, "_loss_function", None)
    return ours if custom is None else custom


def _set_loss_function(self, value):
    self._loss_function = value


def patch_head(kind):
    """Patches the layers of a :class:`HeadKind` that are not patched yet."""
    for layer in kind.layers:
        # A model within another one may have the same head.
        if recipe_of(layer) is None:
            give_class(layer, patched_class(type(layer), LoraHeadRecipe() if kind.is_lora else HeadRecipe()))
        # transformers may have sharded the head since the last call.
        compute_loss_first(layer)


def _patched_layers(head, recipe):
    """The layers of a head that a patched model may give its labels to."""
    kind = kind_of(head)
    if recipe.follows_head and not torch.compiler.is_compiling():
        # The head may be another one: adapters were added or merged, or the vocabulary was resized.
        patch_head(kind)
    return [layer for layer in kind.layers if recipe_of(layer) is not None]


def sharing_embeddings(module, heads):
    """(embedding with the shape of a head, recipe) of each; models may be tied after patching."""
    shapes = [head.weight.shape for head in heads]
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.weight.shape in shapes:
            recipe = _embedding_recipe(part)
            if recipe is not None:
                yield part, recipe


def _embedding_recipe(embedding):
    cls = trials.original(embedding)
    if cls.forward is nn.Embedding.forward:
        return EmbeddingRecipe()
    key = (_embedding_recipe, cls, cls.forward, trials.settings(embedding))
    calls = trials.remembered(lambda: _calls_of_lookup(embedding, cls), *key)
    return EmbeddingRecipe(inherits=True) if calls == 1 else None


def _calls_of_lookup(embedding, cls):
    """The number of calls of nn.Embedding's forward by a subclass, in a trial."""
    calls = []

    class Counting(nn.Embedding):
        def forward(self, input):
            calls.append(input)
            return super().forward(input)

    random = trials.Random()
    tensors = {**embedding._parameters, **embedding._buffers, "weight": random(4, 8)}
    if any(t is not None and t.numel() > 1 for name, t in tensors.items() if name != "weight"):
        return 0
    given = {
        n: t if t is None or n == "weight" else torch.ones(t.shape, dtype=t.dtype) for n, t in tensors.items()
    }
    stand_in = trials.stand_in(embedding, **given)
    stand_in.__class__ = type("Trial", (cls, Counting), {})
    try:
        stand_in.__class__.forward(stand_in, torch.tensor([[1, 2, 3]]))
    except trials.ERRORS as error:
        trials.no_trial(embedding, error)
        return 0
    return len(calls)


def _fused_forward(original, recipe):
    labels_at = list(inspect.signature(original.forward).parameters).index("labels") - 1
    inner = traceable(original.forward) if recipe.deferred else original.forward

    @functools.wraps(original.forward)
    def forward(self, *args, skip_logits=None, **kwargs):
        labels = args[labels_at] if len(args) > labels_at else kwargs.get("labels")
        if recipe.like_liger_kernel and labels is None:
            labels = kwargs.get("shift_labels") if "shift_labels" in recipe.keywords else None
            if labels is None:
                skip_logits = None
            elif len(args) > labels_at:
                args = (*args[:labels_at], labels, *args[labels_at + 1 :])
            else:
                kwargs["labels"] = labels
        if skip_logits and labels is None:
            raise ValueError("skip_logits=True needs labels: without them the logits are the only result")
        skip = labels is not None and (self.training if skip_logits is None else skip_logits)
        call = None
        if skip and getattr(self, "_loss_function", None) is None:
            head = recipe.head_of(self)
            heads = _patched_layers(head, recipe)
            if not heads and not torch.compiler.is_compiling():
                warn_about_head(recipe.unused_because(self))
            call = LossCall(
                self, heads, labels, {n: kwargs[n] for n in recipe.keywords if n in kwargs}, recipe
            )
            call.check_embedding()
        elif labels is None and active.call is not None and active.call.owner is not self:
            # This model is part of another one, which computes the loss.
            call = active.call
        with HeadCall(call):
            output = inner(self, *args, **kwargs)
        if skip and recipe.deferred and call is not None and call.loss is not None and not call.is_read:
            raise call.logits.error("computes no cross entropy of its logits with these arguments")
        return _without_logits(output, call) if skip else output

    # accelerate's unwrap_model follows __wrapped__ to the end, and would restore the original forward.
    forward.__signature__ = inspect.signature(original.forward)
    del forward.__wrapped__
    return forward


def _without_logits(output, call):
    if isinstance(output, tuple):
        # An auxiliary loss may precede the logits.
        given = None if call is None else call.logits

        def is_logits(value):
            if isinstance(value, DeferredLogits):
                return True
            if given is not None:
                return value is given
            return isinstance(value, torch.Tensor) and value.dim() > 1

        at = next((i for i, value in enumerate(output) if i > 0 and is_logits(value)), 1)
        return (*output[:at], *output[at + 1 :])
    kept = {n: v for n, v in output.items() if n != "logits" and not isinstance(v, DeferredLogits)}
    return type(output)(**kept)
