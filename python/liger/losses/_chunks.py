"""The chunks of groups of a loss: logits, and later their gradient, of as many groups at a time as there is memory for.

Two ways with the same steps: by the products of torch (:class:`PortableChunks`), and by those of fused_linear_ce on
compute capability 9.0 (:class:`Sm90Chunks`), where the logits become log-probabilities in the epilogue of their product
and the sum of the weight gradient lies in the memory of the result.
"""

from typing import NamedTuple

import torch

from .._core.lm_head import LMHead, LMHeadGradients, Sm90LMHeadGradients, planned_rows
from .._core.sm90_plan import LinearCePlan
from ..backend import FAMILIES

# Classes per panel: kPanel of csrc/linear_ce/sm90/tile.h.
_PANEL = 128
# permute_rows() needs memory for at least so many bytes of each row.
_LEAST_PERMUTE_BYTES = 64


class Layout(NamedTuple):
    """The rows of a batch: of each part all groups, so that those of a group lie in as many places."""

    parts: int
    groups: int
    length: int

    def cut(self, rows, groups=slice(None)):
        """(parts, groups, length, ...) a view of these groups of (rows, ...)."""
        return rows.view(*self, *rows.shape[1:])[:, groups]


class Call(NamedTuple):
    """What a chunk is made of; wanted: the gradients of input, weight and bias."""

    input: torch.Tensor
    target: torch.Tensor
    head: LMHead
    layout: Layout
    wanted: tuple[bool, bool, bool]
    exact: bool
    memory_budget: int | None
    use_entropy: bool  # entropies are read, and their gradient will come
    with_metrics: bool  # entropies and argmax are read

    @property
    def group_rows(self):
        return self.layout.parts * self.layout.length

    @property
    def budget(self):
        return torch.ops.liger.default_memory_budget() if self.memory_budget is None else self.memory_budget


def chunks_of(call):
    """The chunks, or None where not even the logits of one group fit the budget."""
    return Sm90Chunks.plan(call) or PortableChunks.plan(call)


