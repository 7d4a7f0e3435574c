"""The op of vocabulary-parallel log-probabilities: schemas, kernels, fakes and autograd.

docs/vocab_parallel.md says which data is exchanged and when.
"""

from collections import deque
from typing import NamedTuple

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from .._core.arguments import check_classes
from .._core.autograd import at_positions, differentiable, differentiable_once
from .._core.computed_rows import computed_rows, ignored_rows
from .._core.cross_entropy_math import LogProbMetrics
from .._core.dtypes import accumulate_dtype
from .._core.fakes import register_fake
from .._core.lm_head import LMHead, RowStatistics, check_head
from . import _sm90_logprob_shards as _engine
from ._agreement import may_have_empty_shards, meet, name_of_call, options_of
from ._vocab_parallel_ops import Chunk, ChunkPlan, Float32Gradients, Gradients
from ._vocab_shards import VocabShards, gather, layer_to_check

LOGPROBS = "fused_linear_logprobs"
# In targets that count from the first class of a process; no class has this index.
_IGNORED = -100

_library = torch.library.Library("liger_distributed", "FRAGMENT")
_LAYER = "Tensor input, Tensor weight, Tensor target, Tensor? bias, float temperature, int ignore_index, float? softcap"
_PLAN = (
    "ScalarType? accum_dtype, int? memory_budget, ScalarType? logits_dtype, int vocab_start, int vocab_size,"
    " str group_name"
)
_library.define(
    f"fused_linear_logprobs_forward({_LAYER}, {_PLAN}, bool return_entropy, bool return_argmax,"
    " bool return_log_sum_sq_probs=False, bool return_mean_logits=False, bool keep=False)"
    " -> (Tensor logprobs, Tensor entropy, Tensor argmax, Tensor stats, Tensor log_sum_sq_probs, Tensor mean_logits,"
    " Tensor kept, Tensor kept_rows)"
)
# keep: the forward keeps the exponentials for the backward where the engine runs and they fit the memory budget.
# stats, entropy: results of the forward, of rows over all classes. kept, kept_rows: those of a forward with `keep`.
_library.define(
    f"fused_linear_logprobs_backward(Tensor grad_logprobs, Tensor? grad_entropy, {_LAYER}, Tensor stats,"
    f" Tensor entropy, {_PLAN}, bool need_grad_input, bool need_grad_weight, bool need_grad_bias, Tensor? kept=None,"
    " Tensor? kept_rows=None)"
    " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)"
)


