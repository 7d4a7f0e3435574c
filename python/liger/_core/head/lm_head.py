# SPDX-License-Identifier: BSD-3-Clause
"""The lm_head, a linear layer from hidden states to classes, computed in chunks of rows.

A loss that depends on the logits z of a row only through the log-probability of the target and the entropy H
has

    dL/dz[v] = g * ([v is the target] - p[v]) - h * p[v] * (log p[v] + H),    g = dL/dlogp, h = dL/dH

so the gradient overwrites a chunk of logits, given two numbers per row.
"""

from typing import NamedTuple

import torch

from ..math.dtypes import accumulate_dtype
from ..math.float32_matmul import write_float32_linear
from ..math.matmul import product, without_ignored, write_linear
from ..op.arguments import POSITIVE, check
from ..op.by_name import options_among
from ..op.registration import FAMILIES
from .cross_entropy import CEOptions, Metrics
from .sm90_plan import LinearBackwardPlan


class RowStatistics(NamedTuple):
    """Statistics of rows of logits z, (rows,) each. entropy and argmax are empty unless requested. Ignored
    rows have log-probability 0, entropy 0 and argmax -1."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor
    stats: torch.Tensor  # (2, rows): the largest logit, and the sum of exp(z - largest)


class HeadOptions(NamedTuple):
    """The options of an lm_head, with the names that they have everywhere."""

    temperature: float = 1.0
    ignore_index: int = -100
    softcap: float | None = None
    accum_dtype: torch.dtype | None = None
    memory_budget: int | None = None
    logits_dtype: torch.dtype | None = None

    @classmethod
    def of_op(cls, arguments):
        return options_among(cls, arguments)

    @property
    def of_logits(self):
        """(temperature, ignore_index, softcap)"""
        return self[:3]

    @property
    def exact(self):
        """True if the gradient of the weight is as exact as one float32 sum."""
        return self.accum_dtype in (None, torch.float32)

    @property
    def float32(self):
        """True if logits are float32."""
        return self.logits_dtype is not None

    def head(self, weight, bias):
        return LMHead(weight, bias, *self.of_logits, self.float32)

    def check(self, op, input, weight, target, bias):
        """Raises RuntimeError for mismatched shapes, dtypes or devices, ValueError for a temperature out of
        range."""
        check(op, "temperature", self.temperature, POSITIVE)
        # The check of fused_linear_ce has the same conditions.
        limits = {"accum_dtype": self.accum_dtype, "memory_budget": self.memory_budget}
        options = CEOptions(softcap=self.softcap, reduction="sum", **limits)
        options.check_linear(input, weight, target, bias, op, self.logits_dtype)


class LMHead(NamedTuple):
    """The projection from hidden states to classes, with the temperature and softcap of its logits.

    With ``float32_logits`` :meth:`write_logits` writes float32 as exact as IEEE arithmetic, and the weight
    and bias may be float32 with hidden states of 16 bits.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float
    ignore_index: int
    softcap: float | None
    float32_logits: bool = False

    @property
    def _cap(self):
        return None if self.softcap is None else self.softcap / self.temperature

    def write_logits(self, x, out):
        """Writes the logits divided by the temperature, before the softcap. The GEMM includes the division,
        so logits are rounded once."""
        write = write_float32_linear if self.float32_logits else write_linear
        write(x, self.weight, self.bias, out, 1.0 / self.temperature)

    def statistics(self, logits, target, entropy=False, argmax=False):
        """The :class:`RowStatistics` of a chunk of logits."""
        options = CEOptions(ignore_index=self.ignore_index, softcap=self._cap, reduction="none")
        metrics = Metrics(argmax=argmax, logprobs=True, entropy=entropy)
        _, _, _, predicted, logprobs, entropies, stats, _, _ = torch.ops.liger.cross_entropy_forward.default(
            logits, target, *options.of_logits, *metrics, False
        )
        return RowStatistics(logprobs, entropies, predicted, stats)

    def metrics(self, logits, target, log_sum_sq_probs, mean_logits):
        """(log of the sum over classes of the squared probabilities, mean over classes of the logits) of a
        chunk of logits, (rows,) each; None unless requested. 0 in ignored rows."""
        stats = torch.ops.liger.cross_entropy_stats.default(
            logits, target, None, 0, self.ignore_index, self._cap, mean_logits, log_sum_sq_probs
        )
        return (
            stats[-1].log() - 2 * stats[1].log() if log_sum_sq_probs else None,
            stats[0] + stats[3] / logits.shape[1] if mean_logits else None,
        )

    def write_gradient(self, logits, target, rows, grad_logprob, grad_entropy=None, vocab_start=0):
        """Overwrites logits with the gradient of ``x @ weight.T + bias``.

        ``rows`` are their statistics. ``vocab_start`` is the first class of a shard of the classes; then the
        statistics are over all classes.
        """
        neg_grad = grad_logprob * (-1.0 / self.temperature)
        largest, total = rows.stats
        coef_exp, coef_log = neg_grad, None
        if grad_entropy is not None:
            coef_log = grad_entropy * (-1.0 / self.temperature)
            # log p = (z - largest) - log(total)
            coef_exp = torch.addcmul(neg_grad, coef_log, rows.entropy - total.log())
            coef_log = coef_log / total
        rules = coef_exp / total, neg_grad, None, None, vocab_start, self.ignore_index, self._cap, coef_log
        torch.ops.liger.cross_entropy_stats_backward_.default(logits, target, largest, *rules)


