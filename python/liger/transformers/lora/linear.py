# SPDX-License-Identifier: BSD-3-Clause
"""Linear layers with LoRA adapters that share an input, as one autograd node.

It saves the input once, of each adapter its first product (rows, r), and its factors themselves. Autograd
would save the input of every adapter after a cast and after dropout, and add the gradients of the input pass
by pass.
"""

import torch

from ..._core.op.autograd import differentiable_once, refuse_second_derivative
from . import products
from .exact import without_autocast

OP = "LoRA linear"


def operands(parts):
    """The tensors of the parts that may train, as arguments of a node: bias, a and b of each."""
    return [tensor for part in parts for tensor in (part.bias, part.a, part.b)]


def trains(parts):
    return any(t is not None and t.requires_grad for t in operands(parts))


def by_part(needed):
    """(bias, a, b) of each part, from the flags of :func:`operands`."""
    return list(zip(needed[::3], needed[1::3], needed[2::3], strict=True))


def _refuse_cast(ctx):
    """What is saved carries the history of the input, unless the input was cast."""
    if ctx.was_cast:
        refuse_second_derivative(OP)
    return ()


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts, x, *tensors):
        operand, taken = products.operands(x, parts)
        low = products.low_products(taken, parts)
        results = products.linear_products(operand, parts, low)
        ctx.parts, ctx.dtype, ctx.shape, ctx.was_cast = parts, x.dtype, x.shape, taken is not x
        ctx.set_materialize_grads(False)
        saves_x = any(need_a for _, need_a, _ in by_part(ctx.needs_input_grad[2:]))
        ctx.save_for_backward(
            taken if saves_x else None, *products.saved(parts, low, with_weights=ctx.needs_input_grad[1])
        )
        return tuple(results) if len(results) > 1 else results[0]

    @staticmethod
    @differentiable_once(OP, _refuse_cast)
    @without_autocast
    def backward(ctx, *grads):
        if all(grad is None for grad in grads):
            return (None,) * (2 + 3 * len(ctx.parts))
        x, *others = ctx.saved_tensors
        parts = ctx.parts
        weights, low = products.unsaved(parts, others)
        like = next(grad for grad in grads if grad is not None)
        rows = ctx.shape[:-1].numel()
        grads = [
            like.new_zeros(rows, outputs(part)) if grad is None else grad
            for grad, part in zip(grads, parts, strict=True)
        ]
        needs = by_part(ctx.needs_input_grad[2:])
        dtype = ctx.dtype if ctx.needs_input_grad[1] else None
        grad_x, others = products.gradients(x, grads, parts, weights, low, dtype, needs)
        return None, None if grad_x is None else grad_x.view(ctx.shape), *others


def outputs(part):
    return part.weight.shape[0] if part.state is None else part.state.shape[0]


def linears(x, parts):
    """The results of linear layers with adapters for one input, a list."""
    if torch.is_grad_enabled() and (x.requires_grad or trains(parts)):
        results = _Linears.apply(parts, x, *operands(parts))
        return list(results) if len(parts) > 1 else [results]
    with torch.no_grad():
        operand, taken = products.operands(x, parts)
        return products.linear_products(operand, parts, products.low_products(taken, parts))