class _Shard(NamedTuple):
    """Statistics of rows over the classes of one process, or of every process after the exchange. Each process adds in
    the order of ranks, so all get the same bits."""

    largest: torch.Tensor  # logit
    total: torch.Tensor  # sum of exp(z - largest); 0 on a process whose logits are all -inf
    logprobs: torch.Tensor  # of the target; -inf on the processes without it
    entropy: torch.Tensor | None
    highest: torch.Tensor | None  # the largest logit before the softcap
    argmax: torch.Tensor | None  # its class, an int32 with the bits of a float
    log_sum_sq_probs: torch.Tensor | None
    mean_logits: torch.Tensor | None  # of one process: its term of the mean over all classes

    @classmethod
    def of(cls, head, logits, target, vocab_start, vocab_size, requested):
        """target: of the rows, counted from the first class of this process."""
        classes = logits.shape[1]
        present = (target >= 0) & (target < classes)
        ignored = target == _IGNORED
        # The op needs a class for the rows whose target another process has.
        rows = head.statistics(logits, torch.where(present | ignored, target, 0), *requested[:2])
        largest, total = rows.stats
        # Without a class that has probability here, the statistics are NaN.
        empty = largest == -torch.inf
        total = torch.where(empty, 0.0, total)
        logprobs = torch.where(present & ~empty, rows.logprobs, -torch.inf)
        entropy = torch.where(empty, 0.0, rows.entropy) if requested.entropy else None
        highest = argmax = None
        if requested.argmax:
            column = rows.argmax.clamp(min=0)
            highest = logits.gather(1, column.unsqueeze(1)).squeeze(1).to(largest.dtype)
            argmax = _as_bits(column + vocab_start, largest.dtype)
        squares = means = None
        if any(requested[2:]):
            squares, means = head.metrics(logits, target, *requested[2:])
        if squares is not None:
            squares = torch.where(empty, -torch.inf, squares)
        if means is not None:
            means = means * (classes / vocab_size)
        return cls(largest, total, logprobs, entropy, highest, argmax, squares, means)

    @classmethod
    def without_classes(cls, row, requested):
        """row: a tensor with one value per row of the dtype of the statistics."""
        nothing, zero = torch.full_like(row, -torch.inf), torch.zeros_like(row)
        last = torch.full_like(row, torch.iinfo(torch.int32).max, dtype=torch.int64)
        return cls(
            nothing,
            zero,
            nothing,
            zero if requested.entropy else None,
            *((nothing, _as_bits(last, row.dtype)) if requested.argmax else (None, None)),
            nothing if requested.log_sum_sq_probs else None,
            zero if requested.mean_logits else None,
        )

    def stacked(self):
        return torch.stack([t for t in self if t is not None])

    @classmethod
    def unstacked(cls, gathered, requested):
        parts = iter(gathered.unbind(1))
        flags = (True, True, True, requested.entropy, requested.argmax, *requested[1:])
        return cls(*(next(parts) if flag else None for flag in flags))

    def merged(self):
        """(:class:`RowStatistics`, log_sum_sq_probs, mean_logits) over all classes; empty unless requested."""
        reference = self.largest.amax(0)
        # A row of -inf: avoids inf - inf.
        finite = torch.where(reference == -torch.inf, 0.0, reference)
        distance = self.largest - finite
        total = (distance.exp() * self.total).sum(0)
        # Of the processes, without the log-sum-exp, which is rounded where logits are large.
        log_share = torch.where(self.total == 0.0, -torch.inf, distance + self.total.log()) - total.log()
        logprobs = (self.logprobs + log_share).amax(0)
        entropy = argmax = total.new_empty(0)
        if self.entropy is not None:
            # The entropy of a mixture: -sum(p log p) with p = share * q, q the softmax over the classes of a process.
            share = log_share.exp()
            entropy = torch.where(share == 0.0, 0.0, share * (self.entropy - log_share)).sum(0)
        if self.argmax is not None:
            classes = _as_classes(self.argmax)
            is_highest = (self.highest == self.highest.amax(0)) | self.highest.isnan()
            argmax = torch.where(is_highest, classes, torch.iinfo(torch.int64).max).amin(0)
        squares = means = total.new_empty(0)
        if self.log_sum_sq_probs is not None:
            # Of the classes of a process the sum is its share squared times that of its softmax.
            squares = (self.log_sum_sq_probs + 2 * log_share).logsumexp(0)
        if self.mean_logits is not None:
            means = self.mean_logits.sum(0)
        return RowStatistics(logprobs, entropy, argmax, torch.stack((reference, total))), squares, means


def _as_bits(classes, dtype):
    """Integers as floats of the same bits: a float32 has not enough digits for every class."""
    return classes.to(torch.int64 if dtype == torch.float64 else torch.int32).view(dtype)


def _as_classes(bits):
    return bits.view(torch.int64 if bits.dtype == torch.float64 else torch.int32).long()


# --- kernels ------------------------------------------------------------------------------------------------------


def _bytes_per_logit(logits_dtype):
    """Those of float32 logits and of their rounded gradient; None: those of the input's dtype."""
    return None if logits_dtype is None else 6


