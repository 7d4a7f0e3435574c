# SPDX-License-Identifier: BSD-3-Clause
"""Linear layers with LoRA adapters that share an input, as one autograd node.

It saves the input once, and of each adapter its first product (rows, r). Autograd would save the input of
every adapter after a cast and after dropout, and add the gradients of the input pass by pass.
"""

import torch

from ..._core.modules.quantised import is_quantised
from ..._core.op.autograd import differentiable_once, refuse_second_derivative
from . import products
from .layer import compute_dtype
from .products import Low

OP = "LoRA linear"


def operands(parts):
    """The tensors of the parts that may train, as arguments of a node: bias, a and b of each."""
    return [tensor for part in parts for tensor in (part.bias, part.a, part.b)]


def trains(parts):
    return any(t is not None and t.requires_grad for t in operands(parts))


def by_part(needed):
    """(bias, a, b) of each part, from the flags of :func:`operands`."""
    return list(zip(needed[::3], needed[1::3], needed[2::3], strict=True))


def _factors(ctx):
    """The tensors on which the gradients depend, besides those that are saved."""
    if ctx.was_cast:
        refuse_second_derivative(OP)
    return [t for t in operands(ctx.parts) if t is not None and t.requires_grad]


def plain_weights(parts):
    """The weights that a node saves; hooks on saved tensors would return quantised ones as plain."""
    return [None if p.state is not None or is_quantised(p.weight) else p.weight for p in parts]


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts, x, *tensors):
        dtype = compute_dtype(x)
        operand = x.to(dtype)
        low = products.low_products(operand, parts)
        results = products.linear_products(operand, parts, low)
        needs = by_part(ctx.needs_input_grad[2:])
        ctx.parts, ctx.dtype, ctx.was_cast = parts, x.dtype, operand is not x
        ctx.saves_x = any(need_a for _, need_a, _ in needs)
        ctx.set_materialize_grads(False)
        weights = plain_weights(parts) if ctx.needs_input_grad[1] else [None] * len(parts)
        ctx.save_for_backward(operand if ctx.saves_x else None, *weights, *low.tensors())
        ctx.shape = x.shape
        return tuple(results) if len(results) > 1 else results[0]

    @staticmethod
    @differentiable_once(OP, _factors)
    def backward(ctx, *grads):
        parts, count = ctx.parts, len(ctx.parts)
        if all(grad is None for grad in grads):
            return (None,) * (2 + 3 * count)
        x, *others = ctx.saved_tensors
        weights = [p.weight if w is None else w for w, p in zip(others[:count], parts, strict=True)]
        low = Low.of_tensors(others[count:])
        like = next(grad for grad in grads if grad is not None)
        rows = ctx.shape[:-1].numel()
        grads = [
            like.new_zeros(rows, outputs(part)) if grad is None else products.rows_of(grad)
            for grad, part in zip(grads, parts, strict=True)
        ]
        needs = by_part(ctx.needs_input_grad[2:])
        ups = products.ups_of(grads, low)
        found = products.gradients(x, grads, ups, parts, low, weights, ctx.needs_input_grad[1], needs)
        grad_x = None if found.x is None else found.x.view(ctx.shape).to(ctx.dtype)
        return None, grad_x, *found.parts


def outputs(part):
    return part.weight.shape[0] if part.state is None else part.state.shape[0]


def linears(x, parts):
    """The results of linear layers with adapters for one input, a list."""
    if torch.is_grad_enabled() and (x.requires_grad or trains(parts)):
        results = _Linears.apply(parts, x, *operands(parts))
        return list(results) if len(parts) > 1 else [results]
    with torch.no_grad():
        operand = x.to(compute_dtype(x))
        return products.linear_products(operand, parts, products.low_products(operand, parts))
