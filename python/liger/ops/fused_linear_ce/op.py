# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy of a linear layer's output, in chunks of rows with logits that fit a memory budget.

docs/guides/cross_entropy.md defines every term. With a scalar reduction the forward computes the gradients,
so logits are neither saved nor computed twice; with ``"none"`` the backward computes the logits again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import overload

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ..._core.dtensor.inputs import (
    align_tokens,
    given_shards,
    in_shards,
    is_dtensor,
    refuse_with_shards,
    together,
)
from ..._core.head.chunks import HeadChunks
from ..._core.head.cross_entropy import CEOptions, Metrics, RowResults, at_original_rows, make_rule
from ..._core.head.float16 import float16_factor
from ..._core.head.lm_head import LMHead, LMHeadGradients, planned_rows
from ..._core.head.results import CrossEntropyOutput, fake_gradients, fake_results, output_like
from ..._core.math.computed_rows import computed_rows
from ..._core.math.row_blocks import row_blocks
from ..._core.op.arguments import CE_OPTIONS, FLAG, LORA, arguments
from ..._core.op.autocast import autocast_operands
from ..._core.op.autograd import wants_grad
from ..._core.op.by_name import by_name
from ..._core.op.fakes import register_fake
from ..._core.op.loss_rows import denominator_tensor, flatten_rows
from ..._core.op.registration import register_composite, register_family
from ..._core.op.tensors import check_accum_dtype, check_denominator, check_ignore_index
from ..._core.op.types import CrossEntropyMetric, FusedCrossEntropyOptions, Reduction, Scalar
from ..._core.runtime.memory_budget import check_budget_variable
from .add_grad_weight import ce_adding_grad_weight, summed_weight
from .lora import check_lora, differentiable_ce, lora_ce

# --- torch backend ------------------------------------------------------------------------------------------


def _restricted(rule, rows):
    """The :class:`RowRule` of a subset of rows."""
    names = ["valid", "has_class", "class_index", "weight"] + ["token_weight"] * (
        rule.token_weight is not None
    )
    return dataclasses.replace(rule, **{name: getattr(rule, name)[rows] for name in names})


@by_name(torch.ops.liger.fused_linear_ce_forward.default)
def fused_linear_ce_forward_torch(a):
    options, metrics = CEOptions.of_op(a), Metrics.of_op(a)
    input, weight, target, bias = a.input, a.weight, a.target, a.bias
    options.check_linear(input, weight, target, bias)
    rule = make_rule("fused_linear_ce", input.dtype, weight.shape[0], target, options)
    used_denominator = rule.denominator(options.denominator, options.reduction)
    upstream = 1.0 / used_denominator
    # Not on a GPU, where finding ignored rows would need a synchronisation.
    computed = computed_rows(target, options.ignore_index, skip=not input.is_cuda)
    if computed.index is not None:
        rule = _restricted(rule, computed.index)
    chunk_rows, count = planned_rows(
        input, weight, a.need_grad_weight, options.exact, options.memory_budget, rows=computed.count
    )
    gradients = LMHeadGradients(input, weight, bias, a.needs_grad, count, options.exact)
    head = LMHead(weight, bias, 1.0, options.ignore_index, options.softcap)
    results, chunks, start = (
        RowResults(rule, metrics),
        HeadChunks(input, head, computed, gradients, chunk_rows),
        0,
    )
    for at, logits in chunks:
        for block in row_blocks(logits):
            here = slice(start + block.start, start + block.stop)
            if any(gradients.needs_grad):
                results.fill_with_gradient(here, logits[block], upstream, logits[block])
            else:
                results.fill(here, logits[block])
        chunks.add(at, logits)
        start += logits.shape[0]
    reduced = results.reduced(used_denominator, options.reduction)
    if computed.index is not None:
        rows = input.shape[0]
        reduced = at_original_rows(reduced, metrics, options.reduction, computed.index, rows)
    return *reduced, *chunks.finish()


register_family("fused_linear_ce", fused_linear_ce_forward_torch)


# --- fakes --------------------------------------------------------------------------------------------------


