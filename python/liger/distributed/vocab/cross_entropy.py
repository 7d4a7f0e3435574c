# SPDX-License-Identifier: BSD-3-Clause
"""The ops of vocabulary-parallel cross entropy, with and without the lm_head: schemas, kernels, fakes and
autograd.

docs/guides/vocab_parallel.md says which data is exchanged and when; docs/guides/cross_entropy.md defines
every term.
"""

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from ..._core.head.cross_entropy import CEOptions, Metrics
from ..._core.head.lm_head import LMHeadGradients
from ..._core.head.results import fake_gradients, fake_results
from ..._core.head.sm90_plan import ENGINE
from ..._core.math.computed_rows import computed_rows
from ..._core.math.dtypes import accumulate_dtype
from ..._core.math.float32_matmul import float32_product
from ..._core.math.matmul import product, without_ignored, write_linear
from ..._core.op.autograd import differentiable, differentiable_once
from ..._core.op.by_name import arguments_type, by_name
from ..._core.op.fakes import register_fake
from ..._core.op.loss_rows import refuse_gradients
from ..._core.op.tensors import check_classes
from ...ops.fused_linear_ce.lora import differentiable_ce
from . import sm90
from .agreement import may_have_empty_shards, meet, name_of_call, options_of
from .rows import Rows, check_class_weights
from .shards import VocabShards, gather, gathered, layer_to_check

FUSED, PLAIN = "fused_linear_ce", "cross_entropy"

_library = torch.library.Library("liger_distributed", "DEF")
_OPTIONS = (
    "Tensor target, {bias}Tensor? ce_weight, Tensor? token_weight, Tensor? denominator, int ignore_index,"
    " float label_smoothing, float lse_square_scale, float? softcap, str reduction, {plan}int vocab_start,"
    " int vocab_size, str group_name, bool return_z_loss, bool return_logprobs"
)
_RESULTS = "Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor argmax, Tensor logprobs, Tensor entropy"
# liger::fused_linear_ce_forward for a shard of the classes of weight and bias.
_library.define(
    "fused_linear_ce_forward(Tensor input, Tensor weight, "
    + _OPTIONS.format(bias="Tensor? bias, ", plan="ScalarType? accum_dtype, int? memory_budget, ")
    + ", bool need_grad_input, bool need_grad_weight, bool need_grad_bias)"
    f" -> ({_RESULTS}, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)"
)
# coefficients (3 or 4, rows): arguments of liger::cross_entropy_stats_backward for an upstream gradient of 1.
_library.define(
    "cross_entropy_forward(Tensor logits, "
    + _OPTIONS.format(bias="", plan="")
    + f") -> ({_RESULTS}, Tensor coefficients)"
)


# --- the fused op -------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A chunk of rows whose statistics are being exchanged."""

    rows: slice | torch.Tensor  # what selects them in a tensor of all rows
    logits: torch.Tensor
    gathered: torch.Tensor
    work: object
    x: torch.Tensor | None = None  # the rows of the input; None: no gradient needs them

    def wait(self):
        if self.work is not None:
            self.work.wait()
        return self.gathered


