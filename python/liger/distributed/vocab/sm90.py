# SPDX-License-Identifier: BSD-3-Clause
"""fused_linear_ce of a sharded vocabulary on the wgmma engine of compute capability 9.0: steps and
communication. :mod:`liger.distributed.vocab.sm90_logprobs` has log-probabilities.

A chunk of rows takes three compiled steps (csrc/lm_head/sm90/shards/fused_linear_ce.cu): exponentials of the
logits with their sums, the row rule with the input gradient of the shard in float32, and the weight gradient.
Before the first chunk the processes add the logits of the targets, which are the references of the
exponentials. Between the first two steps they gather the sums, before the third one they add the input
gradients. The host never waits for the device, except in the first call of a group.
"""

import os
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..._core.head.sm90_plan import ENGINE, plan_chunks_sm90, round_up
from ..._core.op.registration import FAMILIES
from .shards import VocabShards, gathered


class CompiledSteps:
    """The steps as ops: ``dense``, ``memory``, ``begin``, ``exponentials``, ``rule``, ``grad_weight``,
    ``finish``, and for log-probabilities ``logprobs_begin``, ``logprobs``, ``logprob_gradients``.

    Tests replace :data:`steps` by an implementation in torch.
    """

    def __getattr__(self, name):
        return getattr(torch.ops.liger_sm90, name if name == "dense" else f"shard_{name}").default

    @staticmethod
    def are_built():
        """True if this build has the steps; all processes have the same build."""
        return hasattr(torch.ops.liger_sm90, "shard_begin")

    @staticmethod
    def take(input):
        """True if the steps may take these hidden states, as far as that does not depend on the machine."""
        return input.is_cuda and input.dtype == torch.bfloat16

    @staticmethod
    def clusters(input):
        """Clusters of two blocks that the engine runs at a time on this device; 0: it does not run."""
        if FAMILIES["fused_linear_ce"].choice != "cuda":
            return 0
        return torch.ops.liger_sm90.shard_clusters.default(input)


# The class of the steps of a call.
steps = CompiledSteps

# {process group: {(device, LIGER_WGMMA, backend of the op): clusters}}
_agreed: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()


def _agreed_clusters(input, group):
    """The minimum number of clusters over the devices of a group, on each of its processes; 0: some device
    cannot.

    Plans depend on it, and processes with different plans would wait for each other for ever. The first call
    of a group communicates and waits for the device, so under CUDA graph capture it returns 0.
    """
    known = _agreed.setdefault(group, {})
    key = input.device, os.environ.get("LIGER_WGMMA"), FAMILIES["fused_linear_ce"].choice
    if key not in known:
        if input.is_cuda and torch.cuda.is_current_stream_capturing():
            return 0
        least = torch.tensor(steps.clusters(input), device=input.device)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(least, dist.ReduceOp.MIN, group)
        known[key] = int(least)
    return known[key]


def clusters_for(input, weight, bias, group):
    """The minimum number of clusters over the devices of a group, or 0 where its processes do not take the
    engine.

    The same on all of them: it depends on arguments that are equal everywhere, on the build, and on a number
    that the group has agreed on. In particular it does not depend on the number of classes of this process.
    """
    if not (steps.are_built() and steps.take(input)) or weight.dtype != input.dtype:
        return 0
    if bias is not None or input.shape[0] == 0:
        return 0
    return _agreed_clusters(input, group)