@register_fake("liger::fused_linear_ce_forward")
@by_name(torch.ops.liger.fused_linear_ce_forward.default)
def _(a):
    return (*fake_results(a.input, a.input.shape[0], a.reduction, Metrics.of_op(a)), *fake_gradients(a))


# --- autograd -----------------------------------------------------------------------------------------------

fused_linear_ce_forward = differentiable_ce(
    torch.ops.liger.fused_linear_ce_forward.default, "fused_linear_ce"
)


# --- public API ---------------------------------------------------------------------------------------------


def _float16_factor(rows, weight, target, bias, options, factors):
    """(divisor of the loss, factor by which it is too small), 0-d tensors; None if the gradients are computed
    as they are. ``factors``: the factors of a low-rank term of the weight."""
    if rows.dtype != torch.float16 or options.reduction == "none" or is_dtensor(rows):
        return None
    if not any(wants_grad(rows, weight, bias, *factors)):
        return None
    divisor = options.denominator
    if divisor is None:
        if options.reduction == "sum" or options.ce_weight is not None or weight.dim() != 2:
            return None
        divisor = ((target != options.ignore_index) & (target >= 0) & (target < weight.shape[0])).sum()
    elif not divisor.is_floating_point() and divisor.dtype not in (torch.int64, torch.int32):
        return None  # The op refuses it.
    divisor = divisor.float()
    factor = float16_factor(divisor, rows.shape[0])
    return divisor / factor, factor.reshape(()) if factor.numel() == 1 else factor