class Gradients(LMHeadGradients):
    """The gradients of a call, chunk by chunk. The gradient of input is a sum over processes: an asynchronous
    float32 all-reduce that overlaps with the next chunk, then rounded once."""

    def __init__(self, input, weight, bias, group, accumulator, needs_grad, computed):
        super().__init__(input, weight, bias, needs_grad, 1, False)
        self.group, self.computed, self.alone = group, computed, dist.get_world_size(group) == 1
        computed.clear(self.input)
        if accumulator:
            self.separate_sum, self.sum = True, torch.empty_like(self.weight, dtype=torch.float32)
        self.reducing = None

    @property
    def spare(self):
        """The memory of the weight gradient if its sum is a separate buffer, else None."""
        return self.weight if self.separate_sum else None

    def add(self, at, dlogits, x):
        """Adds the gradients of a chunk. ``at``: what selects its rows in a tensor of all rows; ``x``: its
        rows of the input, which may be overwritten if they are a copy."""
        need_input, need_weight, _ = self.needs_grad
        memory = self.computed.memory(self.input, at, x) if need_input else None
        if need_input and not self.alone:
            self._reduce_input(at, dlogits)
        if need_weight:
            # The copy uses the memory of the gradient of these rows, which is written later.
            valid = without_ignored(x, self.computed.ignored(at), memory)
            self._product(dlogits.t(), valid, self.sum, add=self.chunks_added > 0)
        self._add_bias(dlogits)
        if need_input and self.alone:
            self._product(dlogits, self.head_weight, memory)
            self.computed.from_memory(self.input, at, memory)
        self.chunks_added += 1

    def _product(self, a, b, out, add=False):
        product(a, b, out, add)

    def _reduce_input(self, at, dlogits):
        shape = dlogits.shape[0], self.input.shape[1]
        partial = self.input.new_empty(shape, dtype=accumulate_dtype(self.input.dtype))
        if self.head_weight.shape[0] == 0:
            partial.zero_()
        else:
            self._product(dlogits, self.head_weight, partial)
        work = dist.all_reduce(partial, group=self.group, async_op=True)
        self._wait_for_reduction()
        self.reducing = at, partial, work

    def _wait_for_reduction(self):
        if self.reducing is not None:
            at, total, work = self.reducing
            work.wait()
            self.computed.write(self.input, at, total)
            self.reducing = None

    def finish(self):
        self._wait_for_reduction()
        return super().finish()


