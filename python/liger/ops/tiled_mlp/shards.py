# SPDX-License-Identifier: BSD-3-Clause
"""The projections, weight gradient sums and shard buffers of the kernels of tiled_mlp."""

import torch

from ..._core.math.dtypes import accumulate_dtype
from ..._core.math.matmul import product, write_linear
from ..gated import op_of
from .plan import lay_out


def gated_product(gate, up, activation):
    op, options = op_of(activation)
    return op(gate, up, *options)


def gated_backward_(grad_out, gate, up, activation, emit_product):
    """Overwrites gate and up with their gradients and, with ``emit_product``, grad_out with the product."""
    op, options = op_of(activation, "_backward_product_" if emit_product else "_backward_")
    op(grad_out, gate, up, *options)


def slices(start, stop, step):
    return [slice(first, min(first + step, stop)) for first in range(start, stop, max(step, 1))]


class Projections:
    """The projections to gate and up: one linear layer with result (rows, 2I), or two with results (rows,
    I)."""

    def __init__(self, gate_weight, up_weight, gate_bias, up_bias, intermediate):
        self.intermediate = intermediate
        self.layers = [(gate_weight, gate_bias)]
        if up_weight is not None:
            self.layers.append((up_weight, up_bias))

    def results_in(self, gate_up):
        """The results as views of one tensor (rows, 2I)."""
        return [gate_up] if len(self.layers) == 1 else self._halves(gate_up)

    def new_results(self, x):
        return [x.new_empty(x.shape[0], weight.shape[0]) for weight, _ in self.layers]

    def write(self, x, results):
        for (weight, bias), result in zip(self.layers, results, strict=True):
            write_linear(x, weight, bias, result)

    def write_grad_x(self, grads, out):
        torch.mm(grads[0], self.layers[0][0], out=out)
        for grad, (weight, _) in zip(grads[1:], self.layers[1:], strict=True):
            torch.addmm(out, grad, weight, out=out)

    def gate_and_up(self, results):
        return self._halves(*results) if len(results) == 1 else results

    def _halves(self, gate_up):
        return [gate_up[:, : self.intermediate], gate_up[:, self.intermediate :]]


class ParameterGradient:
    """The gradient of one parameter: a float32 sum over shards. No work is done if it is not needed."""

    def __init__(self, like, needed, single):
        self.like, self.needed, self.sum = like, needed, None
        # A single GEMM accumulates in float32 and rounds once.
        self.dtype = like.dtype if single and like.dim() > 1 else accumulate_dtype(like.dtype)

    def _begin(self):
        """Allocates the sum at the first call. Returns whether this is the first call."""
        first = self.sum is None
        if first:
            self.sum = self.like.new_empty(self.like.shape, dtype=self.dtype)
        return first

    def add_product(self, grad, inputs):
        if self.needed:
            first = self._begin()
            product(grad.t(), inputs, self.sum, add=not first)

    def write_columns(self, grad, inputs, columns):
        if self.needed:
            self._begin()
            product(grad.t(), inputs, self.sum[:, columns])

    def add_rows(self, grad):
        if self.needed:
            rows = grad.sum(0, dtype=self.dtype)
            self.sum = rows if self.sum is None else self.sum.add_(rows)

    def result(self):
        """The gradient. Frees the float32 sum, so it can be called only once."""
        total, self.sum = self.sum, None
        if total is None:
            return self.like.new_zeros(self.like.shape if self.needed else 0)
        return total.to(self.like.dtype)


class ShardBuffers:
    """The buffers of a backward of several shards: separate memory for gate and up, hidden gradient, and
    grad_x."""

    def __init__(self, x, kept, intermediate, shard_rows):
        self.x, self.kept, self.columns = x, kept, 2 * intermediate
        self.rows, recomputed = x.shape[0], x.shape[0] - kept.shape[0]
        self.steps = [*slices(0, kept.shape[0], shard_rows), *slices(kept.shape[0], self.rows, shard_rows)]
        # Shards with kept activations run first; the others then reuse their memory if it is large enough.
        reuse = kept.shape[0] >= min(shard_rows, recomputed)
        self.working = kept if reuse else x.new_empty(min(shard_rows, recomputed), self.columns)
        self.grad_x = None

    def gate_up(self, shard):
        """(memory of gate and up, whether it already has their values)"""
        if shard.start < self.kept.shape[0]:
            return self.kept[shard], True
        return self.working[: shard.stop - shard.start], False

    def hidden(self, shard):
        return self.x.new_empty(shard.stop - shard.start, self.columns // 2)

    def grad_x_of(self, shard):
        """Memory for the gradient of x of this shard. The caller calls :meth:`store_grad_x` after its last
        use of gate and up."""
        if self.grad_x is None:
            self.grad_x = torch.empty_like(self.x, memory_format=torch.contiguous_format)
        return self.grad_x[shard]

    def store_grad_x(self, shard):
        pass


class SharedShardBuffers:
    """:class:`ShardBuffers` within the memory of the kept activations, which also becomes the gradient of x
    (:func:`~liger.ops.tiled_mlp.plan.lay_out`)."""

    def __init__(self, x, kept, intermediate, tiles):
        rows, hidden = x.shape
        self.kept_rows, self.columns = kept.shape[0], 2 * intermediate
        self.memory, self.spare = kept.view(-1), x.new_empty(tiles.spare_rows * intermediate)
        self.grad_x = self.memory[: rows * hidden].view(rows, hidden)
        self.planned = {step.start: step for step in lay_out(rows, hidden, intermediate, tiles)}
        self.steps = [slice(step.start, step.stop) for step in self.planned.values()]

    def _block(self, memory, start, rows, columns):
        return memory[start : start + rows * columns].view(rows, columns)

    def gate_up(self, shard):
        step = self.planned[shard.start]
        block = self._block(self.memory, step.gate_up, step.stop - step.start, self.columns)
        return block, step.start < self.kept_rows

    def hidden(self, shard):
        step, columns = self.planned[shard.start], self.columns // 2
        memory, start = (self.spare, 0) if step.hidden is None else (self.memory, step.hidden)
        return self._block(memory, start, step.stop - step.start, columns)

    def _overlaps_gate_up(self, shard):
        """True if the gradient of x of this shard overlaps the gate and up from which it is computed, as in
        the first shards."""
        return shard.stop * self.grad_x.shape[1] > self.planned[shard.start].gate_up

    def grad_x_of(self, shard):
        if not self._overlaps_gate_up(shard):
            return self.grad_x[shard]
        # The spare buffer is free again: the product of this shard was in it.
        return self._block(self.spare, 0, shard.stop - shard.start, self.grad_x.shape[1])

    def store_grad_x(self, shard):
        if self._overlaps_gate_up(shard):
            self.grad_x[shard] = self.grad_x_of(shard)