# An empty tuple is also a sequence of names.
@overload
def fused_linear_ce(  # type: ignore[overload-overlap]
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    metrics: tuple[()] = ...,
    **options: Unpack[FusedCrossEntropyOptions],
) -> torch.Tensor: ...
@overload
def fused_linear_ce(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    metrics: Sequence[CrossEntropyMetric],
    **options: Unpack[FusedCrossEntropyOptions],
) -> CrossEntropyOutput: ...
@together("weight", 0)
@arguments(**CE_OPTIONS, **LORA, accumulate_grad_weight=FLAG)
def fused_linear_ce(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ce_weight: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    denominator: Scalar | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    reduction: Reduction = "mean",
    metrics: Sequence[CrossEntropyMetric] = (),
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    accum_dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    softcap: float | None = None,
    accumulate_grad_weight: bool = False,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    lora_scale: float = 1.0,
) -> torch.Tensor | CrossEntropyOutput:
    """``cross_entropy(input @ weight.T + bias, target)`` without materialising all logits.

    Rows are processed in chunks with logits that fit a memory budget. While the logits of a chunk exist, its
    loss and its gradients are computed. docs/guides/cross_entropy.md defines every term.

    Args:
        input: (..., H), float16, bfloat16 or float32 (float64 on the torch backend), any strides.
        weight: (V, H), the dtype of input; a DTensor whose rows a dimension of its mesh shards is computed in
            shards (docs/guides/distributed.md#dtensors).
        target: (...), int64 or int32 class indices.
        bias: (V,), the dtype of input.
        ce_weight, token_weight, denominator, ignore_index, label_smoothing, lse_square_scale, reduction,
            metrics, softcap: as in :func:`liger.cross_entropy`. With ``reduction="none"`` the backward
            computes the logits a second time.
        group, vocab_start, vocab_size: weight and bias have the rows of some classes, the shard of this
            process among the processes of a group (None: all processes): the first of its classes, and the
            number of all classes (docs/guides/vocab_parallel.md#arguments). Every process calls with the same
            input, target and options, and gets the loss with the same bits, the complete gradient of input,
            and the gradients of its own shards. Metrics are then ``"z_loss"`` and ``"logprobs"``. Not with
            accumulate_grad_weight and lora_a.
        accum_dtype: the dtype in which the weight gradient is summed over chunks: None or ``torch.float32``
            rounds it once at the end; the dtype of input needs no float32 buffer, but rounds the sum after
            every chunk. Change it only if that buffer, of the size of the weight, does not fit.
        memory_budget: bytes for the logits of a chunk; None: ``LIGER_MEMORY_BUDGET``, or 512 MiB if that is
            unset. Lower it if the loss runs out of memory. Raise it if there are many small chunks
            (``liger plan`` prints them).
        accumulate_grad_weight: the backward adds the gradient of the weight to ``weight.main_grad`` or,
            without that attribute, to ``weight.grad``, in float32 and without a temporary of its size. It
            computes the logits a second time. docs/guides/main_grad.md has the conditions.
        lora_a, lora_b: (r, H) and (V, r), the factors of a low-rank term (LoRA), of any floating dtype: the
            logits get ``lora_scale * (input @ lora_a.T) @ lora_b.T`` added, from factors rounded to the dtype
            of input. No tensor of the size of the weight is allocated, and ignored rows are left out of all
            products, for whose number the host waits. Not with accumulate_grad_weight.
        lora_scale: finite.

    Under autocast input, weight and bias are cast as ``torch.nn.functional.linear`` casts them.

    Returns:
        As :func:`liger.cross_entropy`. Only the loss is differentiable, with respect to input, weight, bias
        and the factors. The GEMM of a gradient that is not needed is skipped.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: mismatched shapes, dtypes or devices, a CPU target out of range, a class weight, token
            weight or denominator that requires grad.
        ValueError: options out of range, a denominator with ``"none"``, a LIGER_MEMORY_BUDGET that is not a
            positive number of bytes.

    It takes no ``temperature``, as ``torch.nn.functional.cross_entropy`` does not, and no ``logits_dtype``: a
    mean over tokens averages the roundings of logits out. :func:`fused_linear_logprobs` takes both.

    Source: the chunked lm_head of Hsu et al., "Liger Kernel", arXiv 2410.10989, with the options above.

    Example::

        >>> loss = liger.fused_linear_ce(input, weight, target)
        >>> loss.backward()
    """
    check_budget_variable(memory_budget)
    op, divisor = "fused_linear_ce", denominator_tensor(denominator, input)
    numbers = ignore_index, label_smoothing, lse_square_scale, softcap
    options = CEOptions(ce_weight, token_weight, divisor, *numbers, reduction, accum_dtype, memory_budget)
    shards, flags = given_shards(group, vocab_start, vocab_size), Metrics.named(metrics)
    refuse_with_shards(op, shards, accumulate_grad_weight=accumulate_grad_weight, lora_a=lora_a)
    has_lora = lora_a is not None or lora_b is not None
    if has_lora:
        refused = {"accumulate_grad_weight": (accumulate_grad_weight, (False,))}
        check_lora(op, input, weight, lora_a, lora_b, **refused)
    check_ignore_index(op, "target", target, ignore_index)
    check_denominator(op, divisor, reduction)
    if shards is not None or (is_dtensor(weight) and not has_lora and not accumulate_grad_weight):
        found = in_shards["fused_linear_ce"](op, input, weight, target, bias, options, flags, shards)
        if found is not None:
            return found
    parameter = summed_weight(op, "weight", weight, accumulate_grad_weight)
    if parameter is not None:
        weight = weight.detach()
    input, weight, bias = autocast_operands(input, weight, bias)
    check_accum_dtype(op, "input", input, accum_dtype)
    input, target, token_weight = align_tokens(op, input, target, token_weight)
    rows, flat_target, flat_weight, tokens = flatten_rows(op, "input", input, target, token_weight)
    options = options._replace(token_weight=flat_weight)
    factors = (lora_a, lora_b) if has_lora else ()
    float16 = _float16_factor(rows, weight, flat_target, bias, options, factors)
    used = options if float16 is None else options._replace(denominator=float16[0])
    if has_lora:
        results = lora_ce(rows, weight, flat_target, bias, (*factors, None), lora_scale, used, flags)
    else:
        needs_grad = (False,) * 3 if reduction == "none" else wants_grad(rows, weight, bias)
        results = fused_linear_ce_forward(rows, weight, flat_target, bias, *used, *flags, *needs_grad)
        # Without the gradients: at a graph break they would be results of the graph, and differentiated.
        results = results[:6]
    if float16 is not None:
        loss, z_loss, *others = results
        results = loss / float16[1], z_loss / float16[1], *others
    if parameter is not None:
        loss = ce_adding_grad_weight(results[0], parameter, rows, flat_target, bias, options)
        results = loss, *results[1:]
    return output_like(tokens, reduction, flags, results)


register_composite(fused_linear_ce)
