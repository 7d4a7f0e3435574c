"""The gated MLP of language models a shard of tokens at a time: its activations never exist for all tokens.

The forward keeps x and, of as many shards as a budget allows, gate and up; the backward computes gate and up of the
others again, but not the down projection. Shards write their part of the result and of the gradient of x in place, and
weight gradients are summed over shards in float32 by the products themselves. The products are those of torch; what
lies between them is :func:`liger.swiglu`, in the backend that serves it.
"""

import math

import torch

from ..backend import register_portable
from ._autocast import autocast_operands
from ._autograd import differentiable, differentiable_once, forbid_autograd, may_write_saved, wants_grad
from ._gated import gated_backward_, gated_product
from ._products import add_product, write_linear
from ._tiles import plan_tiles
from .rms_norm import accumulate_dtype

# --- kernels ------------------------------------------------------------------------------------------------------


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

    def __init__(self, parameter, needed, single):
        self.dtype, self.needed, self.first = parameter.dtype, needed, True
        # A single product rounds its float32 sum itself.
        wide = self.dtype if single and parameter.dim() > 1 else accumulate_dtype(self.dtype)
        self.sum = parameter.new_empty(parameter.shape if needed else 0, dtype=wide)

    def add_product(self, grad, inputs):
        if self.needed:
            add_product(self.sum, grad, inputs, self.first)
            self.first = False

    def add_rows(self, grad):
        if self.needed:
            rows = grad.sum(0, dtype=self.sum.dtype)
            self.sum = rows if self.first else self.sum.add_(rows)
            self.first = False

    def result(self):
        """The gradient, once: the float32 sum is let go."""
        total, self.sum = self.sum, None
        if self.needed and self.first:
            total.zero_()
        return total.to(self.dtype)


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
    recomputed = rows - tiles.kept_rows
    # What will be kept is working memory until then.
    roomy = tiles.kept_rows >= tiles.shard_rows
    working = kept if roomy else x.new_empty(min(tiles.shard_rows, recomputed), 2 * intermediate)
    for shard in _slices(0, recomputed, tiles.shard_rows) + _slices(recomputed, rows, tiles.shard_rows):
        if shard.start < recomputed:
            gate_up = working[: shard.stop - shard.start]
        else:
            gate_up = kept[shard.start - recomputed : shard.stop - recomputed]
        projections.write(flat[shard], gate_up)
        product = gated_product(*projections.halves(gate_up), activation)
        write_linear(product, down_weight, down_bias, y[shard])
        del product
    return y.view(x.shape), kept


