"""A linear layer over classes, a chunk of rows of logits at a time: what the ops on log-probabilities share.

Every loss that sees the logits z of a row through the log-probability of the target and the entropy H alone has

    dL/dz[v] = g * ([v is the target] - p[v]) - h * p[v] * (log p[v] + H),    g = dL/dlogp, h = dL/dH

so two numbers per row turn a chunk of logits, where it lies, into its gradient.
"""

from typing import NamedTuple

import torch

from ..backend import FAMILIES
from ._arguments import POSITIVE, check
from ._products import product, without_ignored, write_linear
from .cross_entropy_stats import cross_entropy_stats_backward_
from .rms_norm import accumulate_dtype


class RowStatistics(NamedTuple):
    """Of rows of logits; entropy and argmax are empty where they were not asked for. Ignored rows have 0, 0 and -1."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor
    lse: torch.Tensor


class Head(NamedTuple):
    """A projection to classes, and what comes between it and the softmax."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float
    ignore_index: int
    softcap: float | None

    @property
    def _cap(self):
        return None if self.softcap is None else self.softcap / self.temperature

    def write_logits(self, x, out):
        """Logits over the temperature, before the softcap: the division is part of the product, rounded once."""
        write_linear(x, self.weight, self.bias, out, 1.0 / self.temperature)

    def statistics(self, logits, target, entropy=False, argmax=False):
        _, _, _, predicted, logprobs, entropies, lse, _, _ = torch.ops.liger.cross_entropy_forward.default(
            logits, target, None, None, None, self.ignore_index, 0.0, 0.0, self._cap, "none",
            False, False, argmax, True, entropy, False,
        )  # fmt: skip
        return RowStatistics(logprobs, entropies, predicted, lse)

    def write_gradient(self, logits, target, rows, of_logprob, of_entropy=None):
        """Overwrites logits with the gradient of ``x @ weight.T + bias``; ``rows`` are their statistics."""
        minus = of_logprob * (-1.0 / self.temperature)
        coef_exp, coef_log = minus, None
        if of_entropy is not None:
            coef_log = of_entropy * (-1.0 / self.temperature)
            coef_exp = torch.addcmul(minus, coef_log, rows.entropy)
        cross_entropy_stats_backward_(
            logits, target, rows.lse, coef_exp, minus, None, None, 0, self.ignore_index, self._cap, coef_log
        )


class HeadGradients:
    """The gradients of a linear layer from those of its logits, chunk by chunk."""

    def __init__(self, x, weight, bias, wanted, chunks, exact):
        need_input, need_weight, need_bias = wanted
        wide = accumulate_dtype(x.dtype)
        self.head_weight = weight
        self.input = x.new_empty(x.shape if need_input else 0)
        self.weight = x.new_empty(weight.shape if need_weight else 0)
        self.bias = x.new_zeros(weight.shape[0] if need_bias and bias is not None else 0, dtype=wide)
        self.wanted = need_input, need_weight, self.bias.numel() > 0
        self.apart = need_weight and chunks > 1 and exact and wide != x.dtype
        self.sum = torch.empty_like(self.weight, dtype=wide) if self.apart else self.weight
        self.chunks_added = 0

    def new_logits(self, rows):
        """Memory for rows of logits. While the weight gradient is summed elsewhere, its own memory holds them."""
        classes = self.head_weight.shape[0]
        # Rows begin at multiples of 16 bytes, as matrix units want them. Not on a CPU, whose 16-bit products may read
        # what is between the rows, and multiply a NaN there by zero.
        per_line = 16 // self.weight.element_size() if self.weight.is_cuda else 1
        stride = -(-classes // per_line) * per_line
        hosted = self.apart and rows * stride <= self.weight.numel()
        memory = self.weight.view(-1)[: rows * stride] if hosted else self.weight.new_empty(rows * stride)
        return memory.view(rows, stride)[:, :classes]

    def new_logits_beside(self, rows, beside):
        """Memory for the logits of chunks of so many rows, or of a longer first one, and for logits beside those that
        nobody needs while a chunk is added."""
        memory = self.new_logits(rows + beside)
        return memory[:rows], memory[rows:]

    def unused_rows(self):
        """The memory of the weight's gradient as rows of logits, as long as it is not written; or None."""

    def _counted(self, x, ignored, grad_x):
        """Rows of x for the weight gradient. They lie where their own gradient goes, which comes after it."""
        need_input, need_weight, _ = self.wanted
        return without_ignored(x, ignored, grad_x if need_input else None) if need_weight else x

    def add(self, x, dlogits, grad_x, ignored):
        """A chunk: rows of x, the gradient of their logits, where the gradient of x goes, maybe x itself, and which of
        them are ignored, (rows,) or None for none: whatever x holds there leaves no trace."""
        need_input, need_weight, need_bias = self.wanted
        if need_weight:
            counted = self._counted(x, ignored, grad_x)
            product(dlogits.t(), counted, self.sum, add=self.chunks_added > 0)
        if need_input:
            product(dlogits, self.head_weight, grad_x)
        if need_bias:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)
        self.chunks_added += 1

    def finish(self):
        """(of the input, of the weight, of the bias) after the last chunk."""
        if self.chunks_added == 0:
            self.sum.zero_()
        if self.apart:
            self.weight.copy_(self.sum)
        return self.input, self.weight, self.bias.to(self.weight.dtype)


