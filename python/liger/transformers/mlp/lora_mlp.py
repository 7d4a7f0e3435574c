# SPDX-License-Identifier: BSD-3-Clause
"""A gated MLP with LoRA adapters as one node that saves x, gate, up and each adapter's product (rows, r).

The backward kernel of the gated product also writes the product, from which the gradient of the adapter of
down_proj follows. Frozen weights get no gradient.
"""

import torch

from ..._core.op.autograd import differentiable_once, is_traced, non_overlapping, refuse_second_derivative
from ..lora import products
from ..lora.exact import without_autocast
from ..lora.layer import base_part, is_lora, part_of
from ..lora.linear import by_part, operands, trains
from ..recipe.classes import is_called_plainly
from ..recipe.reuse import is_plain_linear

OP = "gated MLP with LoRA"


def _part(layer, x):
    """The operands of a projection with or without an adapter; None if it must be called."""
    if is_lora(layer):
        return part_of(layer, x) if is_called_plainly(layer, x) else None
    return base_part(layer, x) if is_plain_linear(layer, x) and not layer.weight.requires_grad else None


def parts_of(inputs, down, x):
    """The operands of all projections, down_proj last, if they are one node here, else None.

    That is: at least one has an adapter that trains, none has to be called for its hooks or its kind, and
    autograd records.
    """
    layers = (*inputs, down)
    # Models without adapters are asked this at every call.
    if not torch.is_grad_enabled() or not any("lora_A" in getattr(layer, "_modules", ()) for layer in layers):
        return None
    if is_traced(x):
        return None
    parts = [_part(layer, x) for layer in inputs]
    if any(part is None for part in parts) or len({(part.dtype, part.result) for part in parts}) > 1:
        return None
    dtype = parts[0].result
    parts.append(_part(down, x if dtype == x.dtype else x.new_empty(0, dtype=dtype)))
    if parts[-1] is None or not trains(parts):
        return None
    return parts if len({part.a.dtype for part in parts if part.a is not None}) == 1 else None


class _Saved(torch.autograd.Function):
    """Saves the tensors for the backward of :class:`_GatedLora`: checkpointing stops its recomputation here,
    before the product of down_proj.

    ``anchor``: a tensor that trains, with which the result is recorded.
    """

    @staticmethod
    def forward(ctx, anchor, x, *tensors):
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return None, grad if ctx.needs_input_grad[1] else None, *(None,) * ctx.count


class _GatedLora(torch.autograd.Function):
    """``given``: what the forward has computed before this node; the node empties it."""

    @staticmethod
    def forward(ctx, given, x, *tensors):
        product, low_down = given.pop("product"), given["lows"][1]
        (result,) = products.linear_products(product, given["parts"][-1:], low_down)
        for name in ("form", "inplace", "parts", "need_x"):
            setattr(ctx, name, given.pop(name))
        given.clear()
        ctx.saved, ctx.shape, ctx.dtype = x.grad_fn, x.shape, x.dtype
        return result

    @staticmethod
    def backward(ctx, grad):
        return _backward(_Context(ctx), grad)


class _Context:
    """The context of the node with the tensors that the other node has saved, unpacked once."""

    def __init__(self, ctx):
        self.saved_tensors = ctx.saved.saved_tensors
        for name in ("form", "inplace", "parts", "need_x", "needs_input_grad", "shape", "dtype"):
            setattr(self, name, getattr(ctx, name))


def _refuse_cast(ctx):
    if ctx.saved_tensors[0] is not None and ctx.saved_tensors[0].dtype != ctx.dtype:
        refuse_second_derivative(OP)
    return ()


@differentiable_once(OP, _refuse_cast)
@without_autocast
def _backward(ctx, grad):
    count = len(ctx.parts) - 1
    x, *rest = ctx.saved_tensors
    gate_up, rest = rest[:count], rest[count:]
    inputs, down = ctx.parts[:count], ctx.parts[count:]
    end = products.count_saved(inputs)
    weights, low = products.unsaved(inputs, rest[:end])
    weights_of_down, low_down = products.unsaved(down, rest[end:])
    needs = by_part(ctx.needs_input_grad[2:])
    # The gradient of the product first, since the product takes its place.
    flat = products.rows_of_grads([grad], down, low_down)
    up, of_b = products.of_products(flat, down, low_down, needs[count:])
    grad_product = products.of_input(flat, up, down, weights_of_down, low_down, gate_up[0].dtype)
    grad_product = grad_product.view(*grad.shape[:-1], grad_product.shape[-1])
    grads, product = ctx.form.gradients(ctx, grad_product, gate_up)
    del grad_product
    of_down = products.of_parameters(product, flat, up, of_b, down, low_down, needs[count:])
    del product
    dtype = ctx.dtype if ctx.need_x else None
    grad_x, of_inputs = products.gradients(x, grads, inputs, weights, low, dtype, needs[:count])
    return None, None if grad_x is None else grad_x.view(ctx.shape), *of_inputs, *of_down


def gated_lora(form, parts, x, inplace):
    """``down(product of gate and up)``, see :func:`parts_of`. It takes the arguments of
    :func:`.gated_linear.gated_linear`, but parts and x."""
    tensors = operands(parts)
    with torch.no_grad():
        operand, taken = products.operands(x, parts[:-1])
        low = products.low_products(taken, parts[:-1])
        gate_up = products.linear_products(operand, parts[:-1], low)
        del operand
        product, taken_by_down = products.operands(form.product(*gate_up), parts[-1:])
        low_down = products.low_products(taken_by_down, parts[-1:])
        del taken_by_down
    given = {
        "form": form,
        "inplace": inplace and non_overlapping(gate_up),
        "parts": parts,
        "need_x": x.requires_grad,
        "product": product,
        "lows": (low, low_down),
    }
    saves_x = any(part.a is not None and part.a.requires_grad for part in parts[:-1])
    anchor = next(t for t in tensors if t is not None and t.requires_grad)
    through = _Saved.apply(
        anchor,
        x,
        taken if saves_x else None,
        *gate_up,
        *products.saved(parts[:-1], low),
        *products.saved(parts[-1:], low_down),
    )
    del gate_up, product, taken
    return _GatedLora.apply(given, through, *tensors)
