# SPDX-License-Identifier: BSD-3-Clause
"""``linear(activation(gate) * up)`` as one autograd node that saves gate and up, but not their product.

The backward kernel of the gated product reads gate and up anyway. It also writes the product, over the
gradient of the product where it may, so the weight gradient costs no pass over gate and up of its own.
"""

import torch
from torch import nn
from torch._C import _AutoDispatchBelowAutograd

from ..._core.op.autograd import differentiable_once, is_traced, may_write_saved, non_overlapping
from ..recipe.reuse import is_plain_linear


class _SavedGated(torch.autograd.Function):
    """Saves the tensors of :class:`_GatedLinear`: checkpointing stops its recomputation here."""

    @staticmethod
    def forward(ctx, weight, *gate_up):
        ctx.save_for_backward(weight, *gate_up)
        views = tuple(t.view_as(t) for t in gate_up)
        return views if len(views) > 1 else views[0]

    @staticmethod
    def backward(ctx, *grads):
        return None, *grads


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, form, inplace, weight, bias, *gate_up):
        ctx.form, ctx.inplace, ctx.saved = form, inplace, gate_up[0].grad_fn
        return nn.functional.linear(form.product(*gate_up), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        weight, *gate_up = ctx.saved.saved_tensors
        return ctx.form.backward(_Context(ctx, (weight, *gate_up)), grad)


class _Context:
    """The context of the node with the tensors that the other node has saved, unpacked once."""

    def __init__(self, ctx, saved_tensors):
        self.saved_tensors, self.needs_input_grad = saved_tensors, ctx.needs_input_grad
        self.inplace = ctx.inplace


class Form:
    """The ops of one gated activation, for separate gate and up or for both in one tensor.

    Attributes:
        emits: whether the backward kernel gives the product with the bits of the forward kernel.
    """

    def __init__(self, family, packed, options, emits):
        suffix = "_packed" if packed else ""
        ops = torch.ops.liger
        self._forward = getattr(ops, f"{family}{suffix}").default
        self._backward = getattr(ops, f"{family}{suffix}_backward").default
        self._backward_ = getattr(ops, f"{family}{suffix}_backward_").default
        self._backward_product_ = None if packed else getattr(ops, f"{family}_backward_product_").default
        self._options, self.emits = options, emits
        self.backward = differentiable_once(family)(self._gradients)

    def product(self, *gate_up):
        # Callers are eager and record nothing, so autograd is bypassed.
        with _AutoDispatchBelowAutograd():
            return self._forward(*gate_up, *self._options)

    def _gradients(self, ctx, grad):
        weight, *gate_up = ctx.saved_tensors
        flat_grad = grad.reshape(-1, grad.shape[-1])
        grad_product = (flat_grad @ weight).view(*grad.shape[:-1], weight.shape[1])
        grads, product = self.gradients(ctx, grad_product, gate_up)
        grad_weight = flat_grad.t() @ product.reshape(-1, product.shape[-1])
        grad_bias = flat_grad.sum(0) if ctx.needs_input_grad[3] else None
        return None, None, grad_weight, grad_bias, *grads

    def gradients(self, ctx, grad_product, gate_up):
        """(gradients of gate_up, the product), in the memory of gate_up and grad_product where they may be.

        ``ctx``: of a node, with ``inplace`` as for :func:`gated_linear`.
        """
        # Detached: the gradients must not have the history of gate and up.
        gate_up = [t.detach() for t in gate_up]
        writes = ctx.inplace and may_write_saved(ctx, *gate_up)
        if not self.emits:
            product = self.product(*gate_up)
            if writes:
                self._backward_(grad_product, *gate_up, *self._options)
                return gate_up, product
            return self._backward(grad_product, *gate_up, False, *self._options)[: len(gate_up)], product
        if writes and self._backward_product_ is not None:
            self._backward_product_(grad_product, *gate_up, *self._options)
            return gate_up, grad_product
        *grads, product = self._backward(grad_product, *gate_up, True, *self._options)
        return grads, product


def applies(layer, gate_up):
    """True if :func:`gated_linear` may replace ``layer(product)`` of a plain, trained layer."""
    return (
        is_plain_linear(layer, gate_up[0])
        and layer.weight.requires_grad
        and gate_up[0].dtype == layer.weight.dtype
        and not is_traced(*gate_up)
        and all(t.requires_grad for t in gate_up)
    )


def gated_linear(form, layer, gate_up, inplace):
    """``layer(product of gate and up)``, see :func:`applies`.

    Args:
        form: the ops of the product.
        layer: the linear layer.
        gate_up: [gate, up], or [both side by side].
        inplace: whether the backward may overwrite gate and up, to which only the caller refers.
    """
    inplace = inplace and non_overlapping(gate_up) and not any(t.is_leaf for t in gate_up)
    saved = _SavedGated.apply(layer.weight, *gate_up)
    gate_up = saved if isinstance(saved, tuple) else (saved,)
    return _GatedLinear.apply(form, inplace, layer.weight, layer.bias, *gate_up)
