# SPDX-License-Identifier: BSD-3-Clause
"""The op of vocabulary-parallel log-probabilities: schemas, kernels, fakes and autograd.

docs/guides/vocab_parallel.md says which data is exchanged and when.
"""

from typing import NamedTuple

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from ..._core.head.cross_entropy import LogProbMetrics
from ..._core.head.lm_head import HeadOptions, RowStatistics
from ..._core.head.results import LogProbRows, fake_gradients, fake_logprobs, new_rows
from ..._core.math.computed_rows import computed_rows, ignored_rows
from ..._core.math.dtypes import accumulate_dtype
from ..._core.op.autograd import differentiable
from ..._core.op.by_name import arguments_type, by_name
from ..._core.op.fakes import register_fake
from ..._core.op.forward_gradients import backward_of_logprobs
from ..._core.op.tensors import check_classes
from . import sm90_logprobs as _engine
from .agreement import may_have_empty_shards, meet, name_of_call, options_of
from .cross_entropy import Chunk, ChunkPlan, Float32Gradients, Gradients
from .shards import VocabShards, gather, layer_to_check

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
# keep: the forward keeps the exponentials for the backward where the engine runs and they fit the memory
# budget. stats, entropy: results of the forward, of rows over all classes. kept, kept_rows: results of a
# forward with `keep`.
_library.define(
    f"fused_linear_logprobs_backward(Tensor grad_logprobs, Tensor? grad_entropy, {_LAYER}, Tensor stats,"
    f" Tensor entropy, {_PLAN}, bool need_grad_input, bool need_grad_weight, bool need_grad_bias, Tensor? kept=None,"
    " Tensor? kept_rows=None)"
    " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)"
)


_FORWARD = torch.ops.liger_distributed.fused_linear_logprobs_forward.default


class _Shard(NamedTuple):
    """Statistics of rows over the classes of one process, or of every process after the exchange. Each
    process adds in the order of ranks, so all get the same bits."""

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
        # The op needs a class for rows that have their target on another process.
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
        """(:class:`RowStatistics`, log_sum_sq_probs, mean_logits) over all classes; empty unless
        requested."""
        reference = self.largest.amax(0)
        # A row of -inf: avoids inf - inf.
        finite = torch.where(reference == -torch.inf, 0.0, reference)
        distance = self.largest - finite
        total = (distance.exp() * self.total).sum(0)
        # The shares of the processes, without the log-sum-exp, which is rounded where logits are large.
        log_share = torch.where(self.total == 0.0, -torch.inf, distance + self.total.log()) - total.log()
        logprobs = (self.logprobs + log_share).amax(0)
        entropy = argmax = total.new_empty(0)
        if self.entropy is not None:
            # The entropy of a mixture: -sum(p log p) with p = share * q, q the softmax over the classes of a
            # process.
            share = log_share.exp()
            entropy = torch.where(share == 0.0, 0.0, share * (self.entropy - log_share)).sum(0)
        if self.argmax is not None:
            classes = _as_classes(self.argmax)
            is_highest = (self.highest == self.highest.amax(0)) | self.highest.isnan()
            argmax = torch.where(is_highest, classes, torch.iinfo(torch.int64).max).amin(0)
        squares = means = total.new_empty(0)
        if self.log_sum_sq_probs is not None:
            # The sum over the classes of a process is its share squared times the sum over its softmax.
            squares = (self.log_sum_sq_probs + 2 * log_share).logsumexp(0)
        if self.mean_logits is not None:
            means = self.mean_logits.sum(0)
        return RowStatistics(logprobs, entropy, argmax, torch.stack((reference, total))), squares, means


def _as_bits(classes, dtype):
    """Integers as floats of the same bits: a float32 has not enough digits for every class."""
    return classes.to(torch.int64 if dtype == torch.float64 else torch.int32).view(dtype)


def _as_classes(bits):
    return bits.view(torch.int64 if bits.dtype == torch.float64 else torch.int32).long()


# --- kernels ------------------------------------------------------------------------------------------------


def _bytes_per_logit(logits_dtype):
    """Bytes of a float32 logit and of its rounded gradient; None: the size of the input's dtype."""
    return None if logits_dtype is None else 6


