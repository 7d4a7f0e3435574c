# SPDX-License-Identifier: BSD-3-Clause
"""Gated experts with frozen weights and low-rank adapters, ``W[e] + second[e]^T first[e]^T``, without this
sum.

Each product with an adapter is two grouped GEMMs over a dimension of r columns, added to the product with the
frozen weight. Autograd saves what grouped_experts saves, and of each adapter its first product, (S + 1, r).
A quantised weight is read through a dense copy at each use, one weight at a time.
"""

import torch

from ..._core.op.autograd import differentiable_once
from .grouped_mm import multiply_group_columns, multiply_groups
from .op import grad_of_routing, matrices_of
from .routing import Routing, row_products, weights_of

OP = "grouped experts with LoRA"
# Bytes: a multiple of them is what the grouped GEMMs demand of a row.
_ALIGNMENT = 16


def adapter(first, second, scale, dtype):
    """The factors of an adapter as :func:`adapted_experts` takes them, with the scale in the second;
    differentiable.

    Args:
        first, second: (E, inputs, r) and (E, r, outputs), any strides and floating dtype.
    """
    pad = -first.shape[2] % (_ALIGNMENT // dtype.itemsize)
    first = torch.nn.functional.pad(first, (0, pad)).to(dtype)
    second = torch.nn.functional.pad(second * scale, (0, 0, 0, pad)).to(dtype)
    return first.contiguous(), second.contiguous()


def _add(rows, inputs, factors, ends):
    """Adds ``inputs first second`` to rows, and returns ``inputs first``, (rows, r); None without factors."""
    first, second = factors
    if first is None:
        return None
    low = multiply_groups(inputs, first, ends)
    rows.add_(multiply_groups(low, second, ends))
    return low


def _transposed(matrices):
    return None if matrices is None else matrices.transpose(1, 2)


def _through(grads, weight, factors, ends):
    """(gradient of the inputs of a product with an adapter, gradient of its first product or None)"""
    found = multiply_groups(grads, weight.transpose(1, 2), ends)
    return found, _add(found, grads, tuple(map(_transposed, reversed(factors))), ends)


class _AdaptedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, x, index, weights, weight, down, bias, down_bias, *factors):
        gate, is_transposed, (read, read_down) = options
        flat = x.reshape(-1, x.shape[-1])
        matrices = matrices_of(read(weight), is_transposed)
        routing = Routing(index.reshape(-1, index.shape[-1]), len(matrices))
        rows = routing.rows(flat)
        gate_up = multiply_groups(rows, matrices, routing.ends)
        del matrices
        low = _add(gate_up, rows, factors[:2], routing.ends)
        del rows
        routing.add_bias_(gate_up, bias)
        product = gate.product(gate_up)
        out = multiply_groups(product, matrices_of(read_down(down), is_transposed), routing.ends)
        low_down = _add(out, product, factors[2:], routing.ends)
        del product
        routing.add_bias_(out, down_bias)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, index, weights, weight, down, down_bias, *factors, gate_up, low, low_down)
        return routing.combine(out, weights_of(weights, index)).view(x.shape)

    @staticmethod
    @differentiable_once(OP)
    def backward(ctx, grad_y):
        if grad_y is None:
            return (None,) * 12
        x, index, weights, weight, down, down_bias, *rest = ctx.saved_tensors
        *factors, gate_up, low, low_down = rest
        gate, is_transposed, (read, read_down) = ctx.options
        need_x, _, need_weights = ctx.needs_input_grad[1:4]
        hidden = x.shape[-1]
        matrices = matrices_of(read_down(down), is_transposed)
        routing = Routing(
            index.reshape(-1, index.shape[-1]), len(matrices), weights.reshape(-1, weights.shape[-1])
        )
        row_weights, ends = routing.weights, routing.ends
        grad_flat = grad_y.reshape(-1, hidden)
        grad_rows, gate_up = routing.rows(grad_flat), gate_up.clone()
        # Without the routing weight, whose gradient needs it so.
        grad_product, up_down = _through(grad_rows, matrices, factors[2:], ends)
        del matrices
        kernels = gate.kernels(gate_up)
        if kernels is not None:
            sums = kernels.backward_(grad_product, gate_up, row_weights, gate)
            product = grad_product  # which the kernel has overwritten, with the routing weight
        else:
            product = gate.product(gate_up)
            sums = row_products(product, grad_product, row_weights.dtype) if need_weights else None
            product.mul_(row_weights)
            grad_product.mul_(row_weights)
            gate.backward_(grad_product, gate_up)
        del grad_product
        grads = [None] * 4
        if up_down is not None:
            grads[2] = multiply_group_columns(product, up_down, ends)
            grads[3] = multiply_group_columns((low_down * row_weights).to(low_down.dtype), grad_rows, ends)
        del product, grad_rows
        grad_weights = grad_x = None
        if need_weights:
            grad_weights = grad_of_routing(routing, grad_flat, sums, down_bias, weights)
        if need_x:
            found, up = _through(gate_up, matrices_of(read(weight), is_transposed), factors[:2], ends)
            grad_x = routing.combine(found).view(x.shape)
            del found
        elif factors[0] is not None:
            up = multiply_groups(gate_up, factors[1].transpose(1, 2), ends)
        if factors[0] is not None:
            grads[0] = multiply_group_columns(routing.rows(x.reshape(-1, hidden)), up, ends)
            grads[1] = multiply_group_columns(low, gate_up, ends)
        return None, grad_x, None, grad_weights, None, None, None, None, *grads


def adapted_experts(x, top_k_index, top_k_weights, parameters, adapters, gate, is_transposed, readers):
    """:func:`liger.grouped_experts` with frozen weights and adapters, in the dtype of x.

    Args:
        x, top_k_index, top_k_weights: as there; x has elements.
        parameters: gate_up_proj, down_proj, and their biases or None; they get no gradient.
        adapters: per weight the factors of :func:`adapter`, or None.
        gate: a :class:`.routing.Gate`.
        readers: per weight a function from the parameter to the weight of grouped_experts, which is not
            saved.
    """
    factors = [factor for pair in adapters for factor in (pair or (None, None))]
    return _AdaptedExperts.apply(
        (gate, is_transposed, readers), x, top_k_index, top_k_weights, *parameters, *factors
    )
