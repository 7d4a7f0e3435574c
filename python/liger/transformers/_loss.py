"""The loss of a causal language model, computed inside its lm_head.

The forward of a model calls ``self.lm_head(hidden)`` and then ``self.loss_function(logits=..., labels=...)``. A patched
model stores the labels of the call in a thread-local variable. The head reads them there and returns the loss instead
of logits, and the loss function passes it through. So the weight is read inside the call of the head, where the hooks
of FSDP2 and ZeRO-3 have gathered it. A head that is not patched (a quantised or a sharded weight) returns logits, and
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
from ._classes import give_class, patched_class, recipe_of
from ._heads import heads_of, needs_logits
from ._lora_head import is_lora_linear, low_rank_parts, supports
from ._low_rank import low_rank_ce
from ._reuse import can_share, lookup, lookup_adding_gradient

logger = logging.getLogger("liger.transformers")


class _Active(threading.local):
    """The innermost call of a patched model in this thread whose head computes the loss; None if there is none."""

    def __init__(self):
        # threading.local calls this in every thread. torch.compile treats a class attribute as a constant.
        self.call = None


_active = _Active()


class LossCall:
    """One forward of a model: the inputs of the head's loss besides the hidden states, and then the loss.

    Args:
        owner: the model.
        heads: the linear layers, one of which the model calls as its head.
        labels, keywords: arguments of the call.
        recipe: the :class:`CausalLMRecipe` of the model.
    """

    def __init__(self, owner, heads, labels, keywords, recipe):
        self.owner, self.heads, self.labels, self.keywords = owner, heads, labels, keywords
        self.recipe, self.loss, self.logits = recipe, None, None
        # (a tied weight, the output of the embedding's autograd node that replaces it)
        self.shared = (None, None)

    def lookup(self, embedding, ids):
        """The rows of an embedding that shares its weight with a head; None if the two need separate gradients."""
        tied = any(isinstance(head, nn.Linear) and can_share(embedding, head) for head in self.heads)
        if self.recipe.accumulate_grad_weight:
            if tied:
                return lookup_adding_gradient(embedding, ids)
            self._refuse_gradient_beside_the_sum(embedding)
            return None
        if self.shared[0] is not None or not tied:
            return None
        rows, weight = lookup(embedding, ids)
        self.shared = embedding.weight, weight
        return rows

    def check_embedding(self):
        """Raises RuntimeError if the model's embedding shares the weight of a head and cannot add to its sum, because
        its class has a forward of its own (Gemma 3 scales the rows): it was not patched, so it does not call lookup."""
        if self.recipe.accumulate_grad_weight:
            embedding = self.owner.get_input_embeddings()
            if isinstance(embedding, nn.Embedding) and recipe_of(embedding) is None:
                self._refuse_gradient_beside_the_sum(embedding)

    def _refuse_gradient_beside_the_sum(self, embedding):
        weight = embedding.weight
        tied = any(getattr(head, "weight", None) is weight for head in self.heads)
        if tied and weight.requires_grad and torch.is_grad_enabled() and hasattr(weight, "main_grad"):
            raise RuntimeError(
                "liger: accumulate_grad_weight with an embedding that is tied to the head and has hooks, a forward of "
                "its own, or max_norm, sparse or scale_grad_by_freq: autograd would add its gradient to weight.grad, "
                "expected it in weight.main_grad"
            )

    @staticmethod
    def reaches(head):
        """Whether the active call has this head and no loss yet."""
        call = _active.call
        return call is not None and call.loss is None and any(own is head for own in call.heads)

    @staticmethod
    def at_head(head, hidden, weight, bias, low_rank=None):
        """The loss, if the active call has this head and no loss yet; else None, and the head returns logits.

        ``low_rank``: (down, up), two matrices that add ``down @ up.T`` to the logits.
        """
        # A tensor-parallel weight is a DTensor; this rank has only a shard of it.
        if not LossCall.reaches(head) or is_dtensor(weight):
            return None
        return _active.call._compute(hidden, weight, bias, low_rank)

    def _compute(self, hidden, weight, bias, low_rank):
        if self.shared[0] is weight:
            weight = self.shared[1]
        target, options = _target_and_options(hidden, self.labels, self.recipe.shift, **self.keywords)
        options["softcap"] = self.recipe.softcap
        rows, scale, classes = hidden.reshape(-1, hidden.shape[-1]), self.recipe.scale, self.recipe.classes
        if classes is not None:
            weight, bias = weight[:classes], None if bias is None else bias[:classes]
            low_rank = None if low_rank is None else (low_rank[0], low_rank[1][:classes])
        if scale != 1:
            # The op has no scale: the hidden states are the smallest operand that can have it.
            rows, bias = rows * scale, None if bias is None else bias * scale
        if low_rank is None:
            accumulate = self.recipe.accumulate_grad_weight
            self.loss = fused_linear_ce(
                rows, weight, target, bias, **options, accumulate_grad_weight=accumulate
            )
        else:
            down, up = low_rank
            down = down.reshape(-1, down.shape[-1])
            self.loss = low_rank_ce(
                rows, weight, down * scale if scale != 1 else down, up, target, bias, **options
            )
        return self.loss.reshape((1,) * hidden.dim()) if self.recipe.shaped else self.loss

    def loss_of(self, logits, labels, keywords):
        """The loss for the model's loss function. ``logits`` is the output of the head, perhaps transformed.

        Raises:
            RuntimeError: other labels or arguments than those of the model, for which the head computed the loss.
        """
        self.logits = logits
        moved = labels is not None and labels.device != self.labels.device
        names = LOSS_KEYWORDS if self.recipe.shift else LOSS_KEYWORDS[:2]
        same = all((keywords.get(name) is None) == (self.keywords.get(name) is None) for name in names)
        if not same or not (labels is self.labels or moved):
            raise RuntimeError(
                f"liger: {type(self.owner).__name__} calls its loss function with other labels or arguments than it "
                "was called with, for which the lm_head has computed the loss: pass skip_logits=False, or patch "
                "with fused_linear_cross_entropy=False"
            )
        # The output of the head's call, not self.loss: hooks on the head may have wrapped it, to gather the weight
        # before the backward.
        output = logits if not logits.dim() else logits.reshape(())
        if self.recipe.softcap is None and self.recipe.scale == 1 and output.dtype == self.loss.dtype:
            return output
        # A transformed loss is wrong, and one that a mixed-precision policy has cast (output_dtype of FSDP2) is
        # rounded. The sum with factor 0 keeps its graph node; the clamp, because a cast to float16 may be infinite.
        return self.loss + 0.0 * output.clamp(-1.0, 1.0)


class HeadCall:
    """Context manager: ``call``, a :class:`LossCall` or None, is the active one."""

    def __init__(self, call):
        self.call = call

    def __enter__(self):
        self.before, _active.call = _active.call, self.call

    def __exit__(self, *_):
        _active.call = self.before


# Keywords of a model that transformers' ForCausalLMLoss reads.
LOSS_KEYWORDS = ("num_items_in_batch", "ignore_index", "shift_labels")


def _target_and_options(
    rows, labels, shift, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **ignored
):
    """(flat target, options of the loss) from the keywords that transformers' ForCausalLMLoss reads.

    ``shift`` False: those of ForMaskedLMLoss, whose labels are those of the same position.
    """
    if not shift:
        shift_labels = labels
    elif shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(rows.device)
    options = {"denominator": num_items_in_batch, "ignore_index": ignore_index}
    return shift_labels.reshape(-1).to(rows.device), options


def loss_from_logits(logits, labels, vocab_size=None, *, shift=True, **keywords):
    """Replaces ForCausalLMLoss and has its arguments. ``logits`` is the output of the head, perhaps transformed."""
    call = _active.call
    if call is not None and call.loss is not None and logits.numel() == 1:
        return call.loss_of(logits, labels, keywords)
    if call is not None:
        call.logits = logits
    target, options = _target_and_options(logits, labels, shift, **keywords)
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), target, **options)


_unshifted_loss_from_logits = functools.partial(loss_from_logits, shift=False)


@dataclass(frozen=True)
class HeadRecipe:
    """An nn.Linear that returns the loss if a call of its model is active, and logits otherwise."""

    kind: ClassVar[None] = None  # reported as part of CausalLMRecipe

    def members(self, original):
        def forward(self, input):
            loss = LossCall.at_head(self, input, self.weight, self.bias)
            return original.forward(self, input) if loss is None else loss

        return {"forward": functools.wraps(original.forward)(forward)}


@dataclass(frozen=True)
class LoraHeadRecipe:
    """A LoRA layer that returns the loss if a call of its model is active, and logits otherwise."""

    kind: ClassVar[None] = None  # reported as part of CausalLMRecipe

    def members(self, original):
        def forward(self, x, *args, **kwargs):
            unmerges = self.disable_adapters and self.merged
            if args or kwargs or unmerges or not LossCall.reaches(self) or not supports(self):
                return original.forward(self, x, *args, **kwargs)
            low_rank, bias = low_rank_parts(self, x)
            loss = LossCall.at_head(self, x, self.base_layer.weight, bias, low_rank)
            return original.forward(self, x) if loss is None else loss

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
    """A model whose head computes the loss (``fused``), or whose loss function is replaced.

    With hidden states h, weight W and bias b, the logits are ``softcap(scale * (h W^T + b))``.

    Args:
        head_name: of the head among the submodules.
        softcap, scale: of the logits.
        keywords: those of LOSS_KEYWORDS that the model passes on to its loss function.
        shift: the label of a token is that of the next position.
        classes: the number of classes if the model cuts off the logits of the others.
        shaped: the model reads the shape of the logits, so the loss has as many dimensions as they have.
        accumulate_grad_weight: as in :func:`liger.fused_linear_ce`.
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

    @property
    def follows_head(self):
        """Whether a linear layer that replaces the head is another such head: the trial did not depend on classes."""
        return self.classes is None and not self.shaped

    def head_of(self, model):
        return functools.reduce(getattr, self.head_name.split("."), model)

    def unused_because(self, model):
        """Why the loss is computed from full logits although the model is patched; None if the head computes it."""
        if not self.fused:
            return None
        head = self.head_of(model)
        reason = needs_logits(head)
        if reason is None and not self.follows_head and any(recipe_of(m) is None for m in heads_of(head)):
            return "its head was replaced: the loss is computed from full logits until liger.patch is called again"
        return reason

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


