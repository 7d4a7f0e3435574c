# SPDX-License-Identifier: BSD-3-Clause
"""The loop over chunks of an lm_head's logits: ``for at, logits in chunks`` writes the logits of one chunk
after the other to the same memory. The gradient of the logits overwrites them there, and
:meth:`HeadChunks.add` turns it into the gradients of the lm_head.

Other loops: the divergences also need the logits of a teacher; in vocabulary-parallel losses chunks overlap
with an exchange; the Triton kernel of fused_linear_ce computes logits before it knows the number of valid
rows; and the engine of compute capability 9.0 has a loop in C++.
"""

from ..math.computed_rows import computed_rows
from .float32 import Float32LMHeadGradients, float32_chunk_rows
from .lm_head import LMHeadGradients, Sm90LMHeadGradients, planned_rows


class HeadChunks:
    """The chunks of rows of a call.

    Args:
        x: (N, H) hidden states.
        head: :class:`.lm_head.LMHead`.
        rows: which of them are computed, :class:`.computed_rows.AllRows`.
        gradients: :class:`.lm_head.LMHeadGradients`.
        chunk_rows: the maximum number of rows of a chunk.
        memory: for the logits of a chunk; None: memory that the gradients provide.
    """

    def __init__(self, x, head, rows, gradients, chunk_rows, memory=None):
        self._input, self._head, self.rows, self.gradients = x, head, rows, gradients
        self._chunk_rows, self._memory = chunk_rows, memory
        rows.clear(gradients.input)

    @classmethod
    def plan(
        cls, x, target, head, needs_grad, exact, memory_budget, *, skip, total=None, memory=None, engine=False
    ):
        """Chunks with logits that fit a memory budget.

        Args:
            target: (N,)
            needs_grad: of input, weight and bias, and possibly of more.
            exact: the gradient of the weight is as exact as one float32 sum.
            skip: ignored rows are left out; for their number the host waits for the device.
            total: as for :class:`.lm_head.LMHeadGradients`.
            memory: (N, V) for the logits of all rows, which are one chunk; None: of the budget.
            engine: the gradients may come from :class:`.lm_head.Sm90LMHeadGradients`.
        """
        layer, needs_grad, with_gradients = (x, head.weight, head.bias), needs_grad[:3], any(needs_grad)
        gradients = None
        if engine and not head.float32_logits:
            gradients = Sm90LMHeadGradients.plan(*layer, needs_grad, memory_budget)
        if gradients is not None:
            chunk_rows = gradients.layout.chunk_rows
        elif head.float32_logits:
            chunk_rows, chunks = float32_chunk_rows(*layer[:2], with_gradients, memory_budget)
            gradients = Float32LMHeadGradients(*layer, needs_grad, chunks, exact, total)
        else:
            has_sum = needs_grad[1] and total is None
            chunk_rows, chunks = planned_rows(*layer[:2], has_sum, exact, memory_budget)
            gradients = LMHeadGradients(*layer, needs_grad, chunks, exact, total)
        rows = computed_rows(target, head.ignore_index, skip)
        return cls(x, head, rows, gradients, chunk_rows if memory is None else x.shape[0], memory)

    def __iter__(self):
        """Yields (index of its rows, its logits divided by the temperature) for each chunk. Call :meth:`add`
        before the next chunk."""
        memory = self._memory
        if memory is None:
            memory = self.gradients.new_logits(min(self._chunk_rows, max(self.rows.count, 1)))
        for at, logits in self.rows.chunks(self._chunk_rows, memory):
            self.x = self.rows.of(self._input, at)
            self._write_logits(at, logits)
            yield at, logits

    def _write_logits(self, at, logits):
        self._head.write_logits(self.x, logits)

    def add(self, at, dlogits):
        """Adds the gradients of the chunk, from the gradient of ``x @ weight.T + bias``."""
        self._add(at, dlogits, self.rows.ignored(at))

    def _add(self, at, dlogits, ignored, add_to_grad_x=None):
        """``add_to_grad_x(grad_x)`` may add another term to the gradient of the rows."""
        need_input, _, _ = self.gradients.needs_grad
        grad_x = self.rows.memory(self.gradients.input, at, self.x) if need_input else None
        self.gradients.add(self.x, dlogits, grad_x, ignored)
        if add_to_grad_x is not None:
            add_to_grad_x(grad_x)
        if need_input:
            self.rows.from_memory(self.gradients.input, at, grad_x)

    def add_logprobs(self, target, grad_logprobs, grad_entropy, statistics=None):
        """Adds the gradients of all chunks, from the gradients of the log-probabilities of targets and,
        unless None, of the entropies of all rows. ``statistics(at)``: the :class:`.lm_head.RowStatistics` of
        a chunk, if known."""
        for at, logits in self:
            y, with_entropy = target[at], grad_entropy is not None
            rows = self._head.statistics(logits, y, with_entropy) if statistics is None else statistics(at)
            chunk_grad_entropy = grad_entropy[at] if with_entropy else None
            self._head.write_gradient(logits, y, rows, grad_logprobs[at], chunk_grad_entropy)
            self.add(at, logits)

    def finish(self):
        """The gradients of input, weight and bias; empty unless needed."""
        return self.gradients.finish()