class LMHeadGradients:
    """The gradients of a linear layer from the gradients of its logits, chunk by chunk.

    ``total``: a float32 sum that gets the gradient of the weight added, instead of a new tensor with it.
    Without :meth:`finish`.
    """

    def __init__(self, x, weight, bias, needs_grad, chunks, exact, total=None):
        need_input, need_weight, need_bias = needs_grad
        wide = accumulate_dtype(x.dtype)
        self.head_weight = weight
        self.input = x.new_empty(x.shape if need_input else 0)
        self.weight = weight.new_empty(weight.shape if need_weight and total is None else 0)
        self.bias = x.new_zeros(weight.shape[0] if need_bias and bias is not None else 0, dtype=wide)
        self._bias_dtype = weight.dtype if bias is None else bias.dtype
        self.needs_grad = need_input, need_weight, self.bias.numel() > 0
        self.separate_sum = total is None and need_weight and chunks > 1 and exact and wide != weight.dtype
        self.sum = torch.empty_like(self.weight, dtype=wide) if self.separate_sum else self.weight
        self.chunks_added = 0
        if total is not None:
            # A sum of earlier chunks.
            self.sum, self.chunks_added = total, 1

    def new_logits(self, rows):
        """Memory for rows of logits: the weight gradient's, if its sum is a separate buffer and it is large
        enough."""
        classes = self.head_weight.shape[0]
        # Tensor cores need rows that start at multiples of 16 bytes. Not on a CPU: its 16-bit GEMMs may read
        # the padding between rows, and zero times NaN is NaN.
        per_16_bytes = 16 // self.weight.element_size() if self.weight.is_cuda else 1
        stride = -(-classes // per_16_bytes) * per_16_bytes
        in_grad_weight = self.separate_sum and rows * stride <= self.weight.numel()
        memory = (
            self.weight.view(-1)[: rows * stride] if in_grad_weight else self.weight.new_empty(rows * stride)
        )
        return memory.view(rows, stride)[:, :classes]

    def new_logits_with_aux(self, rows, aux_rows):
        """(memory for the logits of a chunk of ``rows`` rows or of a longer first chunk, auxiliary rows of
        logits). :meth:`add` may overwrite the auxiliary rows."""
        memory = self.new_logits(rows + aux_rows)
        return memory[:rows], memory[rows:]

    def unwritten_weight_rows(self):
        """The memory of the weight gradient as rows of logits, before the first :meth:`add`; None if it is in
        use."""

    def _valid_rows(self, x, ignored, grad_x):
        """x with zeros in ignored rows, for the weight gradient. The copy uses the memory of the gradient of
        x, which is written later, if that gradient is needed."""
        need_input, need_weight, _ = self.needs_grad
        return without_ignored(x, ignored, grad_x if need_input else None) if need_weight else x

    def add(self, x, dlogits, grad_x, ignored):
        """Adds the gradients of a chunk.

        Args:
            x: (rows, H) hidden states; ignored rows may have NaN.
            dlogits: (rows, V) the gradient of the logits.
            grad_x: (rows, H) memory for the gradient of x, which may be x itself.
            ignored: (rows,) mask of ignored rows, or None.
        """
        need_input, need_weight, _ = self.needs_grad
        if need_weight:
            valid = self._valid_rows(x, ignored, grad_x)
            product(dlogits.t(), valid, self.sum, add=self.chunks_added > 0)
        if need_input:
            product(dlogits, self.head_weight, grad_x)
        self._add_bias(dlogits)
        self.chunks_added += 1

    def _add_bias(self, dlogits):
        if self.needs_grad[2]:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)

    def finish(self):
        """(of the input, of the weight, of the bias) after the last chunk."""
        if self.chunks_added == 0:
            self.sum.zero_()
        if self.separate_sum:
            self.weight.copy_(self.sum)
        return self.input, self.weight, self.bias.to(self._bias_dtype)


