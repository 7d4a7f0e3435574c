# SPDX-License-Identifier: BSD-3-Clause
"""One call of a patched model with an lm_head that computes the loss: the labels, and then the loss.

A patched model stores the call in a thread-local variable, in which its head finds the labels. The loss is
computed inside the call of the head, where the hooks of FSDP2 and ZeRO-3 have gathered the weight.
"""

import functools
import logging
import operator
import threading

import torch
from torch import nn

from ..._core.dtensor.inputs import is_dtensor
from ..._core.op.autograd import is_traced
from ...ops.fused_linear_ce.op import fused_linear_ce
from ..recipe.classes import changing_hook, gradient_hook, recipe_of
from ..recipe.reuse import can_share, lookup, lookup_adding_gradient, weight_of_head
from .deferred_logits import DeferredLogits
from .lora import low_rank_ce
from .sharded import FROM_LOGITS, as_output, own_copy, whole_hidden, why_from_logits

logger = logging.getLogger("liger.transformers")


class ActiveCall(threading.local):
    """The innermost call in this thread of a model whose head computes the loss, or None."""

    def __init__(self):
        # threading.local calls this in every thread. torch.compile treats a class attribute as a constant.
        self.call = None


active = ActiveCall()


class LossCall:
    """One forward of a model: the inputs of the head's loss besides the hidden states, and then the loss.

    Args:
        owner: the model.
        heads: the linear layers; the model calls one of them as its head.
        labels, keywords: arguments of the call.
        recipe: the :class:`CausalLMRecipe` of the model.
    """

    def __init__(self, owner, heads, labels, keywords, recipe):
        self.owner, self.heads, self.labels, self.keywords = owner, heads, labels, keywords
        self.recipe, self.loss, self.logits = recipe, None, None
        # (a tied weight, the output of the embedding's autograd node that gets its gradient)
        self.shared = (None, None)
        # The mesh of the DTensor in which a sharded head returned copies of the loss.
        self.mesh = None
        # True if the cross entropy that the forward calls has read the loss.
        self.is_read = False

    def lookup(self, embedding, ids):
        """The rows of an embedding tied to a head; None if the two need separate gradients."""
        tied = any(
            isinstance(head, nn.Linear) and can_share(embedding, head) and self._hook_on_logits(head) is None
            for head in self.heads
        )
        if self.recipe.accumulate_grad_weight:
            # The sum belongs to a parameter, not to a tensor in its place.
            if tied and isinstance(embedding.weight, nn.Parameter):
                return lookup_adding_gradient(embedding, ids)
            self._refuse_gradient_beside_the_sum(embedding)
            return None
        # Traced code gets two gradients, which the compiler adds.
        if self.shared[0] is not None or not tied or is_traced(embedding.weight):
            return None
        rows, stand_in = lookup(embedding, ids)
        self.shared = embedding.weight, stand_in
        return rows

    def check_embedding(self):
        """Raises RuntimeError if the model's embedding shares the weight of a head and cannot add to its sum,
        because its class looks up the rows itself: it was not patched, so it does not call lookup."""
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
        """True if the active call has this head and no loss yet."""
        call = active.call
        return call is not None and call.loss is None and any(own is head for own in call.heads)

    @staticmethod
    def at_head(head, hidden, weight, bias, low_rank=None):
        """The loss, if the active call has this head and no loss yet; else None, and the head returns logits.

        ``low_rank``: (down, up), two matrices that add ``down @ up.T`` to the logits.
        """
        if not LossCall.reaches(head):
            return None
        call = active.call
        reason = why_from_logits(head, weight, bias, call.recipe) if isinstance(head, nn.Linear) else None
        reason = call._hook_on_logits(head) or reason
        if reason is not None:
            if not torch.compiler.is_compiling():
                warn_about_head(reason)
            return None
        return call._compute(whole_hidden(hidden), weight, bias, low_rank)

    def _hook_on_logits(self, head):
        """Why the loss must be computed from logits, if a hook uses them or their gradient; else None."""
        if not isinstance(head, nn.Module):  # the stand-in of a trial
            return None
        # The head of the model may be PEFT's wrapper of this one.
        for module in (head, self.recipe.head_of(self.owner)):
            if (hook := changing_hook(module)) is not None:
                return f"the forward hook {hook} of its head may change the logits{FROM_LOGITS}"
            if (hook := gradient_hook(module)) is not None:
                return f"the backward hook {hook} of its head gets the gradient of the logits{FROM_LOGITS}"
        return None

    @staticmethod
    def output_of_head(loss, hidden):
        """The output for a loss: a DTensor if hooks of tensor parallelism made one of the input."""
        if not is_dtensor(hidden):
            return loss
        active.call.mesh = hidden.device_mesh
        return as_output(loss, hidden.device_mesh)

    @staticmethod
    def result_of_call(output):
        """The head's output, or the logits that a forward gives to torch's cross entropy."""
        call = active.call
        if (
            call is None
            or not call.recipe.deferred
            or call.logits is not None
            or not call.has_loss_in(output)
        ):
            return output
        call.logits = DeferredLogits(call, output, call.shape)
        return call.logits

    def has_loss_in(self, logits):
        """True if the output of the head, perhaps transformed, is the loss."""
        return self.loss is not None and logits.numel() in (1, 1 if self.mesh is None else self.mesh.size())

    def _compute(self, hidden, weight, bias, low_rank):
        if self.shared[0] is weight:
            weight = weight_of_head(self.shared[1], weight)
        recipe = self.recipe
        target, options = target_and_options(hidden, self.labels, recipe.shift, **self.keywords)
        options["softcap"] = recipe.softcap
        if recipe.added is not None:
            added = operator.attrgetter(recipe.added)(self.owner).reshape(-1).to(weight.dtype)
            bias = added if bias is None else bias + added
        self.shape = (*hidden.shape[:-1], len(weight) if recipe.classes is None else recipe.classes)
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
            RuntimeError: other labels or arguments than the model got, for which the head computed the loss.
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
        return self.own_loss(logits)

    def own_loss(self, logits):
        """The loss, connected with the output of the head's call: hooks on the head may have wrapped it, to
        gather the weight before the backward."""
        if self.mesh is not None:
            output = own_copy(logits, self.mesh.get_local_rank())
        else:
            output = logits if not logits.dim() else logits.reshape(())
        if self.recipe.softcap is None and self.recipe.scale == 1 and output.dtype == self.loss.dtype:
            return output
        # A transformed loss is wrong, and one that a mixed-precision policy has cast (output_dtype of FSDP2)
        # is rounded. The sum with factor 0 keeps its graph node; the clamp, because a cast to float16 may be
        # infinite.
        return self.loss + 0.0 * output.clamp(-1.0, 1.0)


class HeadCall:
    """Context manager: ``call``, a :class:`LossCall` or None, is the active one."""

    def __init__(self, call):
        self.call = call

    def __enter__(self):
        self.before, active.call = active.call, self.call

    def __exit__(self, *_):
        active.call = self.before


# Keywords of a model that transformers' ForCausalLMLoss reads.
LOSS_KEYWORDS = ("num_items_in_batch", "ignore_index", "shift_labels")


def target_and_options(
    rows, labels, shift, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **ignored
):
    """(flat target, options of the loss) from the keywords that transformers' ForCausalLMLoss reads.

    ``shift`` False: the arguments of ForMaskedLMLoss, where the label of a token is at the same position.
    """
    if not shift:
        shift_labels = labels
    elif shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(rows.device)
    options = {"denominator": num_items_in_batch, "ignore_index": ignore_index}
    return shift_labels.reshape(-1).to(rows.device), options


@functools.cache
def warn_about_head(reason):
    logger.warning("liger: a model was patched, but now %s", reason)
