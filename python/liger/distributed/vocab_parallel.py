"""Cross entropy, fused with the projection or not, of a vocabulary that is spread over the processes of a group.

docs/vocab_parallel.md says what is exchanged and when; docs/cross_entropy.md defines every term.
"""

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from .._core.arguments import ANYTHING, CE_OPTIONS, INTEGER, arguments
from .._core.autocast import autocast_operands
from .._core.autograd import differentiable, differentiable_once, wants_grad
from .._core.cross_entropy_math import Metrics
from .._core.cross_entropy_results import fake_results, output_like
from .._core.dtypes import accumulate_dtype
from .._core.fakes import register_fake
from .._core.loss_rows import denominator_tensor, flatten_rows, refuse_gradients
from .._core.matmul import product, without_ignored, write_linear
from .._core.memory_budget import check_budget_variable
from ..ops.fused_linear_ce import differentiable_ce
from ._vocab_shards import gather, local_shard, locate, whole
from ._whole_rows import Rows

_FUSED, _PLAIN = "vocab_parallel_fused_linear_ce", "vocab_parallel_cross_entropy"
# Rows of a chunk from which on its products run at full speed: kFullSpeedRows of csrc/linear_ce/planner.h.
_FULL_SPEED_ROWS = 2048

_library = torch.library.Library("liger_distributed", "DEF")
_OPTIONS = (
    "Tensor target, {bias}Tensor? ce_weight, Tensor? token_weight, Tensor? denominator, int ignore_index,"
    " float label_smoothing, float lse_square_scale, float? softcap, str reduction, {plan}int vocab_start,"
    " int vocab_size, str group_name, bool return_z_loss, bool return_logprobs"
)
_RESULTS = "Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor predicted_tokens, Tensor logprobs, Tensor entropy"
# As liger::fused_linear_ce_forward, for a weight (and a bias) that holds some of the classes.
_library.define(
    "fused_linear_ce_forward(Tensor input, Tensor weight, "
    + _OPTIONS.format(bias="Tensor? bias, ", plan="ScalarType? accum_dtype, int? memory_budget, ")
    + ", bool need_grad_input, bool need_grad_weight, bool need_grad_bias)"
    f" -> ({_RESULTS}, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)"
)
# coefficients (3 or 4, rows): what liger::cross_entropy_stats_backward takes for an upstream gradient of 1.
_library.define(
    "cross_entropy_forward(Tensor logits, "
    + _OPTIONS.format(bias="", plan="")
    + f") -> ({_RESULTS}, Tensor coefficients)"
)


def _metrics(return_z_loss, return_logprobs):
    return Metrics(z_loss=return_z_loss, logprobs=return_logprobs)


# --- the fused op -------------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    rows: slice
    logits: torch.Tensor
    gathered: torch.Tensor
    work: object


class _Gradients:
    """The gradients of a call, chunk by chunk. That of the input is a sum over processes, taken in float32 while the
    next chunk is computed and then rounded once."""

    def __init__(self, input, weight, bias, group, accumulator, wanted):
        need_input, need_weight, need_bias = wanted
        self.source, self.weight_shard, self.group = input, weight, group
        self.alone = dist.get_world_size(group) == 1
        self.input = input.new_empty(input.shape if need_input else 0)
        self.weight = input.new_empty(weight.shape if need_weight else 0)
        self.sum = torch.empty_like(self.weight, dtype=torch.float32) if accumulator else self.weight
        wide = accumulate_dtype(input.dtype)
        self.bias = input.new_zeros(weight.shape[0] if need_bias and bias is not None else 0, dtype=wide)
        self.wanted = need_input, need_weight, self.bias.numel() > 0
        self.reducing = None

    def add(self, rows, dlogits, ignored):
        need_input, need_weight, need_bias = self.wanted
        if need_input and not self.alone:
            self._reduce_input(rows, dlogits)
        if need_weight:
            # Where the gradient of the rows goes, which is written later.
            place = self.input[rows] if need_input else None
            x = without_ignored(self.source[rows], ignored, place)
            product(dlogits.t(), x, self.sum, add=rows.start > 0)
        if need_bias:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)
        if need_input and self.alone:
            product(dlogits, self.weight_shard, self.input[rows])

    def _reduce_input(self, rows, dlogits):
        part = self.input.new_empty(self.input[rows].shape, dtype=accumulate_dtype(self.input.dtype))
        product(dlogits, self.weight_shard, part)
        work = dist.all_reduce(part, group=self.group, async_op=True)
        self._settle()
        self.reducing = rows, part, work

    def _settle(self):
        if self.reducing is not None:
            rows, part, work = self.reducing
            work.wait()
            self.input[rows] = part
            self.reducing = None

    def finish(self):
        """(of the input, of the weight, of the bias) after the last chunk."""
        self._settle()
        if self.source.shape[0] == 0:
            self.sum.zero_()
        if self.sum is not self.weight:
            self.weight.copy_(self.sum)
        return self.input, self.weight, self.bias.to(self.weight.dtype)


