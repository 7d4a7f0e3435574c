"""The chunks of groups of a loss: logits, and later their gradient, of as many groups at a time as there is memory for.

Two ways with the same steps: by the products of torch (:class:`PortableChunks`), and by those of fused_linear_ce on
compute capability 9.0 (:class:`Sm90Chunks`), where the logits become log-probabilities in the epilogue of their product
and the sum of the weight gradient lies in the memory of the result.
"""

import torch

from ..backend import FAMILIES
from ..ops._linear_chunks import HeadGradients, planned_rows

# What the engine's plan begins with, and has for each chunk: csrc/fused_linear_loss_sm90.cu.
_HEADER, _PER_CHUNK = 5, 5
# The classes of a panel, which the plan counts in.
_PANEL = 128


def _budget(memory_budget):
    return torch.ops.liger.default_memory_budget() if memory_budget is None else memory_budget


def chunks_of(input, head, groups, group_rows, wanted, exact, memory_budget, use_entropy, observed):
    """The chunks, or None where not even the logits of one group fit the budget.

    use_entropy: entropies are read, and their gradient will come; observed: they and argmaxes are read.
    """
    engine = Sm90Chunks.plan(input, head, group_rows, wanted, exact, memory_budget, use_entropy, observed)
    if engine is not None:
        return engine
    if group_rows == 1:
        step = planned_rows(input, head.weight, wanted[1], exact, memory_budget)[0]
    else:
        row_bytes = head.weight.shape[0] * input.element_size()
        step = _budget(memory_budget) // max(row_bytes * group_rows, 1)
    if step == 0:
        return None
    chunks = -(-groups // step)
    step, with_entropy = -(-groups // max(chunks, 1)), use_entropy or observed
    return PortableChunks(input, head, groups, group_rows, step, wanted, exact, with_entropy, observed)


class PortableChunks:
    """One chunk after the other: :meth:`read` it, then :meth:`add` its gradient. At the end :meth:`finish`.

    Attributes:
        slices: the groups of each chunk.
        grad_input: as the input; without elements where it is not wanted.
    """

    def __init__(self, input, head, groups, group_rows, step, wanted, exact, with_entropy, observed):
        self.slices = [
            slice(i, min(i + step, groups)) for i in range(0, groups if input.shape[0] else 0, max(step, 1))
        ]
        self._head, self._asked = head, (with_entropy, observed)
        self._gradients = HeadGradients(input, head.weight, head.bias, wanted, len(self.slices), exact)
        self._memory = self._gradients.new_logits(step * group_rows)
        self.grad_input = self._gradients.input

    def read(self, x, target, grad_x):
        """(log-probabilities, entropies, most probable classes) of the rows x of the next chunk, whose gradient will go
        to ``grad_x``; without elements where they are not asked for."""
        self._x, self._target, self._grad_x, self._logits = x, target, grad_x, self._memory[: x.shape[0]]
        self._head.write_logits(x, self._logits)
        self._found = self._head.statistics(self._logits, target, *self._asked)
        return self._found.logprobs, self._found.entropy, self._found.argmax

    def add(self, of_logprob, of_entropy):
        """The gradient by what was read: one number per row, or None."""
        self._head.write_gradient(self._logits, self._target, self._found, of_logprob, of_entropy)
        self._gradients.add(self._x, self._logits, self._grad_x)

    def finish(self):
        """(gradient of the input, of the weight, of the bias)"""
        return self._gradients.finish()


class Sm90Chunks:
    """The same for bfloat16 on compute capability 9.0, without bias, softcap and a gradient by entropies."""

    @classmethod
    def plan(cls, input, head, group_rows, wanted, exact, memory_budget, use_entropy, observed):
        """The chunks, or None where the engine cannot or should not do them."""
        if not input.is_cuda or FAMILIES["fused_linear_ce"].choice != "cuda":
            return None
        if head.bias is not None or head.softcap is not None or use_entropy:
            return None
        numbers = torch.ops.liger_sm90.plan.default(
            input, head.weight, group_rows, exact, _budget(memory_budget), observed, *wanted[:2]
        )
        return cls(input, head, group_rows, wanted, numbers) if numbers else None

    def __init__(self, input, head, group_rows, wanted, numbers):
        (vocab, hidden), self._head, self._numbers = head.weight.shape, head, numbers
        need_input, need_weight, _ = wanted
        _, panel_bytes, _, slack, _ = numbers[:_HEADER]
        rest = numbers[_HEADER:]
        self._numbers_of = [rest[i : i + _PER_CHUNK] for i in range(0, len(rest), _PER_CHUNK)]
        self.slices = [
            slice(first // group_rows, (first + rows) // group_rows) for first, rows, *_ in self._numbers_of
        ]
        panels = vocab // _PANEL + slack
        self.grad_input = input.new_empty(input.shape if need_input else 0)
        self._grad_weight = input.new_empty((panels * _PANEL, hidden) if need_weight else 0)
        self._extra = input.new_empty(panels * panel_bytes, dtype=torch.uint8)
        self._scratch = input.new_empty(max(n[-1] for n in self._numbers_of), dtype=torch.uint8)
        self._next = 0

    def _rows(self, grad_x):
        """Memory for the rows of the next chunk: that of their gradient or, where rows are needed for longer, of one
        that comes later."""
        first, rows, _, apart, _ = self._numbers_of[self._next]
        if not apart:
            return grad_x
        later = self.grad_input[first + rows : first + 2 * rows]
        in_order = grad_x.numel() > 0 and grad_x.data_ptr() == self.grad_input[first:].data_ptr()
        return (
            later
            if in_order and later.shape[0] == rows
            else grad_x.new_empty(rows, self._head.weight.shape[1])
        )

    def read(self, x, target, grad_x):
        self._arguments = (
            x, self._head.weight, target, self._head.ignore_index, self._head.temperature, self._numbers, self._next,
            self._grad_weight, self._extra, self._rows(grad_x), self._scratch, grad_x,
        )  # fmt: skip
        self._next += 1
        return torch.ops.liger_sm90.logprobs.default(*self._arguments)

    def add(self, of_logprob, of_entropy):
        # The kernels know the logits over the temperature only.
        minus = of_logprob.mul(-1.0 / self._head.temperature)
        torch.ops.liger_sm90.gradients.default(minus, *self._arguments)
        del self._arguments

    def finish(self):
        vocab = self._head.weight.shape[0]
        return self.grad_input, self._grad_weight[:vocab], self._grad_weight.new_empty(0)