def rank_classes(vocab_size, group):
    """The classes of a process that plans are made for, equal on all processes."""
    return -(-vocab_size // dist.get_world_size(group))


def engine_plan(input, weight, bias, group, vocab_size, needs_grad, exact, memory_budget):
    """The :class:`LinearCePlan` of a pass over all rows, or None if the GEMMs of torch compute it; the same
    on all processes. ``needs_grad``: of input and weight."""
    clusters = clusters_for(input, weight, bias, group)
    if clusters == 0:
        return None
    problem = *input.shape, rank_classes(vocab_size, group), *needs_grad
    plan = plan_chunks_sm90(*problem, exact, memory_budget, clusters)
    return plan if plan.chunks else None


def plan_of(input, weight, bias, options, group, vocab_size, needs_grad):
    """:func:`engine_plan` of a loss."""
    if options.label_smoothing != 0.0 or (options.softcap or 0.0) > ENGINE.max_softcap:
        return None
    limits = options.exact, options.memory_budget
    return engine_plan(input, weight, bias, group, vocab_size, needs_grad[:2], *limits)


class ShardCall:
    """Memory and steps of a call on one process, between which the processes communicate.

    Attributes:
        target_logit: float32, of the gathered rows; the first step writes the logits of targets among the
            classes of this process. All processes then need the sum.
        rows: the gathered rows; the rows of a chunk become their gradient when all its GEMMs have read them.
    """

    def __init__(
        self,
        input,
        weight,
        target,
        shards,
        plan,
        needs_grad,
        *,
        softcap=None,
        temperature=1.0,
        metrics=False,
        kept=None,
    ):
        """``needs_grad``: of input and weight, in this call. ``metrics``: entropies or argmax are requested.
        ``kept``: the memory of the exponentials, if they outlive the call."""
        self._steps = steps()
        self._need_input, self._need_weight = needs_grad
        self._shards, self._plan, self._with_metrics = VocabShards(*shards), plan, metrics
        self._softcap, self._temperature = softcap, temperature
        input, weight = self._steps.dense(input), self._steps.dense(weight)
        self._operands, self._target = (input, weight), target.contiguous()
        (rows, hidden), self._classes = input.shape, weight.shape[0]
        self._numbers = plan.encode()
        state_bytes, workspace_bytes = self._steps.memory(input, weight, self._numbers, *needs_grad, metrics)
        panels = -(-self._classes // ENGINE.panel) + plan.panel_offset
        if kept is None:
            kept = self._bytes(panels * plan.workspace_panel_bytes if any(needs_grad) else 0)
        self.target_logit = self._floats(round_up(rows, ENGINE.cluster_rows))
        self.rows = input.new_empty(rows, hidden)
        self._grad_weight = input.new_empty((panels * ENGINE.panel, hidden) if self._need_weight else 0)
        self._state = self._bytes(state_bytes)
        workspaces = kept, self._bytes(workspace_bytes)
        self._memory = self._state, self.target_logit, self.rows, self._grad_weight, *workspaces

    def _floats(self, *shape):
        return self._operands[0].new_empty(shape, dtype=torch.float32)

    def _bytes(self, size):
        return self._operands[0].new_empty(size, dtype=torch.uint8)

    def new_sum(self):
        """Memory for the input gradients of any chunk in float32; without elements if they are not needed."""
        most = max(chunk.rows for chunk in self._plan.chunks) if self._need_input else 0
        return self._floats(most, self.rows.shape[1])

    def exponentials(self, index, keep=False):
        """The numbers of the rows of a chunk that the processes exchange, (numbers, rows): references and
        sums of exponentials; with metrics also sums for the entropy, and two words with the largest logit and
        its class."""
        numbers = ENGINE.rank_numbers_with_metrics if self._with_metrics else ENGINE.rank_numbers
        sums = self._floats(numbers, self._plan.chunks[index].rows)
        head = *self._operands, self._softcap, self._temperature, self._shards.start
        flags = keep, self._need_input, self._numbers, index
        self._steps.exponentials(*head, *flags, *self._memory, sums)
        return sums

    def add_grad_weight(self, index):
        if self._need_weight:
            self._steps.grad_weight(
                *self._operands, self._softcap, self._need_input, self._numbers, index, *self._memory
            )

    def gradients(self):
        """(grad_input, grad_weight) after the last chunk, when ``rows`` has the sums of input gradients;
        without elements if they are not needed."""
        if self._need_input:
            self._steps.finish(self._state, self.rows)
        empty = self.rows.new_empty
        return (
            self.rows if self._need_input else empty(0),
            self._grad_weight[: self._classes] if self._need_weight else empty(0),
        )


class Results(NamedTuple):
    """Per row, float32; a metric that was not requested has no elements."""

    loss: torch.Tensor
    z_loss: torch.Tensor
    logprobs: torch.Tensor


class Call(ShardCall):
    """A loss: :meth:`begin`, then :meth:`exponentials`, :meth:`apply_rule` and :meth:`add_grad_weight` for
    each chunk of the plan in turn, then :meth:`results`."""

    def __init__(self, input, weight, target, options, shards, rank, plan, metrics, needs_grad):
        super().__init__(input, weight, target, shards, plan, needs_grad[:2], softcap=options.softcap)
        self.options, self._rank, self._metrics = options, rank, metrics
        rows = input.shape[0]
        requested = metrics.z_loss, metrics.logprobs
        self._results = Results(
            self._floats(rows), *(self._floats(rows if flag else 0) for flag in requested)
        )
        self._denominator = self._floats()
        self._ce_weight, self._token_weight = (
            None if w is None else w.to(torch.float32).contiguous()
            for w in (options.ce_weight, options.token_weight)
        )

    def begin(self):
        options = self.options
        rule = options.denominator, options.ignore_index, options.softcap, options.reduction == "mean"
        where = self._shards.start, self._shards.vocab
        memory = self._state, self.target_logit, self.rows, self._denominator
        layer = *self._operands, self._target, self._ce_weight
        self._steps.begin(*layer, *rule, *where, *memory, *self._results)

    def apply_rule(self, index, gathered, grad_input):
        """Losses and metrics of a chunk, and into ``grad_input`` (rows, hidden) the input gradient of this
        process.

        ``gathered``: (processes, 2, rows), the results of :meth:`exponentials` of all processes.
        """
        options = self.options
        weights = self._ce_weight, self._token_weight, self._denominator
        rule = options.ignore_index, options.lse_square_scale, self._shards.vocab, gathered, self._rank
        plan = self._softcap, self._need_input, self._numbers, index
        memory = *self._memory, grad_input, *self._results
        self._steps.rule(self._target, *weights, *rule, *self._operands, *plan, *memory)

    def results(self):
        """The results of ``liger_distributed::fused_linear_ce_forward``. ``rows`` then has the sums of input
        gradients."""
        gradients = self.gradients()
        loss, z_loss, logprobs = self._results
        if self.options.reduction != "none":
            loss = loss.sum() / self._denominator
            z_loss = z_loss.sum() / self._denominator if self._metrics.z_loss else z_loss
        predicted = self._target.new_empty(0, dtype=torch.int64)
        rows = self._floats(0), predicted, logprobs, self._floats(0)
        return loss, z_loss, *rows, *gradients, self.rows.new_empty(0)


def sum_target_logits(call, group):
    if dist.get_world_size(group) > 1:
        dist.all_reduce(call.target_logit, group=group)


def add_gradients(call, index, chunk, part, group):
    """Adds the gradients of a chunk. ``part``: the input gradient of this process; no elements if it is not
    needed."""
    # The all-reduce must not overlap with the GEMM of the weight gradient: the blocks of the GEMM take whole
    # SMs, so where it starts first on one device, the all-reduce of another device waits for a whole GEMM.
    if part.numel() and dist.get_world_size(group) > 1:
        dist.all_reduce(part, group=group)
    call.add_grad_weight(index)
    # The GEMM above has read the gathered rows.
    if part.numel():
        call.rows[chunk.first : chunk.first + chunk.rows].copy_(part)


def run(input, weight, target, options, shards, group, plan, metrics, needs_grad):
    """The results of ``liger_distributed::fused_linear_ce_forward`` by a plan of :func:`plan_of`."""
    rank = dist.get_rank(group)
    call = Call(input, weight, target, options, shards, rank, plan, metrics, needs_grad)
    call.begin()
    sum_target_logits(call, group)
    memory = call.new_sum()
    for index, chunk in enumerate(plan.chunks):
        part = memory[: chunk.rows]
        call.apply_rule(index, gathered(call.exponentials(index), group), part)
        add_gradients(call, index, chunk, part, group)
    return call.results()
