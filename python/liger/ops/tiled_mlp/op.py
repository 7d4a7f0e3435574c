# SPDX-License-Identifier: BSD-3-Clause
"""The gated MLP of language models, one shard of tokens at a time, so that its activations never exist for
all tokens.

The forward saves x, and gate and up of as many tokens as the budget allows. The backward recomputes gate and
up of the other tokens, but not the down projection. Shards write their rows of the result and of the gradient
of x in place, and the GEMMs sum weight gradients over shards in float32. A backward that needs less memory
without shards, because it has no such sums, runs as one shard. The GEMMs are torch's; the activation is
:func:`liger.swiglu` or :func:`liger.geglu`.
"""

import math
from functools import partial

import torch
from torch.autograd.graph import increment_version

from ..._core.math.matmul import write_linear
from ..._core.op.arguments import BYTES, INTEGER, arguments, choice
from ..._core.op.autocast import autocast_operands
from ..._core.op.autograd import differentiable, differentiable_once, is_traced, may_write_saved, wants_grad
from ..._core.op.by_name import arguments_type, by_name
from ..._core.op.fakes import register_fake
from ..._core.op.registration import register_composite, register_portable
from ..._core.op.types import Activation
from ..._core.runtime.memory_budget import check_budget_variable
from .plan import Problem, block_columns, forward_step, plan_tiles
from .shards import (
    ParameterGradient,
    Projections,
    ShardBuffers,
    SharedShardBuffers,
    gated_backward_,
    gated_product,
    slices,
)

_FORWARD = torch.ops.liger.tiled_mlp_forward.default
_BACKWARD = torch.ops.liger.tiled_mlp_backward.default

# --- kernels ------------------------------------------------------------------------------------------------


def _rows(x):
    return math.prod(x.shape[:-1])


def _problem(x, up_weight, down_weight):
    return Problem(_rows(x), *down_weight.shape, x.element_size(), up_weight is None)


def _new_kept(x, problem, tiles):
    """(memory for the kept gate and up side by side, empty), or (for gate, for up) if a single shard computes
    them from two weights: then the backward can free each on its own. ``tiles`` None: no activations are
    kept."""
    rows, half = 0 if tiles is None else tiles.kept_rows, problem.intermediate
    if not problem.packed and 0 < rows == problem.rows and tiles.has_one(rows):
        return x.new_empty(rows, half), x.new_empty(rows, half)
    return x.new_empty(rows, 2 * half), x.new_empty(0, half)


@by_name(_FORWARD)
def tiled_mlp_forward_kernel(a):
    x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, activation = a[:8]
    torch.ops.liger.check_tiled_mlp(*a[:10])
    problem = _problem(x, up_weight, down_weight)
    rows, hidden, intermediate = problem[:3]
    tiles = plan_tiles(problem, a.num_shards, a.memory_budget, a.keep)
    projections = Projections(gate_weight, up_weight, gate_bias, up_bias, intermediate)
    # Results of a node that are views could not be written in place.
    result = x.new_empty(x.shape)
    flat, y = x.reshape(rows, hidden), result.view(rows, hidden)
    kept, kept_up = _new_kept(x, problem, tiles)
    results_kept = [kept, kept_up] if kept_up.shape[0] else projections.results_in(kept)
    step = forward_step(problem, tiles)
    # The memory of the kept activations is the working memory of the other shards, which run first.
    working = kept if tiles.kept_rows else x.new_empty(min(step, rows), 2 * intermediate)
    for shard in slices(tiles.kept_rows, rows, step) + slices(0, tiles.kept_rows, step):
        if shard.start < tiles.kept_rows:
            results = [kept_rows[shard] for kept_rows in results_kept]
        else:
            results = projections.results_in(working[: shard.stop - shard.start])
        projections.write(flat[shard], results)
        product = gated_product(*projections.gate_and_up(results), activation)
        write_linear(product, down_weight, down_bias, y[shard])
        del product
    return result, kept, kept_up


