"""The gated MLP of language models a shard of tokens at a time: its activations never exist for all tokens.

The forward keeps x and, of as many tokens as the gradient of x and a budget make room for, gate and up; the backward
computes those of the others again, but not the down projection. Shards write their part of the result and of the
gradient of x in place, and weight gradients are summed over shards in float32 by the products themselves. The products
are those of torch; what lies between them is :func:`liger.swiglu` or
:func:`liger.geglu`, in the backend that serves it.
"""

import math

import torch
from torch.autograd.graph import increment_version

from ..backend import register_portable
from ._autocast import autocast_operands
from ._autograd import differentiable, differentiable_once, may_write_saved, wants_grad
from ._gated import GELU_NAMES
from ._products import product, write_linear
from ._tiles import lay_out, plan_tiles
from .rms_norm import accumulate_dtype

# --- kernels ------------------------------------------------------------------------------------------------------

# What torch calls the approximation of each activation that is GELU.
_APPROXIMATIONS = {name: approximate for approximate, name in GELU_NAMES.items()}


def _gated_product(gate, up, activation):
    if activation == "silu":
        return torch.ops.liger.swiglu.default(gate, up)
    return torch.ops.liger.geglu.default(gate, up, _APPROXIMATIONS[activation])


def _gated_backward_(grad_out, gate, up, activation, emit_product):
    """Writes the gradients over gate and up and, with ``emit_product``, the product over grad_out."""
    family, options = ("swiglu", ()) if activation == "silu" else ("geglu", (_APPROXIMATIONS[activation],))
    op = getattr(torch.ops.liger, f"{family}_backward_product_" if emit_product else f"{family}_backward_")
    op.default(grad_out, gate, up, *options)


def _rows(x):
    return math.prod(x.shape[:-1])


def _tiles(x, down_weight, num_shards, memory_budget, keep):
    hidden, intermediate = down_weight.shape
    return plan_tiles(_rows(x), hidden, intermediate, x.element_size(), num_shards, memory_budget, keep)


def _slices(start, stop, step):
    return [slice(first, min(first + step, stop)) for first in range(start, stop, max(step, 1))]


class _Projections:
    """gate and up: one or two linear layers that write the halves of one buffer (rows, 2I)."""

    def __init__(self, gate_weight, up_weight, gate_bias, up_bias, intermediate):
        self.intermediate = intermediate
        if up_weight is None:
            self.parts = [(gate_weight, gate_bias, slice(0, 2 * intermediate))]
        else:
            self.parts = [
                (gate_weight, gate_bias, slice(0, intermediate)),
                (up_weight, up_bias, slice(intermediate, 2 * intermediate)),
            ]

    def write(self, x, out):
        for weight, bias, columns in self.parts:
            write_linear(x, weight, bias, out[:, columns])

    def write_grad_x(self, grad_gate_up, out):
        (weight, _, columns), *others = self.parts
        torch.mm(grad_gate_up[:, columns], weight, out=out)
        for weight, _, columns in others:
            torch.addmm(out, grad_gate_up[:, columns], weight, out=out)

    def halves(self, gate_up):
        return gate_up[:, : self.intermediate], gate_up[:, self.intermediate :]


class _ParameterGradient:
    """The sum over shards of one parameter's gradient; nothing if it is not needed."""

    def __init__(self, like, needed, single):
        self.like, self.needed, self.sum = like, needed, None
        # A single product rounds its float32 sum itself.
        self.dtype = like.dtype if single and like.dim() > 1 else accumulate_dtype(like.dtype)

    def add_product(self, grad, inputs):
        if not self.needed:
            return
        first = self.sum is None
        if first:
            self.sum = self.like.new_empty(self.like.shape, dtype=self.dtype)
        product(grad.t(), inputs, self.sum, add=not first)

    def add_rows(self, grad):
        if self.needed:
            rows = grad.sum(0, dtype=self.dtype)
            self.sum = rows if self.sum is None else self.sum.add_(rows)

    def result(self):
        """The gradient, once: the float32 sum is let go."""
        total, self.sum = self.sum, None
        if total is None:
            return self.like.new_zeros(self.like.shape if self.needed else 0)
        return total.to(self.like.dtype)


