# SPDX-License-Identifier: BSD-3-Clause
"""fused_linear_logprobs of a sharded vocabulary on the wgmma engine of compute capability 9.0: the order of
steps.

csrc/lm_head/sm90/shards/logprobs.cu has the steps. In the forward the processes add the logits of
the targets and gather the sums of each chunk, as for the loss. The backward knows the sum of each row over
all classes, so its exponentials need no exchange; the processes add the input gradients of each chunk. It
computes the exponentials again, unless the forward has kept them. The host never waits for the device, except
in the first call of a group.
"""

from typing import NamedTuple

import torch

from ..._core.head.kept_logits import budget_or_default, exponentials_bytes
from ..._core.head.sm90_plan import ENGINE, LinearCePlan, PlannedChunk, round_up
from .shards import gathered
from .sm90 import ShardCall, add_gradients, engine_plan, rank_classes, sum_target_logits


class Head(NamedTuple):
    """The arguments of forward and backward: on all processes the same, but for ``weight`` and
    ``vocab_start``."""

    input: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    temperature: float
    ignore_index: int
    memory_budget: int | None
    vocab_start: int
    vocab_size: int
    group: object  # the ProcessGroup

    @property
    def shards(self):
        return self.vocab_start, self.vocab_size, ""

    def plan(self, needs_grad, memory_budget=None):
        """:func:`.sm90.engine_plan`."""
        budget = self.memory_budget if memory_budget is None else memory_budget
        layer = self.input, self.weight, None
        return engine_plan(*layer, self.group, self.vocab_size, needs_grad, True, budget)

    def keeps_exponentials(self):
        """True if a forward keeps the exponentials of all rows for its backward: where they fit the memory
        budget."""
        needed = exponentials_bytes(self.input.shape[0], rank_classes(self.vocab_size, self.group))
        return needed <= budget_or_default(self.memory_budget) and self.plan((True, True)) is not None


def supports(bias, softcap, logits_dtype, log_sum_sq_probs=False, mean_logits=False):
    """True if the engine has the options of a call."""
    return bias is None and softcap is None and logits_dtype is None and not (log_sum_sq_probs or mean_logits)


# --- kept exponentials --------------------------------------------------------------------------------------


def one_chunk(rows, k_splits=1):
    """The plan of all rows at once: plan_one_chunk_sm90() of csrc/lm_head/sm90/planner.cpp."""
    panel_bytes = round_up(rows, ENGINE.tile_rows) * ENGINE.panel * 2
    return LinearCePlan(0, panel_bytes, 0, 0, (PlannedChunk(0, rows, k_splits),))