def head_recipe(head):
    return LoraHeadRecipe() if is_lora_linear(head) else HeadRecipe()


def _patched_heads(head, recipe):
    """The modules of a head that a patched model may give its labels to."""
    heads = heads_of(head)
    if recipe.follows_head and not torch.compiler.is_compiling():
        # A head that has been replaced since: adapters were added or merged, or the vocabulary was resized.
        for module in heads:
            if recipe_of(module) is None:
                give_class(module, patched_class(type(module), head_recipe(module)))
    return [module for module in heads if recipe_of(module) is not None]


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
            head = recipe.head_of(self)
            heads = _patched_heads(head, recipe)
            if not heads and not torch.compiler.is_compiling():
                _warn_about_head(recipe.unused_because(self))
            call = LossCall(
                self, heads, labels, {n: kwargs[n] for n in recipe.keywords if n in kwargs}, recipe
            )
            call.check_embedding()
        elif labels is None and _active.call is not None and _active.call.owner is not self:
            # This model is part of another one, which computes the loss.
            call = _active.call
        with HeadCall(call):
            output = original.forward(self, *args, **kwargs)
        return _without_logits(output, call) if skip else output

    # accelerate's unwrap_model follows __wrapped__ to the end, and would restore the original forward.
    forward.__signature__ = inspect.signature(original.forward)
    del forward.__wrapped__
    return forward


@functools.cache
def _warn_about_head(reason):
    logger.warning("liger: a model was patched, but now %s", reason)


def _without_logits(output, call):
    if isinstance(output, tuple):
        # An auxiliary loss may precede the logits.
        given = None if call is None else call.logits
        at = next((i for i, value in enumerate(output) if i > 0 and value is given), 1)
        return (*output[:at], *output[at + 1 :])
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})
