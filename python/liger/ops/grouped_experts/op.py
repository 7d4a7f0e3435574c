# SPDX-License-Identifier: BSD-3-Clause
"""The gated experts of a mixture of experts: dropless, by grouped GEMMs over the slots sorted by expert.

Autograd saves x, indices, weights and the result of the first GEMM (gate and up), and no other activation:
the backward gathers x again, recomputes the product of gate and up, and does not need the result of the
second GEMM. The GEMMs are torch's (grouped_mm.py) or, on compute capability 9.0, our own (sm90.py); the
activation is :func:`liger.swiglu` or :func:`liger.geglu`.
docs/guides/experts.md has the memory formula.
"""

import torch
from torch.autograd.graph import increment_version

from ..._core.math.dtypes import accumulate_dtype
from ..._core.math.matmul import product as wide_product
from ..._core.op.arguments import arguments
from ..._core.op.autocast import autocast_operands
from ..._core.op.autograd import (
    at_positions,
    differentiable,
    differentiable_once,
    may_write_saved,
    recording_tracer,
    wants_grad,
    without_base,
)
from ..._core.op.by_name import arguments_type, by_name
from ..._core.op.fakes import register_fake
from ..._core.op.registration import register_composite, register_portable
from ..._core.op.types import ExpertActivation
from . import sm90
from .arguments import OP, OPTIONS, check_experts, check_gradient, sizes_of
from .grouped_mm import multiply_group_columns, multiply_groups, sum_groups
from .routing import Gate, Routing, row_products, weights_of

# The first inputs of grouped_experts_forward are tensors; top_k_index, the second, has no gradient.
_TENSORS = 7
_INDEX = 1

# --- kernels ------------------------------------------------------------------------------------------------


def matrices_of(weight, is_transposed):
    """(E, inputs, outputs), a view."""
    return weight if is_transposed else weight.transpose(1, 2)


def _first_gemm(rows, routing, gate_up_proj, bias, is_transposed):
    gate_up = multiply_groups(rows, matrices_of(gate_up_proj, is_transposed), routing.ends)
    routing.add_bias_(gate_up, bias)
    return gate_up


@by_name(torch.ops.liger.grouped_experts_forward.default)
def grouped_experts_forward_kernel(a):
    x, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias = a[:_TENSORS]
    gate, is_transposed, keep = Gate.of_op(a), a.is_transposed, a.keep
    check_experts(a[:_TENSORS], a)
    experts, hidden, intermediate = sizes_of(down_proj, is_transposed)
    if top_k_index.numel() == 0:
        return x.new_empty(x.shape), x.new_zeros(1 if keep else 0, 2 * intermediate)
    flat = x.reshape(-1, hidden)
    index, weights = (t.reshape(-1, t.shape[-1]) for t in (top_k_index, top_k_weights))
    if sm90.unsupported(a) is None:
        routing = Routing(index, experts, weights)
        product, kept = sm90.gate_up(sm90.source(sm90.aligned(flat), routing, a), routing, a, keep)
        out = sm90.rows(product, routing, down_proj, is_transposed, down_proj_bias, routing.weights)
        return without_base(sm90.sum_choices(out, routing).view(x.shape)), kept
    routing = Routing(index, experts)
    gate_up = _first_gemm(routing.rows(flat), routing, gate_up_proj, gate_up_proj_bias, is_transposed)
    product = gate.product(gate_up)
    gate_up[-1:].zero_()  # the pad; rows of sentinels keep unspecified values, which have no effect
    kept = gate_up if keep else x.new_empty(0, 2 * intermediate)
    del gate_up
    out = multiply_groups(product, matrices_of(down_proj, is_transposed), routing.ends)
    del product
    routing.add_bias_(out, down_proj_bias)
    y = routing.combine(out, weights_of(weights, index))
    return without_base(y.view(x.shape)), kept


def _grad_of_matrices(inputs, grads, ends, is_transposed):
    """The gradient of a weight, in its own layout."""
    pair = (inputs, grads) if is_transposed else (grads, inputs)
    return multiply_group_columns(*pair, ends)