class Sm90HeadGradients(HeadGradients):
    """The same by the products of fused_linear_ce on compute capability 9.0: no other memory for the sum over chunks,
    which is as exact as one in float32.

    Attributes:
        first_rows: rows of the first chunk, as many as of the others or more.
        chunk_rows, part_rows: rows of the others, and of a part of one that has logits beside its gradient.
        class_parts: parts of the classes, whose products are added up to the gradient of a chunk's hidden states; of
            the first chunk, and of the others.
    """

    @classmethod
    def plan(cls, x, weight, bias, wanted, memory_budget, beside=0, group_rows=1, hosted=False):
        """The gradients, or None where the engine cannot do it or there are none.

        ``beside``: how many rows of 16 bits a row of a part has beside its gradient, two for each product of float32
        logits. ``hosted``: those of the first chunk lie in :meth:`unused_rows`.
        Chunks are multiples of ``group_rows``.
        """
        if not any(wanted[:2]) or not x.is_cuda or FAMILIES["fused_linear_ce"].choice != "cuda":
            return None
        budget = torch.ops.liger.default_memory_budget() if memory_budget is None else memory_budget
        numbers = torch.ops.liger_sm90.head_plan.default(
            x, weight, beside, group_rows, budget, *wanted[:2], hosted
        )
        return cls(x, weight, bias, wanted, numbers) if numbers else None

    def __init__(self, x, weight, bias, wanted, numbers):
        super().__init__(x, weight, bias, wanted, 1, False)
        self.first_rows, self.chunk_rows, self.part_rows, *others = numbers
        self.class_parts, self._scratch_bytes, units = others[:2], others[2:4], others[4]
        self._chunks = 1 + -(-max(x.shape[0] - self.first_rows, 0) // self.chunk_rows)
        self._units = x.new_empty(units, dtype=torch.uint8)
        self._scratch = None
        self._dense_weight = torch.ops.liger_sm90.dense.default(weight)

    def new_logits_beside(self, rows, beside):
        if beside == 0:
            return super().new_logits_beside(rows, beside)
        classes = self.head_weight.shape[0]
        free = max(beside, -(-self._scratch_bytes[1] // (2 * classes)))
        memory = self.new_logits(max(rows + free, self.first_rows))
        self._scratch = memory[rows : rows + free].view(-1).view(torch.uint8)
        return memory[: max(rows, self.first_rows)], memory[rows : rows + beside]

    def unused_rows(self):
        if self.chunks_added > 0:
            return None
        classes = self.head_weight.shape[0]
        rows = self.weight.numel() // classes
        return self.weight.view(-1)[: rows * classes].view(rows, classes)

    def add(self, x, dlogits, grad_x, ignored):
        need_input, _, need_bias = self.wanted
        first = self.chunks_added == 0
        self.chunks_added += 1
        scratch = self._scratch
        # A longer first chunk has no memory beside it.
        if scratch is None or (first and self.first_rows > self.chunk_rows):
            scratch = x.new_empty(self._scratch_bytes[not first], dtype=torch.uint8)
        torch.ops.liger_sm90.head_gradients.default(
            dlogits, self._counted(x, ignored, grad_x), self._dense_weight, self.class_parts[not first], first,
            self.chunks_added == self._chunks, self.weight, self._units, scratch,
            grad_x if need_input else self.input,
        )  # fmt: skip
        if need_bias:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)


def check_head(op, input, weight, target, bias, temperature, softcap, accum_dtype, memory_budget):
    """Raises RuntimeError for what no head takes: shapes, dtypes, devices, options out of range."""
    check(op, "temperature", temperature, POSITIVE)
    # The head of cross entropy has the same conditions.
    torch.ops.liger.check_fused_linear_ce(
        input, weight, target, bias, None, None, None, 0.0, softcap, "sum", accum_dtype, memory_budget, op
    )


def row_chunks(rows, step, first=None):
    """Slices of ``step`` rows, the first one of ``first`` where that is given."""
    begin, length = 0, first or step
    while begin < rows:
        end = min(begin + max(length, 1), rows)
        yield slice(begin, end)
        begin, length = end, step


def head_gradients(x, weight, bias, wanted, exact, memory_budget):
    """(the gradients of a linear layer, rows of a chunk), in memory of this budget."""
    gradients = Sm90HeadGradients.plan(x, weight, bias, wanted, memory_budget)
    if gradients is not None:
        return gradients, gradients.chunk_rows
    chunk_rows, chunks = planned_rows(x, weight, wanted[1], exact, memory_budget)
    return HeadGradients(x, weight, bias, wanted, chunks, exact), chunk_rows


def planned_rows(input, weight, need_grad_weight, exact, memory_budget):
    """(rows of a chunk, chunks) by the planner that every head uses."""
    chunk_rows, chunks, _, _ = torch.ops.liger.plan_chunks(
        input.shape[0], input.shape[1], weight.shape[0], input.element_size(), need_grad_weight, exact, memory_budget
    )  # fmt: skip
    return chunk_rows, chunks
