"""vocab_parallel_fused_linear_ce on the wgmma engine of compute capability 9.0: compiled steps, and communication.

A chunk of rows takes three compiled steps (csrc/linear_ce/sm90/shards.cu): exponentials of the logits with their sums,
the row rule with the input gradient of the shard in float32, and the weight gradient. Before the first chunk the
processes add the logits of the targets, which are the references of the exponentials. Between the first two steps they
gather the sums; while the third one runs they add the input gradients. The host never waits for the device, except
in the first call of a group.

Selected by the build option LIGER_EXPERIMENTAL; without it nothing here runs.
"""

import os
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._core.build_info import build_info
from .._core.sm90_plan import LinearCePlan, plan_chunks_sm90
from ..backend import FAMILIES
from ._vocab_shards import VocabShards, gather

# kPanel, and kTileM times kCluster, of csrc/linear_ce/sm90/tile.h.
_PANEL, _PAIR_OF_TILES = 128, 256


def _round_up(size, multiple):
    return -(-size // multiple) * multiple


class CompiledSteps:
    """The steps as ops: ``dense``, ``memory``, ``begin``, ``exponentials``, ``rule``, ``grad_weight``, ``finish``.

    Tests replace :data:`steps` by an implementation in torch.
    """

    def __getattr__(self, name):
        return getattr(torch.ops.liger_sm90, name if name == "dense" else f"shard_{name}").default

    @staticmethod
    def are_built():
        """Whether this build has them: the same on all processes, as builds are."""
        return build_info()["experimental"] == "1" and hasattr(torch.ops.liger_sm90, "shard_begin")

    @staticmethod
    def take(input):
        """Whether these hidden states may be for them: what does not depend on the machine of a process."""
        return input.is_cuda and input.dtype == torch.bfloat16

    @staticmethod
    def clusters(input):
        """Clusters of two blocks that the engine runs at a time on this device; 0: it does not run."""
        if FAMILIES["fused_linear_ce"].choice != "cuda":
            return 0
        return torch.ops.liger_sm90.shard_clusters.default(input)


# The class whose instance makes the steps of a call.
steps = CompiledSteps

# {process group: {(device, LIGER_WGMMA): clusters}}
_agreed: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()


def _agreed_clusters(input, group):
    """The least number of clusters of the devices of a group, on each of its processes; 0: some device cannot.

    Plans depend on it, and processes with different plans would wait for each other for ever. The first call of a
    group communicates and waits for the device, so under CUDA graph capture it returns 0.
    """
    known = _agreed.setdefault(group, {})
    key = input.device, os.environ.get("LIGER_WGMMA")
    if key not in known:
        if input.is_cuda and torch.cuda.is_current_stream_capturing():
            return 0
        least = torch.tensor(steps.clusters(input), device=input.device)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(least, dist.ReduceOp.MIN, group)
        known[key] = int(least)
    return known[key]


def plan_of(input, weight, bias, options, group, vocab_size, needs_grad, accum_dtype, memory_budget):
    """The :class:`LinearCePlan` of a call, or None if the GEMMs of torch compute it.

    The same on all processes: it depends on arguments that are equal everywhere, on the build, and on a number that
    the group has agreed on. In particular it does not depend on the number of classes of this process.
    """
    if not (steps.are_built() and steps.take(input)) or weight.dtype != input.dtype:
        return None
    if bias is not None or options.label_smoothing != 0.0 or input.shape[0] == 0:
        return None
    clusters = _agreed_clusters(input, group)
    if clusters == 0:
        return None
    rank_classes = -(-vocab_size // dist.get_world_size(group))
    plan = plan_chunks_sm90(
        *input.shape,
        rank_classes,
        *needs_grad[:2],
        accum_dtype in (None, torch.float32),
        memory_budget,
        clusters,
    )
    return plan if plan.chunks else None


class Results(NamedTuple):
    """Per row, float32; a metric that was not requested has no elements."""

    loss: torch.Tensor
    z_loss: torch.Tensor
    logprobs: torch.Tensor


class _SumOverRanks:
    """The input gradient: one float32 buffer, in which the processes add the gradients of one chunk at a time.

    ``gradient``: None if it is not needed; then the buffer has no elements.
    """

    def __init__(self, gradient, like, group, rows):
        self._gradient, self._group = gradient, group
        self._memory = like.new_empty((0 if gradient is None else rows, like.shape[1]), dtype=torch.float32)
        self._pending = None

    def of(self, chunk):
        """The part of the buffer for the rows of a chunk, after the sum of the chunk before has been rounded."""
        self.round()
        return self._memory[: chunk.rows]

    def start(self, chunk):
        """Begins to add the gradients of the chunk."""
        part, work = self._memory[: chunk.rows], None
        if self._gradient is not None and dist.get_world_size(self._group) > 1:
            work = dist.all_reduce(part, group=self._group, async_op=True)
        self._pending = chunk, part, work

    def round(self):
        """Rounds the sum of the chunk that was started last to its rows of the gradient."""
        if self._gradient is not None and self._pending is not None:
            chunk, part, work = self._pending
            if work is not None:
                work.wait()
            self._gradient[chunk.first : chunk.first + chunk.rows].copy_(part)
            self._pending = None


def run(input, weight, target, options, shards, group, plan: LinearCePlan, metrics, needs_grad):
    """The results of ``liger_distributed::fused_linear_ce_forward`` by a plan of :func:`plan_of`."""
    call = steps()
    need_input, need_weight, _ = needs_grad
    shards = VocabShards(*shards)
    input, weight, target = call.dense(input), call.dense(weight), target.contiguous()
    (rows, hidden), classes = input.shape, weight.shape[0]
    numbers, most_rows = plan.encode(), max(chunk.rows for chunk in plan.chunks)

    def floats(*shape):
        return input.new_empty(shape, dtype=torch.float32)

    def buffer(size):
        return input.new_empty(size, dtype=torch.uint8)

    state_bytes, workspace_bytes = call.memory(input, weight, numbers, need_input, need_weight)
    panels = -(-classes // _PANEL) + plan.panel_offset
    panel_bytes = panels * plan.workspace_panel_bytes if need_input or need_weight else 0
    state, target_logit = buffer(state_bytes), floats(_round_up(rows, _PAIR_OF_TILES))
    # The gathered rows; those of a chunk become their gradient when all its GEMMs have read them.
    gathered_rows = input.new_empty(rows, hidden)
    grad_weight = input.new_empty((panels * _PANEL, hidden) if need_weight else 0)
    results = Results(
        floats(rows), *(floats(rows if flag else 0) for flag in (metrics.z_loss, metrics.logprobs))
    )
    denominator = floats()
    ce_weight, token_weight = (
        None if w is None else w.to(torch.float32).contiguous()
        for w in (options.ce_weight, options.token_weight)
    )
    call.begin(
        input, weight, target, ce_weight, options.denominator, options.ignore_index, options.softcap,
        options.reduction == "mean", shards.start, shards.vocab, state, target_logit, gathered_rows, denominator,
        *results,
    )  # fmt: skip
    if dist.get_world_size(group) > 1:
        dist.all_reduce(target_logit, group=group)
    rule = (
        target, ce_weight, token_weight, denominator, options.ignore_index, options.lse_square_scale, shards.vocab,
    )  # fmt: skip
    memory = (
        state, target_logit, gathered_rows, grad_weight, buffer(panel_bytes), buffer(workspace_bytes),
    )  # fmt: skip
    grad_input = _SumOverRanks(gathered_rows if need_input else None, input, group, most_rows)
    for index, chunk in enumerate(plan.chunks):
        step = input, weight, options.softcap, need_input, numbers, index, *memory
        sums = floats(2, chunk.rows)
        call.exponentials(*step, sums)
        gathered, work = gather(sums, group)
        if work is not None:
            work.wait()
        call.rule(*rule, gathered, dist.get_rank(group), *step, grad_input.of(chunk), *results)
        grad_input.start(chunk)
        if need_weight:
            call.grad_weight(*step)
    grad_input.round()
    if need_input:
        call.finish(state, gathered_rows)
    empty = input.new_empty(0)
    loss, z_loss = results.loss, results.z_loss
    if options.reduction != "none":
        loss = loss.sum() / denominator
        z_loss = z_loss.sum() / denominator if metrics.z_loss else z_loss
    return (
        loss, z_loss, floats(0), target.new_empty(0, dtype=torch.int64), results.logprobs, floats(0),
        gathered_rows if need_input else empty, grad_weight[:classes] if need_weight else empty, empty.clone(),
    )  # fmt: skip