def _forward(
    input, weight, target, bias, temperature, ignore_index, softcap, accum_dtype, memory_budget, logits_dtype,
    vocab_start, vocab_size, group_name, return_entropy, return_argmax, return_log_sum_sq_probs=False,
    return_mean_logits=False, keep=False,
):  # fmt: skip
    requested = LogProbMetrics(return_entropy, return_argmax, return_log_sum_sq_probs, return_mean_logits)
    op = name_of_call(LOGPROBS)
    layer = layer_to_check(op, weight, bias)
    check_head(
        op, input, layer[0], target, layer[1], temperature, softcap, accum_dtype, memory_budget, logits_dtype
    )
    check_classes(op, "target", target, vocab_size, ignore_index)
    classes, group = weight.shape[0], _resolve_process_group(group_name)
    shards = VocabShards(vocab_start, vocab_size, group_name)
    same = options_of(
        input, weight, bias, memory_budget, temperature=temperature, ignore_index=ignore_index, softcap=softcap,
        accum_dtype=accum_dtype, logits_dtype=logits_dtype, **requested._asdict(),
    )  # fmt: skip
    meet(LOGPROBS, group, shards, classes, target, same)
    rows, wide, empty = input.shape[0], accumulate_dtype(input.dtype), input.new_empty(0)
    every_process_has_classes = not may_have_empty_shards(LOGPROBS, group, shards, classes)
    if every_process_has_classes and _engine.supports(bias, softcap, logits_dtype, *requested[2:]):
        head = _engine.Head(
            input, weight, target, temperature, ignore_index, memory_budget, vocab_start, vocab_size, group
        )
        keep = keep and head.keeps_exponentials()
        engine_plan = _engine.forward_plan(head, keep)
        if engine_plan is not None:
            found, *kept = _engine.forward(head, engine_plan, return_entropy, return_argmax, keep)
            no_metrics = input.new_empty(0, dtype=wide), input.new_empty(0, dtype=wide)
            return found.logprobs, found.entropy, found.argmax, found.stats, *no_metrics, *kept
    head = LMHead(weight, bias, temperature, _IGNORED, softcap, logits_dtype is not None)
    ignored = ignored_rows(target, ignore_index)
    local = torch.where(ignored, _IGNORED, target.long() - vocab_start)
    # A target below the classes of a process must not look ignored.
    local = torch.where(~ignored & (local < 0), weight.shape[0], local)
    # The values of ignored rows, which no process computes: all have the same targets.
    computed = computed_rows(target, ignore_index, skip=True)
    logprobs, stats = input.new_zeros(rows, dtype=wide), input.new_zeros(2, rows, dtype=wide)
    stats[1] = 1.0
    entropy = input.new_zeros(rows if return_entropy else 0, dtype=wide)
    argmax = target.new_full((rows if return_argmax else 0,), -1, dtype=torch.int64)
    metrics = [input.new_zeros(rows if flag else 0, dtype=wide) for flag in requested[2:]]

    def finish(chunk):
        merged, *of_chunk = _Shard.unstacked(chunk.wait(), requested).merged()
        left_out, y = ignored[chunk.rows], target[chunk.rows]
        # A target that is no class: only a CUDA tensor can have one.
        found = torch.where((y >= 0) & (y < vocab_size), merged.logprobs, torch.nan)
        logprobs[chunk.rows] = found.masked_fill_(left_out, 0.0)
        largest, total = merged.stats
        stats[0, chunk.rows] = largest.masked_fill_(left_out, 0.0)
        stats[1, chunk.rows] = total.masked_fill_(left_out, 1.0)
        if return_entropy:
            entropy[chunk.rows] = merged.entropy.masked_fill_(left_out, 0.0)
        if return_argmax:
            argmax[chunk.rows] = merged.argmax.masked_fill_(left_out, -1)
        for result, values in zip(metrics, of_chunk, strict=True):
            if result.numel():
                result[chunk.rows] = values.masked_fill_(left_out, 0.0)

    plan = ChunkPlan.of(
        input, group, vocab_size, False, None, memory_budget, computed.count, _bytes_per_logit(logits_dtype)
    )
    logits_of = plan.new_logits(input, weight.shape[0], dtype=logits_dtype)
    pending = deque()
    for index, chunk in enumerate(map(computed.at, plan.slices)):
        logits = logits_of(index)
        if classes == 0:
            shard = _Shard.without_classes(logits.new_empty(logits.shape[0], dtype=wide), requested)
        else:
            head.write_logits(input[chunk], logits)
            shard = _Shard.of(head, logits, local[chunk], vocab_start, vocab_size, requested)
        pending.append(Chunk(chunk, logits, *gather(shard.stacked(), group)))
        if len(pending) == plan.in_flight:
            finish(pending.popleft())
    while pending:
        finish(pending.popleft())
    return logprobs, entropy, argmax, stats, *metrics, empty, input.new_empty(0, dtype=wide)


