"""Log-probabilities of target tokens under the softmax of a linear layer, in chunks of rows.

The backward computes the logits a second time. The losses of :mod:`liger.losses` are cheaper, because their forward
computes the gradient.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch

from .._core.arguments import (
    FLAG,
    HEAD,
    RETURNS,
    LayerNames,
    arguments,
    check_classes,
    check_given_classes,
    check_layer,
    check_logits_dtype,
)
from .._core.autocast import autocast_operands
from .._core.autograd import differentiable, differentiable_once, wants_grad
from .._core.dtensor import align_tokens, unflatten_tokens
from .._core.dtypes import accumulate_dtype
from .._core.fakes import register_fake
from .._core.lm_head import (
    ComputedRows,
    LMHead,
    LMHeadGradients,
    check_head,
    lm_head_gradients,
    planned_rows,
    row_chunks,
)
from .._core.lm_head_float32 import (
    Float32LMHeadGradients,
    engine_has_float32_logits,
    float32_chunk_rows,
    float32_logits,
)
from .._core.loss_rows import flatten_rows
from .._core.memory_budget import check_budget_variable
from ..backend import register_portable
from .add_grad_weight import logprobs_adding_grad_weight
from .fused_linear_ce import fused_linear_ce_forward

_OP = "fused_linear_logprobs"
_NAMES = LayerNames("hidden", "weight", "targets")


class LogProbs(NamedTuple):
    """The results of :func:`fused_linear_logprobs`, each with the shape of targets; None if not requested.

    Attributes:
        logprobs: log-probabilities of the targets, float32 (float64 for float64 inputs); 0 in ignored rows.
        entropy: entropy of each row in nats, dtype of logprobs; 0 in ignored rows.
        argmax: the most probable class, int64; -1 in ignored rows.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    argmax: torch.Tensor | None


# --- kernels ------------------------------------------------------------------------------------------------------


def fused_linear_logprobs_forward(
    input, weight, target, bias, temperature, ignore_index, softcap, memory_budget, return_entropy, return_argmax,
    logits_dtype=None,
):  # fmt: skip
    check_head(_OP, input, weight, target, bias, temperature, softcap, None, memory_budget, logits_dtype)
    check_classes(_OP, _NAMES.target, target, weight.shape[0], ignore_index)
    float32 = logits_dtype is not None
    if temperature == 1.0 and (
        not float32
        or engine_has_float32_logits(
            input, weight, bias, softcap, True, memory_budget, return_entropy or return_argmax, (False,) * 3
        )
    ):
        # The engines of fused_linear_ce, which leave out ignored rows.
        results = fused_linear_ce_forward(
            input, weight, target, bias, None, None, None, ignore_index, 0.0, 0.0, softcap, "none", None,
            memory_budget, False, False, return_argmax, True, return_entropy, False, False, False,
        )  # fmt: skip
        return results[4], results[5], results[3]
    head = LMHead(weight, bias, temperature, ignore_index, softcap, float32)
    rows, wide = input.shape[0], accumulate_dtype(input.dtype)
    # The results of ignored rows, which may be skipped.
    logprobs = input.new_zeros(rows, dtype=wide)
    entropy = input.new_zeros(rows if return_entropy else 0, dtype=wide)
    argmax = target.new_full((rows if return_argmax else 0,), -1, dtype=torch.int64)
    computed = ComputedRows(target, ignore_index, skip=float32)
    if float32:
        chunk_rows, _ = float32_chunk_rows(input, weight, False, memory_budget)
        memory = float32_logits(weight, chunk_rows)
    else:
        chunk_rows, chunks = planned_rows(input, weight, False, True, memory_budget)
        memory = LMHeadGradients(input, weight, bias, (False,) * 3, chunks, True).new_logits(chunk_rows)
    for chunk in row_chunks(computed.count, chunk_rows):
        at, logits = computed.at(chunk), memory[: chunk.stop - chunk.start]
        head.write_logits(input[at], logits)
        statistics = head.statistics(logits, target[at], return_entropy, return_argmax)
        logprobs[at] = statistics.logprobs
        if return_entropy:
            entropy[at] = statistics.entropy
        if return_argmax:
            argmax[at] = statistics.argmax
    return logprobs, entropy, argmax