class _Backward:
    """One backward: the inputs that its shards share, and the gradients of the parameters."""

    def __init__(self, x, grad_y, projections, down_weight, down_bias, activation, needed, single):
        self.x, self.grad_y, self.projections = x, grad_y, projections
        self.down_weight, self.activation = down_weight, activation
        self.need_grad_x, *needed = needed
        empty = x.new_empty(0)
        (gate_weight, gate_bias), (up_weight, up_bias) = (*projections.layers, (None, None))[:2]
        parameters = (gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
        self.parameters = [
            ParameterGradient(empty if parameter is None else parameter, need, single)
            for parameter, need in zip(parameters, needed, strict=True)
        ]
        *weights, self.grad_down_weight, gate_bias, up_bias, grad_down_bias = self.parameters
        self.grads = list(zip(weights, (gate_bias, up_bias), strict=True))
        grad_down_bias.add_rows(grad_y)
        self.through_gate = self.need_grad_x or any(g.needed for pair in self.grads for g in pair)

    def _product(self, grad_y, down_weight, gate, up, hidden):
        """The product of gate and up, in the memory ``hidden()``. Overwrites gate and up with their gradients
        if those are needed."""
        if not self.through_gate:
            return gated_product(gate, up, self.activation)
        product = hidden()
        torch.mm(
            grad_y, down_weight, out=product
        )  # the gradient of the product, which the next line overwrites
        gated_backward_(product, gate, up, self.activation, self.grad_down_weight.needed)
        return product

    def _add(self, grad, x, pair):
        grad_weight, grad_bias = pair
        grad_weight.add_product(grad, x)
        grad_bias.add_rows(grad)

    def shard(self, buffers, shard):
        grad_y, x = self.grad_y[shard], self.x[shard]
        gate_up, kept = buffers.gate_up(shard)
        results = self.projections.results_in(gate_up)
        if not kept:
            self.projections.write(x, results)
        halves = self.projections.gate_and_up(results)
        product = self._product(grad_y, self.down_weight, *halves, partial(buffers.hidden, shard))
        self.grad_down_weight.add_product(grad_y, product)
        del product
        if self.need_grad_x:
            self.projections.write_grad_x(results, buffers.grad_x_of(shard))
        for grad, pair in zip(results, self.grads, strict=False):
            self._add(grad, x, pair)
        if self.need_grad_x:
            buffers.store_grad_x(shard)

    def _through_hidden(self, results, width):
        gate, up = self.projections.gate_and_up(results)
        for columns in slices(0, gate.shape[1], width):
            halves = gate[:, columns], up[:, columns]
            block = partial(gate.new_empty, halves[0].shape)
            product = self._product(self.grad_y, self.down_weight[:, columns], *halves, block)
            self.grad_down_weight.write_columns(self.grad_y, product, columns)
            del product

    def one_shard(self, results, width):
        """A backward without shards, ``width`` columns of the hidden gradient at a time. Returns the gradient
        of x, or None.

        Empties ``results``, so that the memory of gate is free before the gradient of up_weight is allocated.
        """
        self._through_hidden(results, width)
        grad_x = None
        if self.need_grad_x:
            grad_x = self.x.new_empty(self.x.shape)
            self.projections.write_grad_x(results, grad_x)
        for pair in self.grads[: len(results)]:
            self._add(results.pop(0), self.x, pair)
        return grad_x


def _results_of_one_shard(kept, x, projections):
    """The list of gate and up of all rows, kept or recomputed. Only this list may refer to them, because
    :meth:`_Backward.one_shard` frees them early."""
    if kept[1].shape[0]:
        return kept
    if kept[0].shape[0] == x.shape[0]:
        return projections.results_in(kept[0])
    results = projections.new_results(x)
    projections.write(x, results)
    return results


def _gradients(kept, a):
    """The gradients. ``kept``: the list of the activations that the forward kept. They are overwritten, and a
    backward of one shard empties the list to free them early."""
    grad_y, x, gate_weight, up_weight, down_weight = a.grad_y, a.x, a.gate_weight, a.up_weight, a.down_weight
    gate_bias, up_bias, activation, needed = a.gate_bias, a.up_bias, a.activation, a.needs_grad
    problem = _problem(x, up_weight, down_weight)
    rows, hidden, intermediate = problem[:3]
    tiles = plan_tiles(problem, a.num_shards, a.memory_budget)
    projections = Projections(gate_weight, up_weight, gate_bias, up_bias, intermediate)
    # LIGER_MEMORY_BUDGET may have changed since the forward, so the kept activations decide.
    single = tiles.has_one(rows) or kept[1].shape[0] > 0
    flat, down_bias = x.reshape(rows, hidden), x.new_empty(hidden)
    need_grad_x, grad_x = needed[0], None
    work = _Backward(
        flat, grad_y.reshape(rows, hidden), projections, down_weight, down_bias, activation, needed, single
    )
    if not (work.through_gate or work.grad_down_weight.needed):
        pass  # No further gradient is needed.
    elif single:
        grad_x = work.one_shard(_results_of_one_shard(kept, flat, projections), block_columns(problem))
    else:
        if tiles.spare_rows and kept[0].shape[0] == tiles.kept_rows and need_grad_x:
            buffers = SharedShardBuffers(flat, kept[0], intermediate, tiles)
        else:
            buffers = ShardBuffers(flat, kept[0], intermediate, tiles.shard_rows)
        for shard in buffers.steps:
            work.shard(buffers, shard)
        grad_x = buffers.grad_x
        # Frees the working memory before the sums are converted to gradients, one at a time.
        del buffers
    grad_x = x.new_empty(0) if grad_x is None else grad_x.view(x.shape)
    return grad_x, *(gradient.result() for gradient in work.parameters)


@by_name(_BACKWARD)
def tiled_mlp_backward_kernel(a):
    copies = [t.clone(memory_format=torch.contiguous_format) for t in (a.kept, a.kept_up)]
    return _gradients(copies, a)


register_portable(tiled_mlp_forward_kernel, tiled_mlp_backward_kernel)


# --- fakes --------------------------------------------------------------------------------------------------


@register_fake("liger::tiled_mlp_forward")
@by_name(_FORWARD)
def _(a):
    problem = _problem(a.x, a.up_weight, a.down_weight)
    # Planned only if needed, because a plan adds guards for a dynamic number of tokens.
    may_keep = a.keep and (a.num_shards is None or a.memory_budget is not None)
    tiles = plan_tiles(problem, a.num_shards, a.memory_budget) if may_keep else None
    return a.x.new_empty(a.x.shape), *_new_kept(a.x, problem, tiles)


@register_fake("liger::tiled_mlp_backward")
@by_name(_BACKWARD)
def _(a):
    down_bias = a.x.new_empty(a.x.shape[-1])
    sources = (a.x, a.gate_weight, a.up_weight, a.down_weight, a.gate_bias, a.up_bias, down_bias)
    needed = zip(sources, a.needs_grad, strict=True)
    return tuple(a.x.new_empty(t.shape if need else (0,)) for t, need in needed)


# --- autograd -----------------------------------------------------------------------------------------------

# The first inputs of tiled_mlp_forward are tensors, each with one gradient.
_TENSORS = 7


def _setup(ctx, inputs, output):
    x, gate_weight, up_weight, down_weight, gate_bias, up_bias, _ = inputs[:_TENSORS]
    kept = output[1:]
    ctx.options = inputs[_TENSORS:-1]
    ctx.save_for_backward(*kept, x, gate_weight, up_weight, down_weight, gate_bias, up_bias)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)