@by_name(_FORWARD)
def _forward(a):
    options, requested, keep = HeadOptions.of_op(a), LogProbMetrics.of_op(a), a.keep
    input, weight, target, bias = a.input, a.weight, a.target, a.bias
    vocab_start, vocab_size, group_name = a.vocab_start, a.vocab_size, a.group_name
    budget, logits_dtype = options.memory_budget, options.logits_dtype
    op = name_of_call(LOGPROBS)
    layer = layer_to_check(op, weight, bias)
    options.check(op, input, layer[0], target, layer[1])
    check_classes(op, "target", target, vocab_size, options.ignore_index)
    classes, group = weight.shape[0], _resolve_process_group(group_name)
    shards = VocabShards(vocab_start, vocab_size, group_name)
    same = options_of(input, weight, bias, **options._asdict(), **requested._asdict())
    meet(LOGPROBS, group, shards, classes, target, same)
    rows, wide, empty = input.shape[0], accumulate_dtype(input.dtype), input.new_empty(0)
    every_process_has_classes = not may_have_empty_shards(LOGPROBS, group, shards, classes)
    if every_process_has_classes and _engine.supports(bias, options.softcap, logits_dtype, *requested[2:]):
        numbers = options.temperature, options.ignore_index, budget
        head = _engine.Head(input, weight, target, *numbers, vocab_start, vocab_size, group)
        keep = keep and head.keeps_exponentials()
        engine_plan = _engine.forward_plan(head, keep)
        if engine_plan is not None:
            found, *kept = _engine.forward(head, engine_plan, requested.entropy, requested.argmax, keep)
            of_target, no_metrics = (
                (found.logprobs, found.entropy, found.argmax),
                new_rows(input, False, False),
            )
            return *of_target, found.stats, *no_metrics, *kept
    head = options._replace(ignore_index=_IGNORED).head(weight, bias)
    ignored = ignored_rows(target, options.ignore_index)
    local = torch.where(ignored, _IGNORED, target.long() - vocab_start)
    # A target below the classes of a process must not look ignored.
    local = torch.where(~ignored & (local < 0), weight.shape[0], local)
    # The values of ignored rows, which no process computes: all have the same targets.
    computed = computed_rows(target, options.ignore_index, skip=True)
    results, stats = LogProbRows(input, requested), input.new_zeros(2, rows, dtype=wide)
    stats[1] = 1.0

    def finish(chunk):
        merged, *of_chunk = _Shard.unstacked(chunk.wait(), requested).merged()
        left_out, y = ignored[chunk.rows], target[chunk.rows]
        # A target that is no class: only a CUDA tensor can have one.
        found = torch.where((y >= 0) & (y < vocab_size), merged.logprobs, torch.nan)
        largest, total = merged.stats
        stats[0, chunk.rows] = largest.masked_fill_(left_out, 0.0)
        stats[1, chunk.rows] = total.masked_fill_(left_out, 1.0)
        values = found, merged.entropy, merged.argmax, *of_chunk
        for value, if_left_out in zip(values, (0.0, 0.0, -1, 0.0, 0.0), strict=True):
            if value.numel():
                value.masked_fill_(left_out, if_left_out)
        results.write(chunk.rows, *values)

    plan = ChunkPlan.of(
        input, group, vocab_size, False, True, budget, computed.count, _bytes_per_logit(logits_dtype)
    )
    logits_of = plan.new_logits(input, weight.shape[0], dtype=logits_dtype)

    def start(index, chunk):
        logits = logits_of(index)
        if classes == 0:
            shard = _Shard.without_classes(logits.new_empty(logits.shape[0], dtype=wide), requested)
        else:
            head.write_logits(input[chunk], logits)
            shard = _Shard.of(head, logits, local[chunk], vocab_start, vocab_size, requested)
        return Chunk(chunk, logits, *gather(shard.stacked(), group))

    plan.run(computed, start, finish)
    *of_target, squares, means = results.all
    return *of_target, stats, squares, means, empty, input.new_empty(0, dtype=wide)