def fused_linear_logprobs_backward(
    grad_logprobs, grad_entropy, input, weight, target, bias, temperature, ignore_index, softcap, accum_dtype,
    memory_budget, need_grad_input, need_grad_weight, need_grad_bias, logits_dtype=None,
):  # fmt: skip
    check_head(
        _OP, input, weight, target, bias, temperature, softcap, accum_dtype, memory_budget, logits_dtype
    )
    needs_grad = need_grad_input, need_grad_weight, need_grad_bias
    exact, float32 = accum_dtype in (None, torch.float32), logits_dtype is not None
    if (
        temperature == 1.0
        and grad_entropy is None
        and (
            not float32
            or engine_has_float32_logits(
                input, weight, bias, softcap, exact, memory_budget, False, needs_grad
            )
        )
    ):
        return fused_linear_ce_forward(
            input, weight, target, bias, None, -grad_logprobs, None, ignore_index, 0.0, 0.0, softcap, "sum",
            accum_dtype, memory_budget, False, False, False, False, False, *needs_grad,
        )[-3:]  # fmt: skip
    head = LMHead(weight, bias, temperature, ignore_index, softcap, float32)
    if float32:
        chunk_rows, chunks = float32_chunk_rows(input, weight, True, memory_budget)
        gradients = Float32LMHeadGradients(input, weight, bias, needs_grad, chunks, exact)
    else:
        gradients, chunk_rows = lm_head_gradients(input, weight, bias, needs_grad, exact, memory_budget)
    memory = gradients.new_logits(chunk_rows)
    computed = ComputedRows(target, ignore_index, skip=float32)
    computed.zero_others(gradients)
    for chunk in row_chunks(computed.count, chunk_rows):
        at, logits = computed.at(chunk), memory[: chunk.stop - chunk.start]
        x, y = input[at], target[at]
        head.write_logits(x, logits)
        statistics = head.statistics(logits, y, entropy=grad_entropy is not None)
        chunk_grad_entropy = None if grad_entropy is None else grad_entropy[at]
        head.write_gradient(logits, y, statistics, grad_logprobs[at], chunk_grad_entropy)
        computed.add(gradients, at, x, logits, y == ignore_index)
    return gradients.finish()


register_portable(
    {
        "fused_linear_logprobs_forward": fused_linear_logprobs_forward,
        "fused_linear_logprobs_backward": fused_linear_logprobs_backward,
    }
)


# --- fakes --------------------------------------------------------------------------------------------------------


@register_fake("liger::fused_linear_logprobs_forward")
def _(
    input, weight, target, bias, temperature, ignore_index, softcap, memory_budget, return_entropy, return_argmax,
    logits_dtype=None,
):  # fmt: skip
    rows, wide = input.shape[0], accumulate_dtype(input.dtype)
    return (
        input.new_empty((rows,), dtype=wide),
        input.new_empty((rows,) if return_entropy else (0,), dtype=wide),
        input.new_empty((rows,) if return_argmax else (0,), dtype=torch.int64),
    )


@register_fake("liger::fused_linear_logprobs_backward")
def _(
    grad_logprobs, grad_entropy, input, weight, target, bias, temperature, ignore_index, softcap, accum_dtype,
    memory_budget, need_grad_input, need_grad_weight, need_grad_bias, logits_dtype=None,
):  # fmt: skip
    return (
        input.new_empty(input.shape if need_grad_input else (0,)),
        weight.new_empty(weight.shape if need_grad_weight else (0,)),
        (weight if bias is None else bias).new_empty(
            (weight.shape[0],) if need_grad_bias and bias is not None else (0,)
        ),
    )


# --- autograd -----------------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    input, weight, target, bias, *options, ctx.with_entropy, _, ctx.logits_dtype = inputs
    ctx.save_for_backward(input, weight, target, bias)
    *ctx.options, ctx.memory_budget = options
    ctx.mark_non_differentiable(*(output[2:] if ctx.with_entropy else output[1:]))
    ctx.set_materialize_grads(False)


@differentiable_once(_OP)
def _backward(ctx, grad_logprobs, grad_entropy, _grad_argmax):
    result = [None] * 11
    if grad_logprobs is None and grad_entropy is None:
        return tuple(result)
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(grad_entropy)
    positions = (0, 1, 3)  # of input, weight and bias among the arguments
    needed = [ctx.needs_input_grad[i] for i in positions]
    grads = torch.ops.liger.fused_linear_logprobs_backward.default(
        grad_logprobs, grad_entropy, *ctx.saved_tensors, *ctx.options, None, ctx.memory_budget, *needed,
        ctx.logits_dtype,
    )  # fmt: skip
    for position, grad, need in zip(positions, grads, needed, strict=True):
        result[position] = grad if need else None
    return tuple(result)


_forward_op = differentiable(torch.ops.liger.fused_linear_logprobs_forward.default, _setup, _backward)


# --- public API ---------------------------------------------------------------------------------------------------