class PortableChunks:
    """One chunk after the other: :meth:`read` it, then :meth:`add` its gradient. At the end :meth:`finish`.

    Attributes:
        slices: the groups of each chunk.
    """

    @classmethod
    def plan(cls, call):
        """The chunks, or None where not even the logits of one group fit the budget."""
        weight, groups = call.head.weight, call.layout.groups
        gradients = Sm90LMHeadGradients.plan(
            call.input, weight, call.head.bias, call.wanted, call.memory_budget, group_rows=call.group_rows
        )
        if gradients is not None:
            return cls(call, gradients.layout.chunk_rows // call.group_rows, gradients)
        if call.group_rows == 1:
            step = planned_rows(call.input, weight, call.wanted[1], call.exact, call.memory_budget)[0]
        else:
            row_bytes = weight.shape[0] * call.input.element_size()
            step = call.budget // max(row_bytes * call.group_rows, 1)
        if step == 0:
            return None
        chunks = -(-groups // step)
        return cls(call, -(-groups // max(chunks, 1)))

    def __init__(self, call, step, gradients=None):
        self._call, head = call, call.head
        groups = call.layout.groups if call.input.shape[0] else 0
        self.slices = [slice(i, min(i + step, groups)) for i in range(0, groups, max(step, 1))]
        self._gradients = gradients or LMHeadGradients(
            call.input, head.weight, head.bias, call.wanted, len(self.slices), call.exact
        )
        self._memory = self._gradients.new_logits(step * call.group_rows)
        self._in_order = call.layout.parts == 1 or len(self.slices) <= 1

    def read(self, groups, logprobs, entropy, argmax):
        """Writes the log-probabilities of the groups of the next chunk, their entropies and their most probable classes
        to the rows of the batch; the last two have no elements where they are not asked for."""
        call, cut = self._call, self._call.layout.cut
        x = cut(call.input, groups)
        # Parts of a chunk lie apart: a copy has them side by side.
        self._x = x.flatten(0, 2) if self._in_order else torch.cat([part.flatten(0, 1) for part in x])
        self._groups, self._target = groups, cut(call.target, groups).flatten()
        self._logits = self._memory[: self._x.shape[0]]
        call.head.write_logits(self._x, self._logits)
        self._found = call.head.statistics(
            self._logits, self._target, entropy.numel() > 0, argmax.numel() > 0
        )
        for result, rows in zip((logprobs, entropy, argmax), self._found, strict=False):
            if result.numel():
                place = cut(result, groups)
                place.copy_(rows.view(place.shape))

    def add(self, of_logprob, of_entropy):
        """The gradient by what was read, (parts, groups, length); that by the entropies may be None."""
        of_logprob, of_entropy = (g if g is None else g.reshape(-1) for g in (of_logprob, of_entropy))
        self._call.head.write_gradient(self._logits, self._target, self._found, of_logprob, of_entropy)
        place = grad_x = self._gradients.input
        if self._call.wanted[0]:
            place = self._call.layout.cut(place, self._groups)
            grad_x = place.flatten(0, 2) if self._in_order else self._x
        ignored = self._target == self._call.head.ignore_index
        self._gradients.add(self._x, self._logits, grad_x, ignored)
        if self._call.wanted[0] and not self._in_order:
            place.copy_(grad_x.view(place.shape))

    def finish(self):
        """(gradient of the input, of the weight, of the bias)"""
        return self._gradients.finish()


class Sm90Chunks:
    """The same by the wgmma engine of compute capability 9.0: bfloat16, no bias, no softcap, no gradient of entropies.

    Rows are gathered by index. If chunks have two ranges of rows, the input gradients are contiguous, chunk after
    chunk, until :meth:`finish`: a GEMM needs its rows in one piece, and there is no other memory for them.
    """

    @classmethod
    def plan(cls, call):
        """The chunks, or None where the engine cannot or should not do them."""
        head = call.head
        if not call.input.is_cuda or FAMILIES["fused_linear_ce"].choice != "cuda":
            return None
        if head.bias is not None or head.softcap is not None or call.use_entropy:
            return None
        numbers, separate_rows, workspace_bytes = torch.ops.liger_sm90.plan.default(
            call.input,
            head.weight,
            call.group_rows,
            call.exact,
            call.budget,
            call.with_metrics,
            *call.wanted[:2],
        )
        return cls(call, LinearCePlan.decode(numbers), separate_rows, workspace_bytes) if numbers else None

    def __init__(self, call, plan, separate_rows, workspace_bytes):
        """``separate_rows``: of each chunk, whether its gathered rows need memory apart from their gradient."""
        self._layout, self._temperature, self._plan = call.layout, call.head.temperature, plan
        input, weight, (need_input, need_weight, _) = call.input, call.head.weight, call.wanted
        (rows, hidden), vocab = input.shape, weight.shape[0]
        self._separate_rows = separate_rows
        self.slices = [
            slice(c.first // call.group_rows, (c.first + c.rows) // call.group_rows) for c in plan.chunks
        ]
        # One chunk has the whole batch, in order.
        self._ranges = call.layout.parts if len(self.slices) > 1 else 1
        panels = vocab // _PANEL + plan.panel_offset
        permuted = _LEAST_PERMUTE_BYTES * rows if self._ranges > 1 and need_input else 0
        self._grad_input = input.new_empty((rows, hidden) if need_input else 0)
        self._grad_weight = input.new_empty((panels * _PANEL, hidden) if need_weight else 0)
        self._panel_workspace = input.new_empty(
            max(panels * plan.workspace_panel_bytes, permuted), dtype=torch.uint8
        )
        self._workspace = input.new_empty(max(workspace_bytes), dtype=torch.uint8)
        self._position = input.new_empty(rows, dtype=torch.int32)
        self._neg_grad_logprobs = input.new_empty(rows, dtype=torch.float32)
        dense = torch.ops.liger_sm90.dense.default
        self._operands = dense(input), dense(weight), call.target.contiguous()
        self._options = call.head.ignore_index, self._temperature, call.with_metrics, plan.encode()
        self._next, self._vocab = 0, vocab

    def _rows(self):
        """Memory for the rows of the next chunk: that of their gradient or, where rows are needed for longer, of one
        that comes later. And where their gradient goes."""
        first, count, _ = self._plan.chunks[self._next]
        grad_rows = self._grad_input[first : first + count]
        if not self._separate_rows[self._next]:
            return grad_rows, grad_rows
        later = self._grad_input[first + count : first + 2 * count]
        if later.shape[0] < count:
            later = self._grad_input.new_empty(count, self._operands[0].shape[1])
        return later, grad_rows

    def read(self, groups, logprobs, entropy, argmax):
        rows, grad_rows = self._rows()
        self._arguments = (
            *self._operands, *self._options, self._next, self._ranges, self._position, self._grad_weight,
            self._panel_workspace, rows, self._workspace, grad_rows,
        )  # fmt: skip
        self._groups = groups
        self._next += 1
        torch.ops.liger_sm90.logprobs.default(*self._arguments, logprobs, entropy, argmax)

    def add(self, of_logprob, of_entropy):
        # The kernels know the logits over the temperature only.
        torch.mul(
            of_logprob, -1.0 / self._temperature, out=self._layout.cut(self._neg_grad_logprobs, self._groups)
        )
        torch.ops.liger_sm90.gradients.default(self._neg_grad_logprobs, *self._arguments)
        del self._arguments

    def finish(self):
        if self._ranges > 1 and self._grad_input.numel():
            torch.ops.liger_sm90.permute_rows.default(self._position, self._panel_workspace, self._grad_input)
        return self._grad_input, self._grad_weight[: self._vocab], self._grad_weight.new_empty(0)