def kept_shapes(rows, classes):
    """Shapes of the exponentials, in the dtype of the input, and of the float32 numbers of the rows."""
    return (exponentials_bytes(rows, classes) // 2,), (rows, ENGINE.kept_numbers)


# --- one process --------------------------------------------------------------------------------------------


class Results(NamedTuple):
    """Per row; what was not requested has no elements."""

    logprobs: torch.Tensor
    stats: torch.Tensor  # (2, rows): references of exponentials, and their sums over all classes
    entropy: torch.Tensor
    argmax: torch.Tensor


class LogProbCall(ShardCall):
    """The state that forward and backward share."""

    def __init__(self, head: Head, plan, needs_grad, **memory):
        super().__init__(
            *head[:3], head.shards, plan, needs_grad, temperature=float(head.temperature), **memory
        )
        self._ignore_index = head.ignore_index

    def _begin(self, results):
        head = self._target, self._ignore_index, self._temperature, self._shards.start, self._shards.vocab
        memory = self._state, self.target_logit, self.rows
        self._steps.logprobs_begin(*self._operands, *head, *memory, *results)

    def _results(self, rows, entropy, argmax):
        classes = self._target.new_empty(rows if argmax else 0, dtype=torch.int64)
        entropies = self._floats(rows if entropy else 0)
        return Results(self._floats(rows), self._floats(2, rows), entropies, classes)


class Forward(LogProbCall):
    """:meth:`begin`, then :meth:`exponentials` and :meth:`write_results` for each chunk of the plan in turn.

    Attributes:
        results: of all rows.
        kept, kept_rows: what a backward may use instead of computing the exponentials again; without elements
            unless ``keep``.
    """

    def __init__(self, head: Head, plan, entropy, argmax, keep):
        input, (rows, _) = head.input, head.input.shape
        exponentials, numbers = kept_shapes(rows, head.weight.shape[0]) if keep else ((0,), (0,))
        self.kept = input.new_empty(exponentials)
        self.kept_rows = input.new_empty(numbers, dtype=torch.float32)
        super().__init__(
            head, plan, (False, False), metrics=entropy or argmax, kept=self.kept if keep else None
        )
        self.results, self._keep = self._results(rows, entropy, argmax), keep

    def begin(self):
        self._begin(self.results)

    def exponentials(self, index):
        return super().exponentials(index, self._keep)

    def write_results(self, index, gathered):
        """``gathered``: the results of :meth:`exponentials` of all processes, (processes, numbers, rows)."""
        head = self._target, self._ignore_index, self._shards.vocab, gathered, *self._operands, self._numbers
        self._steps.logprobs(*head, index, *self._memory, *self.results, self.kept_rows)


class Backward(LogProbCall):
    """:meth:`begin`, then :meth:`input_gradient` and :meth:`add_grad_weight` for each chunk of the plan in
    turn, then :meth:`gradients`."""

    def __init__(self, head: Head, plan, needs_grad, stats, entropy, kept, kept_rows, grads):
        """``grads``: upstream gradients of the log-probabilities, and of the entropies or None."""
        self._upstream = [None if grad is None else grad.contiguous() for grad in grads]
        # The gradients of entropies need a second matrix.
        in_place = kept_rows.numel() > 0 and grads[1] is None
        super().__init__(head, plan, needs_grad, kept=kept if in_place else None)
        self._of_forward = stats, entropy, kept, kept_rows

    def begin(self):
        self._begin(self._results(0, False, False))

    def input_gradient(self, index, grad_input):
        """The gradients of the logits of a chunk, and into ``grad_input`` (rows, hidden) the input gradient
        of this process."""
        rows = *self._upstream, self._target, self._shards.vocab, self._temperature, *self._of_forward
        plan = self._need_input, self._numbers, index
        self._steps.logprob_gradients(*rows, *self._operands, *plan, *self._memory, grad_input)


# --- all processes ------------------------------------------------------------------------------------------


def forward_plan(head: Head, keep):
    """The plan of the forward; None: the GEMMs of torch compute it."""
    return one_chunk(head.input.shape[0]) if keep else head.plan((False, False))


def forward(head: Head, plan, entropy, argmax, keep):
    """(:class:`Results`, kept, kept_rows)"""
    call = Forward(head, plan, entropy, argmax, keep)
    call.begin()
    sum_target_logits(call, head.group)
    for index in range(len(plan.chunks)):
        call.write_results(index, gathered(call.exponentials(index), head.group))
    return call.results, call.kept, call.kept_rows


def backward_plan(head: Head, needs_grad, with_entropy, keeps):
    """The plan of the backward; None: the GEMMs of torch compute it."""
    if not keeps:
        return head.plan(needs_grad)
    # A budget that has room for the kept rows is not spent a second time on a copy of them.
    budget = min(budget_or_default(head.memory_budget), budget_or_default(None)) if with_entropy else None
    plan = head.plan(needs_grad, memory_budget=budget)
    if with_entropy or plan is None:
        return plan
    # The split-K of its input gradient, if that would also have been one chunk.
    splits = plan.chunks[0].k_splits if len(plan.chunks) == 1 else 1
    return one_chunk(head.input.shape[0], splits)


def backward(head: Head, plan, needs_grad, stats, entropy, kept, kept_rows, grads):
    """(grad_input, grad_weight)"""
    call = Backward(head, plan, needs_grad, stats, entropy, kept, kept_rows, grads)
    call.begin()
    if kept_rows.numel() == 0:
        sum_target_logits(call, head.group)
    memory = call.new_sum()
    for index, chunk in enumerate(plan.chunks):
        part = memory[: chunk.rows]
        call.input_gradient(index, part)
        add_gradients(call, index, chunk, part, head.group)
    return call.gradients()