def logprobs_of_layer(
    op, names, hidden, weight, targets, bias, temperature, ignore_index, softcap, memory_budget, return_entropy=False,
    return_argmax=False, logits_dtype=None, accumulate_grad_weight=False,
):  # fmt: skip
    """(log-probabilities, entropies, most probable classes) as in :func:`fused_linear_logprobs`, with the argument
    names of another function in messages."""
    check_budget_variable(memory_budget)
    check_logits_dtype(op, names.input, hidden, logits_dtype)
    parameter = weight if accumulate_grad_weight and wants_grad(weight)[0] else None
    if parameter is not None:
        weight = weight.detach()
    if logits_dtype is None:
        hidden, weight, bias = autocast_operands(hidden, weight, bias)
    hidden, targets, _ = align_tokens(op, hidden, targets, None)
    rows, flat, _ = flatten_rows(op, names.input, hidden, targets, None, names.target)
    check_layer(op, names, rows, weight, bias, flat, float32_weight=logits_dtype is not None)
    check_given_classes(op, names.target, targets, weight.shape[0], ignore_index)
    results = _forward_op(
        rows, weight, flat, bias, float(temperature), ignore_index, softcap, memory_budget, return_entropy,
        return_argmax, logits_dtype,
    )  # fmt: skip
    if parameter is not None:
        logprobs, *others = logprobs_adding_grad_weight(
            op, names.weight, parameter, results[: 1 + return_entropy], rows, flat, bias, float(temperature),
            ignore_index, softcap, memory_budget, logits_dtype,
        )  # fmt: skip
        results = logprobs, *(others or results[1:2]), results[2]
    requested = (True, return_entropy, return_argmax)
    return tuple(
        unflatten_tokens(t, targets) if flag else None for t, flag in zip(results, requested, strict=True)
    )


# Any: with a flag that is a bool variable the result may also be the log-probabilities alone.
@overload
def fused_linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = ...,
    temperature: float = ...,
    ignore_index: int = ...,
    softcap: float | None = ...,
    memory_budget: int | None = ...,
    return_entropy: Literal[False] = ...,
    return_argmax: Literal[False] = ...,
    *,
    logits_dtype: torch.dtype | None = ...,
    accumulate_grad_weight: bool = ...,
) -> torch.Tensor: ...
@overload
def fused_linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = ...,
    temperature: float = ...,
    ignore_index: int = ...,
    softcap: float | None = ...,
    memory_budget: int | None = ...,
    return_entropy: bool = ...,
    return_argmax: bool = ...,
    *,
    logits_dtype: torch.dtype | None = ...,
    accumulate_grad_weight: bool = ...,
) -> LogProbs | Any: ...
@arguments(**HEAD, **RETURNS, accumulate_grad_weight=FLAG)
def fused_linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    softcap: float | None = None,
    memory_budget: int | None = None,
    return_entropy: bool = False,
    return_argmax: bool = False,
    *,
    logits_dtype: torch.dtype | None = None,
    accumulate_grad_weight: bool = False,
) -> torch.Tensor | LogProbs:
    """Log-probabilities of targets under ``softmax((hidden @ weight.T + bias) / temperature)``.

    Rows are processed in chunks whose logits fit a memory budget. The forward is one GEMM; the backward computes the
    logits again.

    Args:
        hidden: (..., H), float16, bfloat16 or float32 (float64 on the torch backend), any strides.
        weight: (V, H), the dtype of hidden; with ``logits_dtype=torch.float32`` also float32.
        targets: (...), int64 or int32 class indices.
        bias: (V,), as weight.
        temperature: positive and finite.
        ignore_index: the target of ignored rows, whose log-probability and entropy are 0, without gradient.
        softcap: logits become ``softcap * tanh(logits / softcap)`` before the division by the temperature.
        memory_budget: bytes for the logits of a chunk; None: ``LIGER_MEMORY_BUDGET``, or 512 MiB if that is unset.
        return_entropy: also return the entropy of each row, which is differentiable, too.
        return_argmax: also return the most probable class, -1 in ignored rows.
        logits_dtype: ``torch.float32``: logits are as exact as those of IEEE float32 arithmetic on the given values,
            also in the backward, on every backend and whatever the process allows for float32 products (TF32). None:
            a backend may round them to the dtype of hidden. docs/logits_dtype.md has errors and costs.
        accumulate_grad_weight: the backward adds the gradient of the weight to ``weight.main_grad`` or, without that
            attribute, to ``weight.grad``, in float32 and without a temporary of its size. Where hidden or bias has a
            gradient, too, the backward computes the logits twice. docs/main_grad.md has the conditions.

    Under autocast, unless logits_dtype is given, hidden, weight and bias are cast as ``torch.nn.functional.linear``
    casts them.

    Returns:
        The log-probabilities, (...), float32 (float64 for float64 inputs); with ``return_entropy`` or ``return_argmax``
        a :class:`LogProbs`. Differentiable in hidden, weight and bias. The GEMM of a gradient that is not needed is
        skipped.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: mismatched shapes, dtypes or devices, options out of range, a CPU target out of range.
        ValueError: a LIGER_MEMORY_BUDGET that is not a positive number of bytes.

    Source: the chunked lm_head of Hsu et al., "Liger Kernel", arXiv 2410.10989, without its loss.
    """
    logprobs, entropy, argmax = logprobs_of_layer(
        _OP, _NAMES, hidden, weight, targets, bias, temperature, ignore_index, softcap, memory_budget, return_entropy,
        return_argmax, logits_dtype, accumulate_grad_weight,
    )  # fmt: skip
    return LogProbs(logprobs, entropy, argmax) if return_entropy or return_argmax else logprobs
