# SPDX-License-Identifier: BSD-3-Clause
"""Stand-ins for logits that a head returns where the forward of the model calls torch's cross entropy itself.

Encoder-decoders and masked language models do so:
``CrossEntropyLoss()(logits.view(-1, V), labels.view(-1))``. Their head computes the loss within its call, as
in models with a loss function (head/loss.py), and returns a :class:`DeferredLogits`. It takes the operations
that a trial has found between head and loss, and torch's cross entropy gets the loss from it. Any other use
of the logits raises an error.
"""

import math
import operator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

from ..recipe.rename import attributes_used, rename_global, uses_global

_MESSAGE = (
    "liger: {model} {what}, but its head computes the loss without logits: pass skip_logits=False, or patch with "
    "fused_linear_cross_entropy=False"
)


@dataclass(eq=False)
class DeferredLogits:
    """Stand-in for logits: only their cross entropy is known.

    Args:
        call: the :class:`LossCall` of the model.
        output: the loss, as the call of the head returned it.
        shape: of the logits.
    """

    call: Any
    output: torch.Tensor
    shape: tuple

    @property
    def device(self):
        return self.output.device

    @property
    def dtype(self):
        return self.output.dtype

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self):
        return len(self.shape)

    def view(self, *shape):
        shape = shape if isinstance(shape[0], int | torch.SymInt) else tuple(shape[0])
        if -1 in shape:
            rest = math.prod(shape[: shape.index(-1)]) * math.prod(shape[shape.index(-1) + 1 :])
            shape = tuple(math.prod(self.shape) // rest if n == -1 else n for n in shape)
        if shape[-1] != self.shape[-1] or math.prod(shape) != math.prod(self.shape):
            raise self.error(f"views logits of shape {self.shape} as {shape}")
        return replace(self, shape=shape)

    reshape = view

    def to(self, *args, **kwargs):
        return replace(self, output=self.output.to(*args, **kwargs))

    def _unchanged(self, *_):
        return self

    # The loss of the transformed logits.
    contiguous = float = _unchanged
    __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = _unchanged

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.error(f"uses {name} of its logits", AttributeError)

    def error(self, what, kind=RuntimeError):
        return kind(_MESSAGE.format(model=type(self.call.owner).__name__, what=what))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is nn.functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        deferred = next(x for x in (*args, *kwargs.values()) if isinstance(x, cls))
        if function in _ELEMENTWISE:
            return deferred
        raise deferred.error(f"calls {getattr(function, '__name__', function)} with its logits")


# As torch and torch.compile name the operators of a tensor and of a DeferredLogits.
_ELEMENTWISE = (
    *(operator.add, operator.mul, operator.truediv),
    *(torch.Tensor.add, torch.Tensor.mul, torch.Tensor.div),
)


# Wrappers of modules between head and loss (fully_shard) look for tensors in the results.
register_pytree_node(
    DeferredLogits,
    lambda deferred: ([deferred.output], (deferred.call, deferred.shape)),
    lambda outputs, context: DeferredLogits(context[0], next(iter(outputs)), context[1]),
    serialized_type_name="liger.DeferredLogits",
)


def _cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """The loss, for the arguments of torch's cross entropy."""
    call = input.call
    plain = weight is size_average is reduce is None and reduction == "mean" and not label_smoothing
    if not plain or ignore_index != -100 or target.numel() != call.labels.numel():
        raise input.error("calls cross_entropy with other labels or options than in its trial")
    call.is_read = True
    return call.own_loss(input.output)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch's, but traced through: torch.compile treats that class by name, and takes only tensors there."""


_NN = ModuleType("torch.nn")
_NN.__dict__.update({**vars(nn), "CrossEntropyLoss": CrossEntropyLoss})


def traceable(forward):
    """A copy of the forward that constructs the CrossEntropyLoss of this file; the forward itself if it does
    not construct torch's by one of the usual names."""
    for name, theirs, ours in (("CrossEntropyLoss", nn.CrossEntropyLoss, CrossEntropyLoss), ("nn", nn, _NN)):
        names = uses_global(forward, name)
        if names is None or names.get(name) is not theirs:
            continue
        if theirs is nn and "CrossEntropyLoss" not in attributes_used(forward):
            continue
        own = f"_liger_{name}"
        names[own] = ours
        try:
            return rename_global(forward, name, own)
        except ValueError:
            continue
    return forward