def grad_of_routing(routing, grad_y, sums, down_proj_bias, top_k_weights):
    """d loss / d top_k_weights = grad_y . (product W_down + bias), without the result of the second GEMM.

    ``sums``: of each row, over I, of product times gradient of the product.
    """
    wide = accumulate_dtype(grad_y.dtype)
    grad = routing.scatter(sums)
    if down_proj_bias is None:
        return grad.to(top_k_weights.dtype).view(top_k_weights.shape)
    of_biases = grad_y.new_empty(grad_y.shape[0], down_proj_bias.shape[0], dtype=wide)
    wide_product(grad_y, down_proj_bias.t(), of_biases)
    chosen = routing.experts.index_select(0, routing.inverse.view(-1)).view(routing.inverse.shape)
    biases = of_biases.gather(1, chosen)
    grad = grad + biases.masked_fill_(routing.inverse == len(routing.order), 0)
    return grad.to(top_k_weights.dtype).view(top_k_weights.shape)


def _gradient_shapes(a, new):
    """New tensors for the gradients, by the method of this name; empty ones where none is needed."""
    sources = a.x, a.top_k_weights, a.gate_up_proj, a.down_proj, a.gate_up_proj_bias, a.down_proj_bias
    return tuple(
        getattr(a.x if t is None else t, new)(t.shape if need else (0,))
        for t, need in zip(sources, a.needs_grad, strict=True)
    )


def _gradients(kept, a):
    """The gradients. ``kept``: a list with gate and up, which are overwritten; it is emptied to free them
    early."""
    if a.top_k_index.numel() == 0:
        return _gradient_shapes(a, "new_zeros")
    x, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias = a[2:9]
    need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias = a.needs_grad
    gate, grad_y, is_transposed = Gate.of_op(a), a.grad_y, a.is_transposed
    experts, hidden, _ = sizes_of(down_proj, is_transposed)
    flat, grad_flat = x.reshape(-1, hidden), grad_y.reshape(-1, hidden)
    index, weights = (t.reshape(-1, t.shape[-1]) for t in (top_k_index, top_k_weights))
    routing = Routing(index, experts, weights)
    row_weights = routing.weights
    grad_x, grad_gate_up, grad_down, grad_gate_up_bias, grad_down_bias = (x.new_empty(0) for _ in range(5))
    grad_weights = top_k_weights.new_empty(0)

    gate_up = kept.pop()
    if sm90.unsupported(a) is None:
        return _gradients_sm90(gate_up, a, routing, flat, grad_flat, row_weights)
    if gate_up.shape[0] == 0:
        gate_up = _first_gemm(routing.rows(flat), routing, gate_up_proj, gate_up_proj_bias, is_transposed)
    through_gate = need_x or need_gate_up or need_gate_up_bias
    grad_rows = routing.rows(grad_flat)
    if need_down_bias:
        grad_down_bias = sum_groups(grad_rows, routing.ends, row_weights[:, 0])
    if through_gate or need_weights:
        # Without the routing weight: the gradient of that weight needs it so.
        grad_product = multiply_groups(
            grad_rows, matrices_of(down_proj, is_transposed).transpose(1, 2), routing.ends
        )
    kernels = gate.kernels(gate_up) if through_gate or need_weights else None
    sums = product = None
    if kernels is not None:
        sums = kernels.backward_(grad_product, gate_up, row_weights, gate)
        product = grad_product  # which the kernel has overwritten
        del grad_product
    elif need_weights or need_down:
        product = gate.product(gate_up)
    if need_weights:
        if sums is None:
            sums = row_products(product, grad_product, row_weights.dtype)
        grad_weights = grad_of_routing(routing, grad_flat, sums, down_proj_bias, top_k_weights)
    if need_down:
        if kernels is None:
            # Either operand may have the routing weight; the smaller one costs less traffic.
            (product if product.shape[1] <= hidden else grad_rows).mul_(row_weights)
        grad_down = _grad_of_matrices(product, grad_rows, routing.ends, is_transposed)
    del product, grad_rows
    if through_gate and kernels is None:
        grad_product.mul_(row_weights)
        gate.backward_(grad_product, gate_up)
        del grad_product
    if need_gate_up_bias:
        grad_gate_up_bias = sum_groups(gate_up, routing.ends)
    if need_x:
        transposed = matrices_of(gate_up_proj, is_transposed).transpose(1, 2)
        grad_x = routing.combine(multiply_groups(gate_up, transposed, routing.ends)).view(x.shape)
    if need_gate_up:
        grad_gate_up = _grad_of_matrices(routing.rows(flat), gate_up, routing.ends, is_transposed)
    return grad_x, grad_weights, grad_gate_up, grad_down, grad_gate_up_bias, grad_down_bias