def _chunks(rows, chunk_rows, chunks):
    """(slices of rows, how many are under way at a time).

    Two halves take the place of one chunk where that costs no speed: the statistics of one are exchanged while the
    logits of the next are computed.
    """
    under_way, half = 1, -(-chunk_rows // 2)
    if chunks > 1 and half >= _FULL_SPEED_ROWS:
        chunk_rows, under_way = half, 2
    return [slice(i, min(i + chunk_rows, rows)) for i in range(0, rows, max(chunk_rows, 1))], under_way


def _fused_forward(
    input, weight, target, bias, ce_weight, token_weight, denominator, ignore_index, label_smoothing,
    lse_square_scale, softcap, reduction, accum_dtype, memory_budget, vocab_start, vocab_size, group_name,
    return_z_loss, return_logprobs, need_grad_input, need_grad_weight, need_grad_bias,
):  # fmt: skip
    torch.ops.liger.check_fused_linear_ce(
        input, weight, target, bias, None, token_weight, denominator, label_smoothing, softcap, reduction, accum_dtype,
        memory_budget,
    )  # fmt: skip
    group = _resolve_process_group(group_name)
    (rows, hidden), classes = input.shape, weight.shape[0]
    whole_rows = Rows(
        _FUSED, input.dtype, classes, target, ce_weight, token_weight, denominator, ignore_index, label_smoothing,
        lse_square_scale, softcap, reduction, vocab_start, vocab_size, _metrics(return_z_loss, return_logprobs),
    )  # fmt: skip
    # By what all processes know, not by what this one has: they must meet in the same exchanges.
    share = -(-vocab_size // dist.get_world_size(group))
    chunk_rows, chunks, _, accumulator = torch.ops.liger.plan_chunks(
        rows, hidden, share, input.element_size(), need_grad_weight, accum_dtype in (None, torch.float32), memory_budget
    )  # fmt: skip
    slices, under_way = _chunks(rows, chunk_rows, chunks)
    wanted = need_grad_input, need_grad_weight, need_grad_bias
    gradients = _Gradients(input, weight, bias, group, accumulator, wanted)

    # Rows of logits begin at multiples of 16 bytes.
    per_line = 16 // input.element_size()
    stride = -(-classes // per_line) * per_line
    size = max((s.stop - s.start for s in slices), default=0) * stride
    # While the weight gradient is summed elsewhere, its own memory holds logits.
    hosted = accumulator > 0 and under_way * size <= gradients.weight.numel()
    memory = gradients.weight.view(-1) if hosted else input.new_empty(under_way * size)

    def finish(chunk):
        if chunk.work is not None:
            chunk.work.wait()
        coefficients = whole_rows.fill(chunk.rows, chunk.gathered)
        if any(gradients.wanted):
            whole_rows.write_gradient(chunk.rows, chunk.logits, coefficients)
            gradients.add(chunk.rows, chunk.logits, target[chunk.rows] == ignore_index)

    pending = deque()
    for index, chunk in enumerate(slices):
        place = memory[index % under_way * size :][: (chunk.stop - chunk.start) * stride]
        logits = place.view(-1, stride)[:, :classes]
        write_linear(input[chunk], weight, bias, logits)
        pending.append(_Chunk(chunk, logits, *gather(whole_rows.stats(chunk, logits), group)))
        if len(pending) == under_way:
            finish(pending.popleft())
    while pending:
        finish(pending.popleft())
    return *whole_rows.reduced(), *gradients.finish()


_library.impl("fused_linear_ce_forward", _fused_forward, "CompositeExplicitAutograd")


@register_fake("liger_distributed::fused_linear_ce_forward")
def _(
    input, weight, target, bias, ce_weight, token_weight, denominator, ignore_index, label_smoothing,
    lse_square_scale, softcap, reduction, accum_dtype, memory_budget, vocab_start, vocab_size, group_name,
    return_z_loss, return_logprobs, need_grad_input, need_grad_weight, need_grad_bias,
):  # fmt: skip
    return (
        *fake_results(input, input.shape[0], reduction, _metrics(return_z_loss, return_logprobs)),
        input.new_empty(input.shape if need_grad_input else (0,)),
        input.new_empty(weight.shape if need_grad_weight else (0,)),
        input.new_empty(bias.shape if need_grad_bias and bias is not None else (0,)),
    )


_fused_op = differentiable_ce(torch.ops.liger_distributed.fused_linear_ce_forward.default, _FUSED)


# --- the op over given logits ---------------------------------------------------------------------------------------


def _plain_forward(
    logits, target, ce_weight, token_weight, denominator, ignore_index, label_smoothing, lse_square_scale, softcap,
    reduction, vocab_start, vocab_size, group_name, return_z_loss, return_logprobs,
):  # fmt: skip
    torch.ops.liger.check_cross_entropy(
        _PLAIN, logits, target, None, token_weight, denominator, label_smoothing, softcap, reduction
    )
    rows = Rows(
        _PLAIN, logits.dtype, logits.shape[1], target, ce_weight, token_weight, denominator, ignore_index,
        label_smoothing, lse_square_scale, softcap, reduction, vocab_start, vocab_size,
        _metrics(return_z_loss, return_logprobs),
    )  # fmt: skip
    every = slice(0, logits.shape[0])
    gathered, work = gather(rows.stats(every, logits), _resolve_process_group(group_name))
    if work is not None:
        work.wait()
    coefficients = rows.fill(every, gathered)
    return *rows.reduced(), torch.stack([c for c in coefficients if c is not None])


_library.impl("cross_entropy_forward", _plain_forward, "CompositeExplicitAutograd")

_SMOOTHING, _REDUCTION = 6, 9


@register_fake("liger_distributed::cross_entropy_forward")
def _(*arguments):
    logits, metrics = arguments[0], _metrics(*arguments[-2:])
    count = 3 if arguments[_SMOOTHING] == 0.0 else 4
    return (
        *fake_results(logits, logits.shape[0], arguments[_REDUCTION], metrics),
        logits.new_empty((count, logits.shape[0]), dtype=accumulate_dtype(logits.dtype)),
    )


def _setup(ctx, inputs, output):
    logits, target, ce_weight, token_weight, denominator, ignore_index, *_ = inputs
    refuse_gradients(_PLAIN, ce_weight=ce_weight, token_weight=token_weight, denominator=denominator)
    vocab_start = inputs[10]
    if ce_weight is not None:
        ce_weight = ce_weight[vocab_start : vocab_start + logits.shape[1]]
    ctx.save_for_backward(logits, target, ce_weight, output[-1])
    ctx.where = (vocab_start, ignore_index, inputs[8])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@differentiable_once(_PLAIN)
def _backward(ctx, grad_loss, *_grad_others):
    grad_logits = None
    if grad_loss is not None:
        logits, target, ce_weight, (reference, *scaled) = ctx.saved_tensors
        coef_exp, coef_target, coef_class = (*(c * grad_loss for c in scaled), None)[:3]
        grad_logits = torch.ops.liger.cross_entropy_stats_backward.default(
            logits, target, reference, coef_exp, coef_target, coef_class,
            None if coef_class is None else ce_weight, *ctx.where, None,
        )  # fmt: skip
    return grad_logits, *(None,) * 14


_plain_op = differentiable(torch.ops.liger_distributed.cross_entropy_forward.default, _setup, _backward)


# --- public API ---------------------------------------------------------------------------------------------------


_checked = arguments(**CE_OPTIONS, group=ANYTHING, vocab_start=INTEGER, vocab_size=INTEGER)


@_checked
def vocab_parallel_fused_linear_ce(
    input, weight, target, bias=None, *, group=None, vocab_start=None, vocab_size=None, ce_weight=None,
    token_weight=None, denominator=None, ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0, softcap=None,
    reduction="mean", accum_dtype=None, memory_budget=None, return_z_loss=False, return_logprobs=False,
):  # fmt: skip
    """:func:`liger.fused_linear_ce` of a weight whose rows, the classes, are spread over the processes of a group.

    Every process calls it with the same input, target and options, and with its own part of the weight. No logit
    leaves its process: three numbers per row do, four with label smoothing. docs/vocab_parallel.md has the details.

    Args:
        input: (..., H), float16, bfloat16 or float32 (float64 on the torch backend), the same on every process. A
            DTensor over the group is made whole first, so that one that is sharded by tokens may be passed as it is.
        weight: (classes of this process, H), the dtype of input; or a DTensor (V, H) with placement ``Shard(0)`` on a
            mesh of one dimension.
        target: (...), int64 or int32 class indices among all V classes.
        bias: the part of this process, (classes of this process,), or a DTensor like the weight.
        group: the processes that share the vocabulary; None for the mesh of a DTensor weight, else for all.
        vocab_start, vocab_size: the first class of this process, and V. Without either the parts have one size. With
            ``vocab_size`` alone they are those of ``torch.chunk``, which leaves a shorter part to the last process.
        ce_weight: (V,), for the whole vocabulary, on every process.
        token_weight, denominator, ignore_index, label_smoothing, lse_square_scale, softcap, reduction: as in
            :func:`liger.cross_entropy`. With ``"none"`` the backward computes the logits a second time.
        accum_dtype, memory_budget: as in :func:`liger.fused_linear_ce`, for the logits of this process.
        return_z_loss, return_logprobs: metrics of the same pass.

    Returns:
        As :func:`liger.cross_entropy`: the loss, or a :class:`CrossEntropyOutput` with the metrics. Every process has
        the same bits. The gradient of input is the whole one, on every process; those of weight and bias are of its
        own part.

    Raises:
        RuntimeError: what :func:`liger.fused_linear_ce` refuses; no process group, or one without this process; a part
            that does not fit the vocabulary; a DTensor with another placement or mesh; class weights of a part.
        ValueError: a LIGER_MEMORY_BUDGET that is not a positive number of bytes.

    Source: the exchange of maxima, sums and target logits is that of Narayanan et al., arXiv 2104.04473, section 3.2
    (Megatron-LM); the chunks are those of Hsu et al., "Liger Kernel", arXiv 2410.10989.
    """
    check_budget_variable(memory_budget)
    weight, group, vocab_size = local_shard(_FUSED, "weight", weight, 0, group, vocab_size)
    bias, group, vocab_size = local_shard(_FUSED, "bias", bias, 0, group, vocab_size)
    if weight.dim() != 2:
        raise RuntimeError(f"{_FUSED}: weight has shape {tuple(weight.shape)}, expected (classes, hidden)")
    shards = locate(_FUSED, "weight", weight.shape[0], group, vocab_start, vocab_size)
    named = {"input": input, "target": target, "token_weight": token_weight}
    input, target, token_weight = (whole(_FUSED, name, t, group) for name, t in named.items())
    input, weight, bias = autocast_operands(input, weight, bias)
    rows, flat_target, flat_weight = flatten_rows(_FUSED, "input", input, target, token_weight)
    results = _fused_op(
        rows, weight, flat_target, bias, ce_weight, flat_weight, denominator_tensor(denominator, input), ignore_index,
        label_smoothing, lse_square_scale, softcap, reduction, accum_dtype, memory_budget, *shards, return_z_loss,
        return_logprobs, *((False,) * 3 if reduction == "none" else wants_grad(rows, weight, bias)),
    )  # fmt: skip
    return output_like(target, reduction, _metrics(return_z_loss, return_logprobs), results)


@_checked
def vocab_parallel_cross_entropy(
    logits, target, *, group=None, vocab_start=None, vocab_size=None, ce_weight=None, token_weight=None,
    denominator=None, ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0, softcap=None, reduction="mean",
    return_z_loss=False, return_logprobs=False,
):  # fmt: skip
    """:func:`liger.cross_entropy` of logits whose last dimension, the classes, is spread over the processes of a group.

    Args:
        logits: (..., classes of this process), or a DTensor (..., V) sharded in its last dimension on a mesh of one.
        target: (...), int64 or int32 class indices among all V classes.
        group, vocab_start, vocab_size, ce_weight and the others: as in :func:`vocab_parallel_fused_linear_ce`.

    Returns:
        As :func:`liger.cross_entropy`, with the same bits on every process. Each has the gradient of its own logits.

    Raises:
        RuntimeError: what :func:`liger.cross_entropy` refuses, and what :func:`vocab_parallel_fused_linear_ce` does.
    """
    logits, group, vocab_size = local_shard(_PLAIN, "logits", logits, logits.dim() - 1, group, vocab_size)
    if logits.dim() == 0:
        raise RuntimeError(f"{_PLAIN}: logits has shape (), expected (..., classes)")
    shards = locate(_PLAIN, "logits", logits.shape[-1], group, vocab_start, vocab_size)
    named = {"target": target, "token_weight": token_weight}
    target, token_weight = (whole(_PLAIN, name, t, group) for name, t in named.items())
    rows, flat_target, flat_weight = flatten_rows(_PLAIN, "logits", logits, target, token_weight)
    results = _plain_op(
        rows, flat_target, ce_weight, flat_weight, denominator_tensor(denominator, logits), ignore_index,
        label_smoothing, lse_square_scale, softcap, reduction, *shards, return_z_loss, return_logprobs,
    )  # fmt: skip
    return output_like(target, reduction, _metrics(return_z_loss, return_logprobs), results)