@by_name(torch.ops.liger_distributed.fused_linear_logprobs_backward.default)
def _backward_kernel(a):
    options, needs_grad, grad_entropy = HeadOptions.of_op(a), a.needs_grad, a.grad_entropy
    input, weight, target, bias, stats, entropy = a.input, a.weight, a.target, a.bias, a.stats, a.entropy
    vocab_start, vocab_size, group_name = a.vocab_start, a.vocab_size, a.group_name
    budget, logits_dtype = options.memory_budget, options.logits_dtype
    layer = layer_to_check(LOGPROBS, weight, bias)
    options.check(LOGPROBS, input, layer[0], target, layer[1])
    group = _resolve_process_group(group_name)
    shards = VocabShards(vocab_start, vocab_size, group_name)
    every_process_has_classes = not may_have_empty_shards(LOGPROBS, group, shards, weight.shape[0])
    if every_process_has_classes and _engine.supports(bias, options.softcap, logits_dtype):
        numbers = options.temperature, options.ignore_index, budget
        head = _engine.Head(input, weight, target, *numbers, vocab_start, vocab_size, group)
        empty = input.new_empty(0)
        kept, kept_rows = (empty if t is None else t for t in (a.kept, a.kept_rows))
        engine_plan = _engine.backward_plan(head, needs_grad[:2], grad_entropy is not None, kept.numel() > 0)
        if engine_plan is not None:
            grads = a.grad_logprobs, grad_entropy
            found = _engine.backward(
                head, engine_plan, needs_grad[:2], stats, entropy, kept, kept_rows, grads
            )
            return *found, empty
    head = options.head(weight, bias)
    computed = computed_rows(target, options.ignore_index, skip=True)
    counts = computed.count, _bytes_per_logit(logits_dtype)
    plan = ChunkPlan.of(input, group, vocab_size, needs_grad[1], options.exact, budget, *counts)
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
            entropy_grad = grad_entropy[chunk] if with_entropy else None
            grads = a.grad_logprobs[chunk], entropy_grad
            head.write_gradient(logits, y, statistics, *grads, vocab_start)
        gradients.add(chunk, logits, x)
    return gradients.finish()


_library.impl("fused_linear_logprobs_forward", _forward, "CompositeExplicitAutograd")
_library.impl("fused_linear_logprobs_backward", _backward_kernel, "CompositeExplicitAutograd")


# --- fakes --------------------------------------------------------------------------------------------------


@register_fake("liger_distributed::fused_linear_logprobs_forward")
@by_name(_FORWARD)
def _(a):
    (rows, _), wide = a.input.shape, accumulate_dtype(a.input.dtype)
    kept, kept_rows = _engine.kept_shapes(rows, a.weight.shape[0]) if a.keep else ((0,), (0,))
    logprobs, entropy, argmax, *metrics = fake_logprobs(a)
    stats = a.input.new_empty((2, rows), dtype=wide)
    kept = a.input.new_empty(kept), a.input.new_empty(kept_rows, dtype=wide)
    return logprobs, entropy, argmax, stats, *metrics, *kept


register_fake("liger_distributed::fused_linear_logprobs_backward")(
    by_name(torch.ops.liger_distributed.fused_linear_logprobs_backward.default)(fake_gradients)
)


# --- autograd -----------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    a = arguments_type(_FORWARD)(*inputs)
    _logprobs, entropy, argmax, stats, *others = output
    ctx.save_for_backward(a.input, a.weight, a.target, a.bias, stats, entropy, *others[-2:])
    ctx.options = HeadOptions.of_op(a)
    ctx.shards = a.vocab_start, a.vocab_size, a.group_name
    ctx.mark_non_differentiable(argmax, stats, *others, *(() if a.return_entropy else (entropy,)))
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_logprobs, grad_entropy, needed):
    *layer, stats, entropy, kept, kept_rows = ctx.saved_tensors
    options = ctx.options
    rows = *options.of_logits, stats, entropy, *options[3:], *ctx.shards
    backward = torch.ops.liger_distributed.fused_linear_logprobs_backward.default
    return backward(grad_logprobs, grad_entropy, *layer, *rows, *needed, kept, kept_rows)


_backward = backward_of_logprobs(_FORWARD, LOGPROBS, ("input", "weight", "bias"), _gradients)
logprobs_op = differentiable(_FORWARD, _setup, _backward)