class _Workplace:
    """Where the shards of a backward lie: each in memory of its own, for as long as it is needed."""

    def __init__(self, x, kept, intermediate, shard_rows):
        self.x, self.kept, self.columns = x, kept, 2 * intermediate
        self.rows, recomputed = x.shape[0], x.shape[0] - kept.shape[0]
        self.steps = [*_slices(0, kept.shape[0], shard_rows), *_slices(kept.shape[0], self.rows, shard_rows)]
        # The kept shards come first, so that their memory can be that of the others.
        roomy = kept.shape[0] >= min(shard_rows, recomputed)
        self.working = kept if roomy else x.new_empty(min(shard_rows, recomputed), self.columns)
        self.grad_x = None

    def gate_up(self, shard):
        """(memory of gate and up, whether they are there)"""
        if shard.start < self.kept.shape[0]:
            return self.kept[shard], True
        return self.working[: shard.stop - shard.start], False

    def hidden(self, shard):
        return self.x.new_empty(shard.stop - shard.start, self.columns // 2)

    def grad_x_of(self, shard):
        """Where the gradient of x of this shard goes; :meth:`settle` follows when gate and up are done with."""
        if self.grad_x is None:
            self.grad_x = torch.empty_like(self.x, memory_format=torch.contiguous_format)
        return self.grad_x[shard]

    def settle(self, shard):
        pass


class _SharedWorkplace:
    """The same in the memory of what was kept, of which the gradient of x becomes a part."""

    def __init__(self, x, kept, intermediate, tiles):
        rows, hidden = x.shape
        self.kept_rows, self.columns = kept.shape[0], 2 * intermediate
        self.memory, self.spare = kept.view(-1), x.new_empty(tiles.spare_rows * intermediate)
        self.grad_x = self.memory[: rows * hidden].view(rows, hidden)
        self.places = {step.start: step for step in lay_out(rows, hidden, intermediate, tiles)}
        self.steps = [slice(step.start, step.stop) for step in self.places.values()]

    def _block(self, memory, start, rows, columns):
        return memory[start : start + rows * columns].view(rows, columns)

    def gate_up(self, shard):
        step = self.places[shard.start]
        block = self._block(self.memory, step.gate_up, step.stop - step.start, self.columns)
        return block, step.start < self.kept_rows

    def hidden(self, shard):
        step, columns = self.places[shard.start], self.columns // 2
        memory, start = (self.spare, 0) if step.hidden is None else (self.memory, step.hidden)
        return self._block(memory, start, step.stop - step.start, columns)

    def _in_the_way(self, shard):
        """Whether the gradient would overwrite the gate and up that it is computed from, as at the beginning."""
        return shard.stop * self.grad_x.shape[1] > self.places[shard.start].gate_up

    def grad_x_of(self, shard):
        if not self._in_the_way(shard):
            return self.grad_x[shard]
        # The spare buffer is done with: it held the product of this shard.
        return self._block(self.spare, 0, shard.stop - shard.start, self.grad_x.shape[1])

    def settle(self, shard):
        if self._in_the_way(shard):
            self.grad_x[shard] = self.grad_x_of(shard)


def tiled_mlp_forward_kernel(
    x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, activation, num_shards, memory_budget, keep
):  # fmt: skip
    torch.ops.liger.check_tiled_mlp(
        x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, activation, num_shards, memory_budget
    )  # fmt: skip
    hidden, intermediate = down_weight.shape
    rows, tiles = _rows(x), _tiles(x, down_weight, num_shards, memory_budget, keep)
    projections = _Projections(gate_weight, up_weight, gate_bias, up_bias, intermediate)
    flat, y = x.reshape(rows, hidden), x.new_empty(rows, hidden)
    kept = x.new_empty(tiles.kept_rows, 2 * intermediate)
    # What will be kept is working memory until then. The product of a shard is no larger than the spare buffer of the
    # backward, so that this is not the peak.
    shard_rows = tiles.spare_rows or tiles.shard_rows
    working = kept if tiles.kept_rows else x.new_empty(min(shard_rows, rows), 2 * intermediate)
    for shard in _slices(tiles.kept_rows, rows, shard_rows) + _slices(0, tiles.kept_rows, shard_rows):
        recomputed = shard.start >= tiles.kept_rows
        gate_up = working[: shard.stop - shard.start] if recomputed else kept[shard]
        projections.write(flat[shard], gate_up)
        product = _gated_product(*projections.halves(gate_up), activation)
        write_linear(product, down_weight, down_bias, y[shard])
        del product
    return y.view(x.shape), kept


def _backward_over(
    grad_y, kept, x, gate_weight, up_weight, down_weight, gate_bias, up_bias, activation, num_shards, memory_budget,
    need_grad_x, need_grad_gate_weight, need_grad_up_weight, need_grad_down_weight, need_grad_gate_bias,
    need_grad_up_bias, need_grad_down_bias,
):  # fmt: skip
    """The gradients, that of x in the memory of ``kept``, which is overwritten."""
    hidden, intermediate = down_weight.shape
    rows, tiles = _rows(x), _tiles(x, down_weight, num_shards, memory_budget, True)
    projections = _Projections(gate_weight, up_weight, gate_bias, up_bias, intermediate)
    flat, grad_y = x.reshape(rows, hidden), grad_y.reshape(rows, hidden)
    if tiles.spare_rows and kept.shape[0] == tiles.kept_rows and need_grad_x:
        place = _SharedWorkplace(flat, kept, intermediate, tiles)
    else:
        place = _Workplace(flat, kept, intermediate, tiles.shard_rows)
    single, nothing = len(place.steps) == 1, x.new_empty(0)

    def gradient(parameter, needed):
        return _ParameterGradient(nothing if parameter is None else parameter, needed, single)

    grad_down = gradient(down_weight, need_grad_down_weight)
    grad_down_bias = gradient(x.new_empty(hidden), need_grad_down_bias)
    grad_weights = [gradient(gate_weight, need_grad_gate_weight), gradient(up_weight, need_grad_up_weight)]
    grad_biases = [gradient(gate_bias, need_grad_gate_bias), gradient(up_bias, need_grad_up_bias)]
    through_gate = need_grad_x or any(g.needed for g in (*grad_weights, *grad_biases))

    def add(place, shard):
        dy, xs = grad_y[shard], flat[shard]
        gate_up, there = place.gate_up(shard)
        if not there:
            projections.write(xs, gate_up)
        gate, up = projections.halves(gate_up)
        if not through_gate:
            grad_down.add_product(dy, _gated_product(gate, up, activation))
            return
        product = place.hidden(shard)
        torch.mm(dy, down_weight, out=product)  # until the next line, the gradient of the product
        _gated_backward_(product, gate, up, activation, need_grad_down_weight)
        grad_down.add_product(dy, product)
        del product
        if need_grad_x:
            projections.write_grad_x(gate_up, place.grad_x_of(shard))
        for (_, _, columns), grad_weight, grad_bias in zip(
            projections.parts, grad_weights, grad_biases, strict=False
        ):
            grad_weight.add_product(gate_up[:, columns], xs)
            grad_bias.add_rows(gate_up[:, columns])
        if need_grad_x:
            place.settle(shard)

    if through_gate or need_grad_down_weight:
        for shard in place.steps:
            add(place, shard)
    grad_down_bias.add_rows(grad_y)
    grad_x = nothing
    if need_grad_x:
        grad_x = (x.new_empty(flat.shape) if place.grad_x is None else place.grad_x).view(x.shape)
    # The working memory goes, and one sum at a time becomes a gradient.
    del place
    return grad_x, *(g.result() for g in (*grad_weights, grad_down, *grad_biases, grad_down_bias))


def tiled_mlp_backward_kernel(grad_y, kept, *rest):
    return _backward_over(grad_y, kept.clone(memory_format=torch.contiguous_format), *rest)


register_portable(
    {
        "tiled_mlp_forward": tiled_mlp_forward_kernel,
        "tiled_mlp_backward": tiled_mlp_backward_kernel,
    }
)


# --- fakes --------------------------------------------------------------------------------------------------------


@torch.library.register_fake("liger::tiled_mlp_forward")
def _(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, activation, num_shards, memory_budget, keep):  # fmt: skip # noqa: E501
    kept_rows = _tiles(x, down_weight, num_shards, memory_budget, True).kept_rows if keep else 0
    return x.new_empty(x.shape), x.new_empty(kept_rows, 2 * down_weight.shape[1])


def _fake_backward(
    grad_y, kept, x, gate_weight, up_weight, down_weight, gate_bias, up_bias, activation, num_shards, memory_budget,
    *needed,
):  # fmt: skip
    down_bias = x.new_empty(x.shape[-1])
    sources = (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    return tuple(x.new_empty(t.shape if need else (0,)) for t, need in zip(sources, needed, strict=True))


torch.library.register_fake("liger::tiled_mlp_backward")(_fake_backward)


# --- autograd -----------------------------------------------------------------------------------------------------

# The inputs of tiled_mlp_forward that come first are tensors, and each gets one gradient.
_TENSORS = 7


def _setup(ctx, inputs, output):
    x, gate_weight, up_weight, down_weight, gate_bias, up_bias, _ = inputs[:_TENSORS]
    kept = output[1]
    ctx.options = inputs[_TENSORS:-1]
    ctx.save_for_backward(kept, x, gate_weight, up_weight, down_weight, gate_bias, up_bias)
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)


@differentiable_once("tiled_mlp")
def _backward(ctx, grad_y, _grad_kept):
    result = [None] * len(ctx.needs_input_grad)
    if grad_y is None:
        return tuple(result)
    needed = ctx.needs_input_grad[:_TENSORS]
    saved = ctx.saved_tensors
    if may_write_saved(*saved):
        # The kept activations die with this node: their memory becomes that of gradients.
        increment_version(saved[0])
        grads = _backward_over(grad_y, saved[0].detach(), *saved[1:], *ctx.options, *needed)
    else:
        grads = torch.ops.liger.tiled_mlp_backward.default(grad_y, *saved, *ctx.options, *needed)
    result[:_TENSORS] = (grad if need else None for grad, need in zip(grads, needed, strict=True))
    return tuple(result)


_forward_op = differentiable(torch.ops.liger.tiled_mlp_forward.default, _setup, _backward)


# --- public API ---------------------------------------------------------------------------------------------------


def tiled_mlp(
    x, gate_weight, up_weight, down_weight, gate_bias=None, up_bias=None, down_bias=None, activation="silu",
    num_shards=None, memory_budget=None,
):  # fmt: skip
    """``(activation(x @ gate_weight.T) * (x @ up_weight.T)) @ down_weight.T``, a shard of tokens at a time.

    Nothing of the size (tokens, I) outlives a shard, except that gate and up of the last shards are kept where the
    budget allows. The backward computes gate and up of the other shards again. Every weight gets one gradient, summed
    over shards in float32 and rounded once. docs/tiled_mlp.md says how shards are chosen.

    Args:
        x: (..., H), float16, bfloat16, float32 or (where swiglu is served by plain torch) float64, any strides.
        gate_weight: (I, H), or (2I, H) with gate above up if ``up_weight`` is None; the dtype of x, as all weights.
        up_weight: (I, H) or None.
        down_weight: (H, I).
        gate_bias, up_bias, down_bias: (I,), (I,) and (H,), or None. Where gate_weight holds both projections,
            gate_bias is (2I,) and up_bias None.
        activation: ``"silu"``, ``"gelu_tanh"`` or ``"gelu"`` (the exact one).
        num_shards: into how many parts of equal size the tokens are cut, at most as many as there are tokens; without
            a budget, nothing is kept then. None lets the budget decide. In whole tiles of 128 tokens where possible.
        memory_budget: bytes held beyond inputs, result and gradients at the peak of the backward. None for
            ``LIGER_MEMORY_BUDGET``, else for float32 sums and the activations of 4096 tokens. A budget that is too
            small for shards of 128 tokens gives those.

    Under autocast all tensors are cast as ``torch.nn.functional.linear`` casts them.

    Returns:
        A contiguous tensor of the shape and dtype of x. Differentiable in x, weights and biases; no work is done for
        those that need no gradient.

    Raises:
        RuntimeError: mismatched shapes, dtypes or devices, an unknown activation, fewer than one or more shards than
            tokens, a budget that is not positive.

    Source: shards of tokens as in Arctic Long Sequence Training, arXiv 2506.13996.
    """
    tensors = autocast_operands(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    keep = any(wants_grad(*tensors))
    return _forward_op(*tensors, activation, num_shards, memory_budget, keep)[0]


_library = torch.library.Library("liger", "IMPL")
_library.impl("tiled_mlp", tiled_mlp, "CompositeImplicitAutograd")
