# SPDX-License-Identifier: BSD-3-Clause
"""The chunk loop of a loss: logits of as many groups as fit the memory budget, then their gradient in the
same memory.

Two implementations with the same interface. :class:`PortableChunks` uses the GEMMs of torch.
:class:`Sm90Chunks` uses the wgmma GEMMs of fused_linear_ce on compute capability 9.0: the epilogue of the
first GEMM computes log-probabilities, and the gradient of the weight is accumulated in the memory of the
result.
"""

from typing import NamedTuple

import torch

from .._core.head.chunks import HeadChunks
from .._core.head.float32 import Float32LMHeadGradients, bytes_per_logit
from .._core.head.lm_head import LMHead, LMHeadGradients, Sm90LMHeadGradients, planned_rows
from .._core.head.sm90_plan import ENGINE, LinearCePlan
from .._core.math.computed_rows import AllRows, row_chunks
from .._core.op.registration import FAMILIES

# permute_rows() needs memory for at least so many bytes of each row.
_MIN_PERMUTE_BYTES = 64


class Layout(NamedTuple):
    """The rows of a batch as (parts, groups, length): a group has ``length`` consecutive rows in each part.

    Pairs have two parts, all chosen sequences before all rejected ones.
    """

    parts: int
    groups: int
    length: int

    def view(self, rows, groups=slice(None)):
        """A view (parts, groups, length, ...) of these groups of a tensor (rows, ...)."""
        return rows.view(*self, *rows.shape[1:])[:, groups]


class ChunkArguments(NamedTuple):
    """The arguments of one call of the op that both chunk loops read."""

    input: torch.Tensor
    target: torch.Tensor
    head: LMHead
    layout: Layout
    needs_grad: tuple[bool, bool, bool]  # of input, weight and bias
    exact: bool  # the gradient of the weight is accumulated in float32
    memory_budget: int | None
    use_entropy: bool  # the loss reads the entropies, so they have a gradient
    with_metrics: bool  # entropies and argmax are returned

    @property
    def group_rows(self):
        return self.layout.parts * self.layout.length

    @property
    def budget(self):
        return torch.ops.liger.default_memory_budget() if self.memory_budget is None else self.memory_budget


def make_chunks(args):
    """The chunk loop of a call, or None if the logits of a single group exceed the budget.

    Gradients of float16 logits, which precede any loss scale, would underflow: those are computed in float32
    and rounded with a scale of their own.
    """
    chunks = Sm90Chunks.plan(args)
    if chunks is None:
        if args.input.dtype == torch.float16:
            args = args._replace(head=args.head._replace(float32_logits=True))
        chunks = PortableChunks.plan(args)
    return chunks


class _Groups(AllRows):
    """The rows of groups: ``at`` is a slice of groups. Their parts may be apart in the batch, while the GEMMs
    need contiguous rows: then the rows of a chunk are a copy, which their gradient overwrites."""

    def __init__(self, layout, target, ignore_index, in_place):
        super().__init__(target, ignore_index)
        self.count = layout.groups if target.shape[0] else 0
        self._layout, self._in_place = layout, in_place

    def chunks(self, groups, memory):
        group_rows = self._layout.parts * self._layout.length
        for chunk in row_chunks(self.count, groups):
            yield chunk, memory[: (chunk.stop - chunk.start) * group_rows]

    def of(self, x, at):
        rows = self._layout.view(x, at)
        return rows.flatten(0, 2) if self._in_place else torch.cat([part.flatten(0, 1) for part in rows])

    def ignored(self, at):
        return self._layout.view(self._target, at).flatten() == self._ignore_index

    def memory(self, gradient, at, x):
        return self.of(gradient, at) if self._in_place else x

    def from_memory(self, gradient, at, memory):
        if not self._in_place:
            rows = self._layout.view(gradient, at)
            rows.copy_(memory.view(rows.shape))