def _backward_kernel(
    grad_logprobs, grad_entropy, input, weight, target, bias, temperature, ignore_index, softcap, stats, entropy,
    accum_dtype, memory_budget, logits_dtype, vocab_start, vocab_size, group_name, need_grad_input, need_grad_weight,
    need_grad_bias, kept=None, kept_rows=None,
):  # fmt: skip
    layer = layer_to_check(LOGPROBS, weight, bias)
    check_head(
        LOGPROBS,
        input,
        layer[0],
        target,
        layer[1],
        temperature,
        softcap,
        accum_dtype,
        memory_budget,
        logits_dtype,
    )
    group = _resolve_process_group(group_name)
    needs_grad = need_grad_input, need_grad_weight, need_grad_bias
    shards = VocabShards(vocab_start, vocab_size, group_name)
    every_process_has_classes = not may_have_empty_shards(LOGPROBS, group, shards, weight.shape[0])
    if every_process_has_classes and _engine.supports(bias, softcap, logits_dtype):
        head = _engine.Head(
            input, weight, target, temperature, ignore_index, memory_budget, vocab_start, vocab_size, group
        )
        empty = input.new_empty(0)
        kept, kept_rows = (empty if t is None else t for t in (kept, kept_rows))
        engine_plan = _engine.backward_plan(head, needs_grad[:2], grad_entropy is not None, kept.numel() > 0)
        if engine_plan is not None:
            grads = grad_logprobs, grad_entropy
            found = _engine.backward(
                head, engine_plan, needs_grad[:2], stats, entropy, kept, kept_rows, grads
            )
            return *found, empty
    head = LMHead(weight, bias, temperature, ignore_index, softcap, logits_dtype is not None)
    computed = computed_rows(target, ignore_index, skip=True)
    plan = ChunkPlan.of(
        input,
        group,
        vocab_size,
        needs_grad[1],
        accum_dtype,
        memory_budget,
        computed.count,
        _bytes_per_logit(logits_dtype),
    )
    kind = Gradients if logits_dtype is None else Float32Gradients
    gradients = kind(input, weight, bias, group, plan.accumulator, needs_grad, computed)
    spare = gradients.spare if logits_dtype is None else None
    logits_of = plan.new_logits(input, weight.shape[0], spare, logits_dtype)
    for index, chunk in enumerate(map(computed.at, plan.slices)):
        logits, x, y = logits_of(index), input[chunk], target[chunk]
        if weight.shape[0]:
            head.write_logits(x, logits)
            with_entropy = grad_entropy is not None
            statistics = RowStatistics(None, entropy[chunk] if with_entropy else None, None, stats[:, chunk])
            chunk_grad_entropy = grad_entropy[chunk] if with_entropy else None
            head.write_gradient(logits, y, statistics, grad_logprobs[chunk], chunk_grad_entropy, vocab_start)
        gradients.add(chunk, logits, x)
    return gradients.finish()


_library.impl("fused_linear_logprobs_forward", _forward, "CompositeExplicitAutograd")
_library.impl("fused_linear_logprobs_backward", _backward_kernel, "CompositeExplicitAutograd")


# --- fakes --------------------------------------------------------------------------------------------------------


@register_fake("liger_distributed::fused_linear_logprobs_forward")
def _(input, *arguments):
    (rows, _hidden), wide = input.shape, accumulate_dtype(input.dtype)
    # Behind the 12 other arguments; the last three have defaults.
    return_entropy, return_argmax, *metrics = (*arguments, False, False, False)[12:16]
    keep = len(arguments) == 17 and arguments[16]
    kept, kept_rows = _engine.kept_shapes(rows, arguments[0].shape[0]) if keep else ((0,), (0,))
    return (
        input.new_empty((rows,), dtype=wide),
        input.new_empty((rows if return_entropy else 0,), dtype=wide),
        input.new_empty((rows if return_argmax else 0,), dtype=torch.int64),
        input.new_empty((2, rows), dtype=wide),
        *(input.new_empty((rows if flag else 0,), dtype=wide) for flag in metrics),
        input.new_empty(kept),
        input.new_empty(kept_rows, dtype=wide),
    )


@register_fake("liger_distributed::fused_linear_logprobs_backward")
def _(grad_logprobs, grad_entropy, input, weight, target, bias, *arguments):
    # Behind 11 other arguments; the last two have defaults.
    need_grad_input, need_grad_weight, need_grad_bias = arguments[11:14]
    return (
        input.new_empty(input.shape if need_grad_input else (0,)),
        weight.new_empty(weight.shape if need_grad_weight else (0,)),
        weight.new_empty((weight.shape[0],) if need_grad_bias and bias is not None else (0,)),
    )


# --- autograd -----------------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    input, weight, target, bias, *options, with_entropy, _, _, _, _keep = inputs
    _logprobs, entropy, argmax, stats, *others = output
    ctx.save_for_backward(input, weight, target, bias, stats, entropy, *others[-2:])
    ctx.options, ctx.arguments = options, len(inputs)
    ctx.mark_non_differentiable(argmax, stats, *others, *(() if with_entropy else (entropy,)))
    ctx.set_materialize_grads(False)


@differentiable_once(LOGPROBS)
def _backward(ctx, grad_logprobs, grad_entropy, *_grad_others):
    if grad_logprobs is None and grad_entropy is None:
        return (None,) * ctx.arguments
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(grad_entropy)
    input, weight, target, bias, stats, entropy, *kept = ctx.saved_tensors
    positions = (0, 1, 3)  # of input, weight and bias among the arguments
    needed = [ctx.needs_input_grad[i] for i in positions]
    grads = torch.ops.liger_distributed.fused_linear_logprobs_backward.default(
        grad_logprobs, grad_entropy, input, weight, target, bias, *ctx.options[:3], stats, entropy, *ctx.options[3:],
        *needed, *kept,
    )  # fmt: skip
    return at_positions(ctx.arguments, positions, grads, needed)


logprobs_op = differentiable(
    torch.ops.liger_distributed.fused_linear_logprobs_forward.default, _setup, _backward
)