@differentiable_once("tiled_mlp")
def _backward(ctx, grad_y, _grad_kept, _grad_kept_up):
    result = [None] * len(ctx.needs_input_grad)
    if grad_y is None:
        return tuple(result)
    needed = ctx.needs_input_grad[:_TENSORS]
    saved = ctx.saved_tensors
    if may_write_saved(ctx, *saved):
        # This node is the last user of the kept activations, so gradients reuse their memory. To free a part
        # of it early, only the list ``kept`` may refer to it.
        increment_version(saved[:2])
        kept, saved = [t.detach() for t in saved[:2]], saved[2:]
        ctx.maybe_clear_saved_tensors()
        arguments = arguments_type(_BACKWARD)(grad_y, None, None, *saved, *ctx.options, *needed)
        grads = _gradients(kept, arguments)
    else:
        grads = _BACKWARD(grad_y, *saved, *ctx.options, *needed)
    result[:_TENSORS] = (grad if need else None for grad, need in zip(grads, needed, strict=True))
    return tuple(result)


_forward_op = differentiable(_FORWARD, _setup, _backward)


def _check_shards(x, gate_weight, num_shards):
    """Raises ValueError for a number of shards out of range. The op also refuses it, and an x of another
    size."""
    tokens = x.shape[:-1].numel()
    if x.shape[-1:] == gate_weight.shape[-1:] and not 1 <= num_shards <= max(tokens, 1):
        raise ValueError(
            f"tiled_mlp: num_shards is {num_shards}, expected at least 1 and at most the number of tokens, {tokens}"
        )