class Sm90LMHeadGradients(LMHeadGradients):
    """The same by the wgmma GEMMs of compute capability 9.0. The weight gradient is accumulated in its own
    memory, as exactly as in float32.

    Attributes:
        layout: :class:`LinearBackwardPlan`.
    """

    @classmethod
    def plan(
        cls, x, weight, bias, needs_grad, memory_budget, aux_rows=0, group_rows=1, aux_in_grad_weight=False
    ):
        """The gradients, or None if the engine cannot compute them or neither input nor weight needs one.

        Args:
            aux_rows: 16-bit rows of auxiliary logits per row of dlogits, two for each float32 logits GEMM.
            group_rows: chunks are multiples of it.
            aux_in_grad_weight: the auxiliary logits of the first chunk use :meth:`unwritten_weight_rows`.
        """
        if not any(needs_grad[:2]) or not x.is_cuda or FAMILIES["fused_linear_ce"].choice != "cuda":
            return None
        budget = torch.ops.liger.default_memory_budget() if memory_budget is None else memory_budget
        plan = LinearBackwardPlan._make(
            torch.ops.liger_sm90.linear_backward_plan.default(
                x, weight, aux_rows, group_rows, budget, *needs_grad[:2], aux_in_grad_weight
            )
        )
        return cls(x, weight, bias, needs_grad, plan) if plan.first_rows else None

    def __init__(self, x, weight, bias, needs_grad, plan):
        super().__init__(x, weight, bias, needs_grad, 1, False)
        self.layout = plan
        self._chunks = 1 + -(-max(x.shape[0] - plan.first_rows, 0) // plan.chunk_rows)
        self._scale_exponents = x.new_empty(plan.scale_bytes, dtype=torch.uint8)
        self._workspace = None
        self._dense_weight = torch.ops.liger_sm90.dense.default(weight)

    def new_logits_with_aux(self, rows, aux_rows):
        if aux_rows == 0:
            return super().new_logits_with_aux(rows, aux_rows)
        classes = self.head_weight.shape[0]
        free = max(aux_rows, -(-self.layout.workspace_bytes // (2 * classes)))
        memory = self.new_logits(max(rows + free, self.layout.first_rows))
        self._workspace = memory[rows : rows + free].view(-1).view(torch.uint8)
        return memory[: max(rows, self.layout.first_rows)], memory[rows : rows + aux_rows]

    def unwritten_weight_rows(self):
        if self.chunks_added > 0:
            return None
        classes = self.head_weight.shape[0]
        rows = self.weight.numel() // classes
        return self.weight.view(-1)[: rows * classes].view(rows, classes)

    def add(self, x, dlogits, grad_x, ignored):
        need_input, _, _ = self.needs_grad
        first = self.chunks_added == 0
        self.chunks_added += 1
        plan, workspace = self.layout, self._workspace
        # A longer first chunk has no auxiliary rows.
        if workspace is None or (first and plan.first_rows > plan.chunk_rows):
            size = plan.first_workspace_bytes if first else plan.workspace_bytes
            workspace = x.new_empty(size, dtype=torch.uint8)
        operands = dlogits, self._valid_rows(x, ignored, grad_x), self._dense_weight
        k_splits, last = plan.first_k_splits if first else plan.k_splits, self.chunks_added == self._chunks
        sums = self.weight, self._scale_exponents, workspace, grad_x if need_input else self.input
        torch.ops.liger_sm90.linear_backward.default(*operands, k_splits, first, last, *sums)
        self._add_bias(dlogits)


def planned_rows(input, weight, need_grad_weight, exact, memory_budget, element_size=None, rows=None):
    """(rows of a chunk, number of chunks) from the planner of all lm_head ops.

    ``element_size``: bytes of the chunk per logit, by default the size of an element of the input. ``rows``:
    how many rows of the input are computed, by default all.
    """
    (all_rows, hidden), vocab, size = input.shape, weight.shape[0], element_size or input.element_size()
    chunk_rows, chunks, _, _ = torch.ops.liger.plan_chunks(
        all_rows if rows is None else rows, hidden, vocab, size, need_grad_weight, exact, memory_budget
    )
    return chunk_rows, chunks