def _chunks(rows, chunk_rows, chunks):
    """(slices of rows, number of chunks in flight).

    A chunk is split into two halves where that costs no speed: the exchange of the statistics of one half
    overlaps with the GEMM of the next.
    """
    in_flight, half = 1, -(-chunk_rows // 2)
    if chunks > 1 and half >= ENGINE.full_speed_rows:
        chunk_rows, in_flight = half, 2
    return [slice(i, min(i + chunk_rows, rows)) for i in range(0, rows, max(chunk_rows, 1))], in_flight


class Float32Gradients(Gradients):
    """:class:`Gradients` from gradients of the logits in float32.

    Where hidden states and weight are bfloat16, these are rounded once to that dtype, as operands of both
    GEMMs. In float16 they would underflow, so there, and with a float32 weight, the products are products of
    float32 numbers.
    """

    def __init__(self, input, weight, bias, group, accumulator, needs_grad, computed):
        self.narrow = input.dtype == weight.dtype == torch.bfloat16
        separate = accumulator if self.narrow else weight.dtype != torch.float32
        super().__init__(input, weight, bias, group, separate, needs_grad, computed)

    def add(self, at, dlogits, x):
        super().add(at, dlogits.to(torch.bfloat16) if self.narrow else dlogits, x)

    def _product(self, a, b, out, add=False):
        if self.narrow:
            return super()._product(a, b, out, add)
        if out.dtype == torch.float32:
            return float32_product(a, b, out, add)
        wide = out.new_empty(out.shape, dtype=torch.float32)
        float32_product(a, b, wide)
        out.copy_(wide)


class ChunkPlan(NamedTuple):
    """The chunks of a call, the same on every process."""

    slices: list[slice]
    in_flight: int  # chunks whose logits are in memory at a time
    accumulator: int  # bytes of a separate sum of the weight gradient

    @classmethod
    def of(
        cls, input, group, vocab_size, need_grad_weight, exact, memory_budget, rows=None, element_size=None
    ):
        """``rows``: how many rows of the input are computed; None: all. ``element_size``: bytes of a chunk
        per logit; None: the size of an element of the input."""
        hidden = input.shape[1]
        rows = input.shape[0] if rows is None else rows
        # Planned from sizes that are equal on all processes, so that all run the same collectives.
        rank_classes = -(-vocab_size // dist.get_world_size(group))
        size = element_size or input.element_size()
        chunk_rows, chunks, _, accumulator = torch.ops.liger.plan_chunks(
            rows, hidden, rank_classes, size, need_grad_weight, exact, memory_budget
        )
        return cls(*_chunks(rows, chunk_rows, chunks), accumulator)

    def run(self, computed, start, finish):
        """Calls ``finish(start(index, rows))`` for every chunk, with as many chunks between the two as are in
        flight.

        ``index``: the number of the chunk; ``rows``: what selects its rows in a tensor of all rows.
        """
        pending = deque()
        for index, rows in enumerate(map(computed.at, self.slices)):
            pending.append(start(index, rows))
            if len(pending) == self.in_flight:
                finish(pending.popleft())
        while pending:
            finish(pending.popleft())

    def new_logits(self, input, classes, spare=None, dtype=None):
        """A function of a chunk's number that returns the memory of its logits.

        spare: a tensor whose memory is used instead if it is large enough. dtype: None: the dtype of the
        input.
        """
        dtype = dtype or input.dtype
        # Rows of logits start at multiples of 16 bytes, for tensor cores. Not on a CPU: its 16-bit GEMMs may
        # read the memory between rows, and NaN there.
        per_16_bytes = 16 // dtype.itemsize if input.is_cuda else 1
        stride = -(-classes // per_16_bytes) * per_16_bytes
        size = max((s.stop - s.start for s in self.slices), default=0) * stride
        in_spare = spare is not None and self.in_flight * size <= spare.numel()
        memory = spare.view(-1) if in_spare else input.new_empty(self.in_flight * size, dtype=dtype)

        def logits_of(index):
            rows = self.slices[index].stop - self.slices[index].start
            buffer = memory[index % self.in_flight * size :][: rows * stride]
            return buffer.view(rows, stride)[:, :classes]

        return logits_of


@by_name(torch.ops.liger_distributed.fused_linear_ce_forward.default)
def _fused_forward(a):
    options, metrics, needs_grad = CEOptions.of_op(a), Metrics.of_op(a), a.needs_grad
    input, weight, target, bias = a.input, a.weight, a.target, a.bias
    vocab_start, vocab_size, group_name = a.vocab_start, a.vocab_size, a.group_name
    op, classes, group = name_of_call(FUSED), weight.shape[0], _resolve_process_group(group_name)
    layer = layer_to_check(op, weight, bias)
    # ce_weight has all classes.
    options._replace(ce_weight=None).check_linear(input, layer[0], target, layer[1], op)
    check_class_weights(op, options.ce_weight, target, vocab_size)
    check_classes(op, "target", target, vocab_size, options.ignore_index)
    shards = VocabShards(vocab_start, vocab_size, group_name)
    same = options_of(input, weight, bias, **options._asdict())
    meet(FUSED, group, shards, classes, target, {**same, **metrics._asdict(), "gradients": needs_grad})
    sm90_plan = None
    if not may_have_empty_shards(FUSED, group, shards, classes):
        sm90_plan = sm90.plan_of(input, weight, bias, options, group, vocab_size, needs_grad)
    if sm90_plan is not None:
        return sm90.run(input, weight, target, options, shards, group, sm90_plan, metrics, needs_grad)
    whole_rows = Rows(op, input.dtype, classes, target, options, vocab_start, vocab_size, metrics)
    # After the launches of Rows, which run while the host learns the number of rows.
    computed = computed_rows(target, options.ignore_index, skip=True)
    whole_rows.clear_others(computed)
    plan = ChunkPlan.of(
        input, group, vocab_size, a.need_grad_weight, options.exact, options.memory_budget, computed.count
    )
    gradients = Gradients(input, weight, bias, group, plan.accumulator, needs_grad, computed)
    logits_of = plan.new_logits(input, classes, gradients.spare)

    def finish(chunk):
        coefficients = whole_rows.fill(chunk.rows, chunk.wait())
        if any(gradients.needs_grad):
            whole_rows.write_gradient(chunk.rows, chunk.logits, coefficients)
            gradients.add(chunk.rows, chunk.logits, chunk.x)

    def start(index, rows):
        logits, x = logits_of(index), input[rows]
        write_linear(x, weight, bias, logits)
        return Chunk(rows, logits, *gather(whole_rows.stats(rows, logits), group), x)

    plan.run(computed, start, finish)
    return *whole_rows.reduced(), *gradients.finish()


_library.impl("fused_linear_ce_forward", _fused_forward, "CompositeExplicitAutograd")


@register_fake("liger_distributed::fused_linear_ce_forward")
@by_name(torch.ops.liger_distributed.fused_linear_ce_forward.default)
def _(a):
    results = fake_results(a.input, a.input.shape[0], a.reduction, Metrics.of_op(a))
    return *results, *fake_gradients(a)


fused_op = differentiable_ce(torch.ops.liger_distributed.fused_linear_ce_forward.default, FUSED)


# --- the op without the lm_head -----------------------------------------------------------------------------


_PLAIN_OP = torch.ops.liger_distributed.cross_entropy_forward.default


@by_name(_PLAIN_OP)
def _plain_forward(a):
    options, metrics, logits, target = CEOptions.of_op(a), Metrics.of_op(a), a.logits, a.target
    vocab_start, vocab_size, group_name = a.vocab_start, a.vocab_size, a.group_name
    op, classes, group = name_of_call(PLAIN), logits.shape[-1], _resolve_process_group(group_name)
    to_check = logits if classes else logits.new_empty(*logits.shape[:-1], 1)
    # ce_weight has all classes.
    options._replace(ce_weight=None).check(op, to_check, target)
    check_class_weights(op, options.ce_weight, target, vocab_size)
    check_classes(op, "target", target, vocab_size, options.ignore_index)
    shards, (rows, _) = VocabShards(vocab_start, vocab_size, group_name), logits.shape
    same = {"number of rows": rows, "dtype": logits.dtype, **options._asdict(), **metrics._asdict()}
    meet(PLAIN, group, shards, classes, target, same)
    rows = Rows(op, logits.dtype, classes, target, options, vocab_start, vocab_size, metrics)
    every = slice(0, logits.shape[0])
    coefficients = rows.fill(every, gathered(rows.stats(every, logits), group))
    return *rows.reduced(), torch.stack([c for c in coefficients if c is not None])


_library.impl("cross_entropy_forward", _plain_forward, "CompositeExplicitAutograd")


@register_fake("liger_distributed::cross_entropy_forward")
@by_name(_PLAIN_OP)
def _(a):
    logits = a.logits
    count = 3 if a.label_smoothing == 0.0 else 4
    return (
        *fake_results(logits, logits.shape[0], a.reduction, Metrics.of_op(a)),
        logits.new_empty((count, logits.shape[0]), dtype=accumulate_dtype(logits.dtype)),
    )


def _setup(ctx, inputs, output):
    a = arguments_type(_PLAIN_OP)(*inputs)
    logits, target, ce_weight = a.logits, a.target, a.ce_weight
    refuse_gradients(
        name_of_call(PLAIN), ce_weight=ce_weight, token_weight=a.token_weight, denominator=a.denominator
    )
    if ce_weight is not None:
        ce_weight = ce_weight[a.vocab_start : a.vocab_start + logits.shape[1]]
    ctx.save_for_backward(logits, target, ce_weight, output[-1])
    ctx.where = (a.vocab_start, a.ignore_index, a.softcap)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@differentiable_once(PLAIN)
def _backward(ctx, grad_loss, *_grad_others):
    grad_logits = None
    if grad_loss is not None:
        logits, target, ce_weight, (reference, *scaled) = ctx.saved_tensors
        if logits.shape[1] == 0:
            return torch.empty_like(logits), *(None,) * 14
        coef_exp, coef_target, coef_class = (*(c * grad_loss for c in scaled), None)[:3]
        ce_weight = None if coef_class is None else ce_weight
        coefs = reference, coef_exp, coef_target, coef_class, ce_weight
        backward = torch.ops.liger.cross_entropy_stats_backward.default
        grad_logits = backward(logits, target, *coefs, *ctx.where, None)
    return grad_logits, *(None,) * 14


plain_op = differentiable(_PLAIN_OP, _setup, _backward)