def tiled_mlp_backward__kernel(
    grad_y, kept, x, gate_weight, up_weight, down_weight, gate_bias, up_bias, activation, num_shards, memory_budget,
    need_grad_x, need_grad_gate_weight, need_grad_up_weight, need_grad_down_weight, need_grad_gate_bias,
    need_grad_up_bias, need_grad_down_bias,
):  # fmt: skip
    hidden, intermediate = down_weight.shape
    rows = _rows(x)
    shard_rows = _tiles(x, down_weight, num_shards, memory_budget, True).shard_rows
    recomputed = rows - kept.shape[0]
    shards = _slices(recomputed, rows, shard_rows) + _slices(0, recomputed, shard_rows)
    projections = _Projections(gate_weight, up_weight, gate_bias, up_bias, intermediate)
    flat, grad_y = x.reshape(rows, hidden), grad_y.reshape(rows, hidden)
    grad_x = x.new_empty(flat.shape if need_grad_x else 0)

    single, nothing = len(shards) == 1, x.new_empty(0)

    def gradient(parameter, needed):
        return _ParameterGradient(nothing if parameter is None else parameter, needed, single)

    grad_down_bias = _ParameterGradient(x.new_empty(hidden), need_grad_down_bias, single)
    grad_down = gradient(down_weight, need_grad_down_weight)
    grad_weights = [gradient(gate_weight, need_grad_gate_weight), gradient(up_weight, need_grad_up_weight)]
    grad_biases = [gradient(gate_bias, need_grad_gate_bias), gradient(up_bias, need_grad_up_bias)]
    through_gate = need_grad_x or any(g.needed for g in (*grad_weights, *grad_biases))

    def add_shards():
        roomy = kept.shape[0] >= shard_rows
        working = kept if roomy else x.new_empty(min(shard_rows, recomputed), 2 * intermediate)
        hidden_working = x.new_empty(min(shard_rows, rows) if through_gate else 0, intermediate)
        for shard in shards:
            count, dy, xs = shard.stop - shard.start, grad_y[shard], flat[shard]
            # The kept shards come first, so that their memory can be that of the others.
            if shard.start >= recomputed:
                gate_up = kept[shard.start - recomputed : shard.stop - recomputed]
            else:
                gate_up = working[:count]
                projections.write(xs, gate_up)
            gate, up = projections.halves(gate_up)
            if not through_gate:
                grad_down.add_product(dy, gated_product(gate, up, activation))
                continue
            grad_product = hidden_working[:count]
            torch.mm(dy, down_weight, out=grad_product)
            gated_backward_(grad_product, gate, up, activation, need_grad_down_weight)
            grad_down.add_product(dy, grad_product)  # where now the product is
            if need_grad_x:
                projections.write_grad_x(gate_up, grad_x[shard])
            for (_, _, columns), grad_weight, grad_bias in zip(
                projections.parts, grad_weights, grad_biases, strict=False
            ):
                grad_weight.add_product(gate_up[:, columns], xs)
                grad_bias.add_rows(gate_up[:, columns])

    if through_gate or need_grad_down_weight:
        add_shards()
    grad_down_bias.add_rows(grad_y)
    # The working memory is gone, and one sum at a time becomes a gradient.
    grads = [g.result() for g in (*grad_weights, grad_down, *grad_biases, grad_down_bias)]
    return grad_x.view(x.shape) if need_grad_x else grad_x, *grads


def tiled_mlp_backward_kernel(
    grad_y, kept, x, gate_weight, up_weight, down_weight, gate_bias, up_bias, activation, num_shards, memory_budget,
    need_grad_x, need_grad_gate_weight, need_grad_up_weight, need_grad_down_weight, need_grad_gate_bias,
    need_grad_up_bias, need_grad_down_bias,
):  # fmt: skip
    return tiled_mlp_backward__kernel(
        grad_y, kept.clone(), x, gate_weight, up_weight, down_weight, gate_bias, up_bias, activation, num_shards,
        memory_budget, need_grad_x, need_grad_gate_weight, need_grad_up_weight, need_grad_down_weight,
        need_grad_gate_bias, need_grad_up_bias, need_grad_down_bias,
    )  # fmt: skip


register_portable(
    {
        "tiled_mlp_forward": tiled_mlp_forward_kernel,
        "tiled_mlp_backward": tiled_mlp_backward_kernel,
        "tiled_mlp_backward_": tiled_mlp_backward__kernel,
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
torch.library.register_fake("liger::tiled_mlp_backward_")(_fake_backward)


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


_tiled_mlp_backward_ = forbid_autograd("tiled_mlp_backward_")


@differentiable_once("tiled_mlp")
def _backward(ctx, grad_y, _grad_kept):
    result = [None] * len(ctx.needs_input_grad)
    if grad_y is None:
        return tuple(result)
    needed = ctx.needs_input_grad[:_TENSORS]
    saved = ctx.saved_tensors
    if may_write_saved(*saved):
        # The kept activations die with this node: their memory becomes that of their gradients.
        grads = _tiled_mlp_backward_(grad_y, saved[0].detach(), *saved[1:], *ctx.options, *needed)
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
        num_shards: into how many parts of equal size the tokens are cut, at most as many as there are tokens; None
            lets the budget decide. In whole tiles of 128 tokens where that is possible.
        memory_budget: bytes for kept activations, for one shard's working memory and for float32 sums, at the peak of
            the backward. None for ``LIGER_MEMORY_BUDGET``, else for what shards of 8192 tokens take. A budget that is
            too small for shards of 128 tokens gives those.

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