class PortableChunks:
    """The chunk loop on the GEMMs of torch: for each chunk :meth:`read` and :meth:`add`, then :meth:`finish`
    once.

    Attributes:
        slices: the groups of each chunk.
    """

    @classmethod
    def plan(cls, args):
        """The chunk loop, or None if the logits of a single group exceed the budget."""
        weight, groups = args.head.weight, args.layout.groups
        gradients = None
        if not args.head.float32_logits:
            layer, budget = (args.input, weight, args.head.bias), args.memory_budget
            gradients = Sm90LMHeadGradients.plan(*layer, args.needs_grad, budget, group_rows=args.group_rows)
        if gradients is not None:
            return cls(args, gradients.layout.chunk_rows // args.group_rows, gradients)
        if args.group_rows == 1 and not args.head.float32_logits:
            step = planned_rows(args.input, weight, args.needs_grad[1], args.exact, args.memory_budget)[0]
        else:
            element_size = args.input.element_size()
            if args.head.float32_logits:
                element_size = bytes_per_logit(args.input, weight, True)
            row_bytes = weight.shape[0] * element_size
            step = args.budget // max(row_bytes * args.group_rows, 1)
        if args.group_rows == 1:
            step = max(step, 1)
        if step == 0:
            return None
        chunks = -(-groups // step)
        return cls(args, -(-groups // max(chunks, 1)))

    def __init__(self, args, step, gradients=None):
        self._args, head = args, args.head
        groups = args.layout.groups if args.input.shape[0] else 0
        self.slices = list(row_chunks(groups, step))
        if gradients is None:
            make = Float32LMHeadGradients if head.float32_logits else LMHeadGradients
            layer = args.input, head.weight, head.bias
            gradients = make(*layer, args.needs_grad, len(self.slices), args.exact)
        in_place = args.layout.parts == 1 or len(self.slices) <= 1
        self._rows = _Groups(args.layout, args.target, head.ignore_index, in_place)
        memory = gradients.new_logits(step * args.group_rows)
        self._chunks = HeadChunks(args.input, head, self._rows, gradients, step, memory)
        self._pass = iter(self._chunks)

    def read(self, groups, logprobs, entropy, argmax):
        """Computes the log-probabilities, entropies and argmax of the next chunk and writes them to its rows.

        Args:
            groups: the slice of the chunk.
            logprobs: (rows,) of the batch.
            entropy, argmax: (rows,), or without elements if they are not needed.
        """
        args, view = self._args, self._args.layout.view
        _, self._logits = next(self._pass)
        self._groups, self._target = groups, view(args.target, groups).flatten()
        self._statistics = args.head.statistics(
            self._logits, self._target, entropy.numel() > 0, argmax.numel() > 0
        )
        for result, rows in zip((logprobs, entropy, argmax), self._statistics, strict=False):
            if result.numel():
                out = view(result, groups)
                out.copy_(rows.view(out.shape))

    def add(self, grad_logprobs, grad_entropy):
        """Accumulates the gradients of the chunk that was read last.

        Args:
            grad_logprobs: (parts, groups, length), the gradient with respect to the log-probabilities.
            grad_entropy: the same with respect to the entropies, or None.
        """
        grad_logprobs, grad_entropy = (
            g if g is None else g.reshape(-1) for g in (grad_logprobs, grad_entropy)
        )
        self._args.head.write_gradient(
            self._logits, self._target, self._statistics, grad_logprobs, grad_entropy
        )
        self._chunks.add(self._groups, self._logits)

    def finish(self):
        """(grad_input, grad_weight, grad_bias)"""
        return self._chunks.finish()


class Sm90Chunks:
    """The chunk loop on the wgmma engine of compute capability 9.0: ENGINE_DTYPES of
    :mod:`liger._core.head.sm90_plan`, without bias, softcap and gradient of entropies.

    Rows are gathered by index. If a chunk has two ranges of rows, ``grad_input`` is stored in the order of
    chunks until :meth:`finish` permutes it: a GEMM needs contiguous rows, and no other memory is available
    for them.
    """

    @classmethod
    def plan(cls, args):
        """The chunk loop, or None if the engine does not support the call or is slower than the portable
        loop."""
        head = args.head
        if not args.input.is_cuda or FAMILIES["fused_linear_ce"].choice != "cuda":
            return None
        if head.bias is not None or head.softcap is not None or args.use_entropy:
            return None
        if head.float32_logits or head.weight.dtype != args.input.dtype:
            return None
        sizes = args.group_rows, args.exact, args.budget, args.with_metrics, *args.needs_grad[:2]
        plan = torch.ops.liger_sm90.plan.default(args.input, head.weight, *sizes)
        numbers, separate_rows, workspace_bytes = plan
        return cls(args, LinearCePlan.decode(numbers), separate_rows, workspace_bytes) if numbers else None

    def __init__(self, args, plan, separate_rows, workspace_bytes):
        """``separate_rows``: for each chunk, whether its gathered rows and their gradient need separate
        memory."""
        self._layout, self._temperature, self._plan = args.layout, args.head.temperature, plan
        input, weight, (need_input, need_weight, _) = args.input, args.head.weight, args.needs_grad
        (rows, hidden), vocab = input.shape, weight.shape[0]
        self._separate_rows = separate_rows
        self.slices = [
            slice(c.first // args.group_rows, (c.first + c.rows) // args.group_rows) for c in plan.chunks
        ]
        # A single chunk is the whole batch in its own order.
        self._ranges = args.layout.parts if len(self.slices) > 1 else 1
        panels = -(-vocab // ENGINE.panel) + plan.panel_offset
        permuted = _MIN_PERMUTE_BYTES * rows if self._ranges > 1 and need_input else 0
        self._grad_input = input.new_empty((rows, hidden) if need_input else 0)
        self._grad_weight = input.new_empty((panels * ENGINE.panel, hidden) if need_weight else 0)
        self._panel_workspace = input.new_empty(
            max(panels * plan.workspace_panel_bytes, permuted), dtype=torch.uint8
        )
        self._workspace = input.new_empty(max(workspace_bytes), dtype=torch.uint8)
        self._position = input.new_empty(rows, dtype=torch.int32)
        self._neg_grad_logprobs = input.new_empty(rows, dtype=torch.float32)
        dense = torch.ops.liger_sm90.dense.default
        self._operands = dense(input), dense(weight), args.target.contiguous()
        self._options = args.head.ignore_index, self._temperature, args.with_metrics, plan.encode()
        self._next, self._vocab = 0, vocab

    def _rows(self):
        """(memory of the gathered rows of the next chunk, memory of their gradient).

        Both are the same unless the rows are read after their gradient is written. Then the rows are stored
        in ``grad_input`` of a later chunk, or in new memory if that chunk is shorter.
        """
        first, count, _ = self._plan.chunks[self._next]
        grad_rows = self._grad_input[first : first + count]
        if not self._separate_rows[self._next]:
            return grad_rows, grad_rows
        later = self._grad_input[first + count : first + 2 * count]
        if later.shape[0] < count:
            later = self._grad_input.new_empty(count, self._operands[0].shape[1])
        return later, grad_rows

    def read(self, groups, logprobs, entropy, argmax):
        """As :meth:`PortableChunks.read`."""
        rows, grad_rows = self._rows()
        memory = self._grad_weight, self._panel_workspace, rows, self._workspace, grad_rows
        where = self._next, self._ranges, self._position
        self._arguments = *self._operands, *self._options, *where, *memory
        self._groups = groups
        self._next += 1
        torch.ops.liger_sm90.logprobs.default(*self._arguments, logprobs, entropy, argmax)

    def add(self, grad_logprobs, grad_entropy):
        """As :meth:`PortableChunks.add`; ``grad_entropy`` is None."""
        # The kernels differentiate with respect to logits / temperature.
        torch.mul(
            grad_logprobs,
            -1.0 / self._temperature,
            out=self._layout.view(self._neg_grad_logprobs, self._groups),
        )
        torch.ops.liger_sm90.gradients.default(self._neg_grad_logprobs, *self._arguments)
        del self._arguments

    def finish(self):
        """(grad_input, grad_weight, an empty tensor for the bias)"""
        if self._ranges > 1 and self._grad_input.numel():
            torch.ops.liger_sm90.permute_rows.default(self._position, self._panel_workspace, self._grad_input)
        return self._grad_input, self._grad_weight[: self._vocab], self._grad_weight.new_empty(0)