def _gradients_sm90(gate_up, a, routing, x, grad_y, row_weights):
    need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias = a.needs_grad
    grad_x, grad_gate_up, grad_down, grad_gate_up_bias, grad_down_bias = (x.new_empty(0) for _ in range(5))
    grad_weights = a.top_k_weights.new_empty(0)
    # Hooks on saved tensors return any strides.
    x, grad_y, gate_up = map(sm90.aligned, (x, grad_y, gate_up))
    if need_down_bias:
        grad_down_bias = sum_groups(routing.rows(grad_y), routing.ends, row_weights[:, 0])
    if any(a.needs_grad[:-1]):
        if gate_up.shape[0] == 0:
            gate_up = sm90.gate_up(sm90.source(x, routing, a), routing, a, True)[1]
        grads = sm90.source(grad_y, routing, a)
        product, sums = sm90.grad_product_(grads, routing, a, row_weights, gate_up)
        if need_weights:
            grad_weights = grad_of_routing(routing, grad_y, sums, a.down_proj_bias, a.top_k_weights)
        if need_down:
            grad_down = sm90.grad_matrix(grads, product, routing, a.is_transposed)
        del product, grads
    if need_gate_up_bias:
        grad_gate_up_bias = sum_groups(gate_up, routing.ends)
    if need_x:
        grad_rows = sm90.rows(gate_up, routing, a.gate_up_proj, not a.is_transposed)
        grad_x = sm90.sum_choices(grad_rows, routing).view(a.x.shape)
        del grad_rows
    if need_gate_up:
        rows = sm90.source(x, routing, a)
        grad_gate_up = sm90.grad_matrix(rows, gate_up, routing, not a.is_transposed)
    return grad_x, grad_weights, grad_gate_up, grad_down, grad_gate_up_bias, grad_down_bias


_backward_op = torch.ops.liger.grouped_experts_backward.default


@by_name(_backward_op)
def grouped_experts_backward_kernel(a):
    check_gradient(a)
    return _gradients([a.kept.clone()], a)


register_portable(grouped_experts_forward_kernel, grouped_experts_backward_kernel)


# --- fakes --------------------------------------------------------------------------------------------------


@register_fake("liger::grouped_experts_forward")
@by_name(torch.ops.liger.grouped_experts_forward.default)
def _(a):
    columns = 2 * sizes_of(a.down_proj, a.is_transposed)[2]
    return a.x.new_empty(a.x.shape), a.x.new_empty(a.top_k_index.numel() + 1 if a.keep else 0, columns)


@register_fake("liger::grouped_experts_backward")
@by_name(_backward_op)
def _(a):
    return _gradient_shapes(a, "new_empty")


# --- autograd -----------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    ctx.options = inputs[_TENSORS:-1]
    ctx.save_for_backward(output[1], *inputs[:_TENSORS])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


@differentiable_once(OP)
def _backward(ctx, grad_y, _grad_kept):
    count = len(ctx.needs_input_grad)
    if grad_y is None:
        return (None,) * count
    differentiable_inputs = [i for i in range(_TENSORS) if i != _INDEX]
    needed = [ctx.needs_input_grad[i] for i in differentiable_inputs]
    saved = ctx.saved_tensors
    # The formula reads the number of tokens of each expert, which a meta tensor does not have; the fake does
    # not. A tracer would record what the formula writes and which kernels it has chosen.
    if may_write_saved(ctx, *saved) and not grad_y.is_meta and recording_tracer() is None:
        # This node is the last user of gate and up: their gradients overwrite them, and their memory is freed
        # early.
        increment_version(saved[:1])
        kept, saved = [saved[0].detach()], saved[1:]
        ctx.maybe_clear_saved_tensors()
        arguments = arguments_type(_backward_op)(grad_y, None, *saved, *ctx.options, *needed)
        grads = _gradients(kept, arguments)
    else:
        grads = _backward_op(grad_y, *saved, *ctx.options, *needed)
    return at_positions(count, differentiable_inputs, grads, needed)