# --- public API ---------------------------------------------------------------------------------------------


@arguments(optional=("up_weight",), activation=choice(Activation), num_shards=INTEGER, memory_budget=BYTES)
def tiled_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor | None,
    down_weight: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    num_shards: int | None = None,
    memory_budget: int | None = None,
) -> torch.Tensor:
    """``(activation(x @ gate_weight.T) * (x @ up_weight.T)) @ down_weight.T``, one shard of tokens at a time.

    Activations of size (tokens, I) exist for one shard only, except that the forward keeps gate and up of as
    many tokens as the budget allows. The backward recomputes them for the other tokens. Every weight gets one
    gradient, summed over shards in float32 and rounded once. docs/guides/tiled_mlp.md says how shards are
    chosen.

    Args:
        x: (..., H), float16, bfloat16 or float32 (float64 on the torch backend of swiglu and geglu), any
            strides.
        gate_weight: (I, H), or (2I, H) with gate above up if ``up_weight`` is None; the dtype of x, as all
            weights.
        up_weight: (I, H) or None.
        down_weight: (H, I).
        gate_bias, up_bias, down_bias: (I,), (I,) and (H,), or None. Where gate_weight holds both projections,
            gate_bias is (2I,) and up_bias None.
        activation: ``"silu"``, ``"gelu_tanh"`` or ``"gelu"`` (the exact one).
        num_shards: number of shards of equal size, in whole tiles of 128 tokens where possible; at most the
            number of tokens. Without a budget the forward then keeps no activations. The backward uses one
            shard if that needs no more memory. None: the budget decides.
        memory_budget: bytes at the peak of the backward beyond inputs, result and gradients. None:
            ``LIGER_MEMORY_BUDGET`` or, if that is unset, room for the float32 sums and the activations of
            4096 tokens. If the budget is too small for shards of 128 tokens, it is exceeded: by these shards,
            or by one shard if that needs no more memory. Raise it to keep more activations, so that the
            backward recomputes less.

    Under autocast all tensors are cast as ``torch.nn.functional.linear`` casts them.

    Returns:
        A contiguous tensor with the shape and dtype of x. Differentiable once, in x, weights and biases. The
        GEMM of a gradient that is not needed is skipped.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: mismatched shapes, dtypes or devices.
        ValueError: an unknown activation, a number of shards below 1 or above the number of tokens, a budget
            that is not positive, a LIGER_MEMORY_BUDGET that is not a positive number of bytes.

    Example::

        >>> gate, up, down = torch.randn(192, 64), torch.randn(192, 64), torch.randn(64, 192)
        >>> y = liger.tiled_mlp(torch.randn(2, 1000, 64), gate, up, down)

    Source: shards of tokens as in Arctic Long Sequence Training, arXiv 2506.13996.
    """
    check_budget_variable(memory_budget)
    if num_shards is not None and not is_traced(x):
        _check_shards(x, gate_weight, num_shards)
    tensors = autocast_operands(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    keep = any(wants_grad(*tensors))
    return _forward_op(*tensors, activation, num_shards, memory_budget, keep)[0]


register_composite(tiled_mlp)