_forward_op = differentiable(torch.ops.liger.grouped_experts_forward.default, _setup, _backward)


# --- public API ---------------------------------------------------------------------------------------------


@arguments(**OPTIONS)
def grouped_experts(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    gate_up_proj_bias: torch.Tensor | None = None,
    down_proj_bias: torch.Tensor | None = None,
    activation: ExpertActivation = "silu",
    is_transposed: bool = False,
    is_interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
    recompute: bool = False,
) -> torch.Tensor:
    """The weighted sum, over the K experts of each token, of gated MLPs: dropless, with grouped GEMMs.

    ``sum over k of w[k] * (down[e] (activation(gate) * up) + down_bias[e])`` with ``e = top_k_index[k]`` and
    gate and up from ``gate_up_proj[e] x + gate_up_proj_bias[e]``. Gate and up, their product and the row of
    each expert are computed in float32 and rounded to the dtype of x; so is the sum of these rows.

    Args:
        x: (..., H), float16, bfloat16 or float32 (float64 on the torch backend of swiglu and geglu), any
            strides.
        top_k_index: (..., K), int64 or int32: the experts of each token. An index of E or more is a sentinel,
            as expert parallelism uses for experts of other ranks: it adds zero, and its weight gets the
            gradient zero.
        top_k_weights: (..., K), any floating dtype: the routing weights.
        gate_up_proj: (E, 2I, H), or (E, H, 2I) with ``is_transposed``; the dtype of x, as all parameters.
        down_proj: (E, H, I), or (E, I, H) with ``is_transposed``.
        gate_up_proj_bias, down_proj_bias: (E, 2I) and (E, H), or None.
        activation: ``"silu"``, ``"gelu_tanh"``, ``"gelu"`` (the exact one), each times up; or ``"gpt_oss"``:
            ``gate * sigmoid(alpha * gate) * (up + 1)``.
        is_transposed: the layout of both weights.
        is_interleaved: gate and up are the even and odd outputs of gate_up_proj; else the first and second
            half.
        alpha: of ``"gpt_oss"``.
        limit: before the activation, gate is clamped to at most limit, and up to at least -limit and at most
            limit. None: no clamp.
        recompute: the backward repeats the first GEMM, so that no activation is saved. Set it if the
            activations do not fit.

    Autograd saves its arguments and, unless ``recompute``, gate and up: (number of choices + 1) * 2I
    elements. Experts without tokens get gradients that are exactly zero, and their parameters have no effect.
    Under autocast x and the parameters are cast as ``torch.nn.functional.linear`` casts them; top_k_weights
    are not.

    Returns:
        A contiguous tensor with the shape and dtype of x. Differentiable once, in x, top_k_weights, weights
        and biases.

    Raises:
        TypeError: an argument of another type.
        ValueError: an unknown activation, an option out of range.
        RuntimeError: mismatched shapes, dtypes or devices; on a CPU a negative index, which on a GPU gives
            NaN.

    Example::

        >>> gate_up_proj, down_proj = torch.randn(8, 2 * 192, 64), torch.randn(8, 64, 192)
        >>> x, top_k_index, top_k_weights = torch.randn(10, 64), torch.randint(8, (10, 2)), torch.rand(10, 2)
        >>> y = liger.grouped_experts(x, top_k_index, top_k_weights, gate_up_proj, down_proj)

    Sources: Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", arXiv 2211.15841;
    for ``"gpt_oss"``: "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925.
    """
    x, *parameters = autocast_operands(x, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias)
    keep = not recompute and any(wants_grad(x, top_k_weights, *parameters))
    limit = limit if limit is None else float(limit)
    options = activation, is_transposed, is_interleaved, float(alpha), limit
    return _forward_op(x, top_k_index, top_k_weights, *parameters, *options, keep)[0]


register_composite(grouped_experts)
