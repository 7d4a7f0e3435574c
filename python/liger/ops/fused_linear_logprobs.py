"""Log-probabilities of target tokens under the softmax of a linear layer, in chunks of rows.

The gradients of the log-probabilities arrive after the forward. Either the forward keeps the exponentials of all logits
(:mod:`liger._core.kept_logits`), or the backward computes the logits a second time.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch

from .._core.arguments import (
    FLAG,
    HEAD,
    LORA,
    METRICS,
    RETURNS,
    LayerNames,
    arguments,
    check_given_classes,
    check_ignore_index,
    check_layer,
    check_logits_dtype,
)
from .._core.autocast import autocast_operands
from .._core.autograd import at_positions, differentiable, differentiable_once, wants_grad
from .._core.dtensor import align_tokens, in_shards, is_dtensor
from .._core.dtypes import accumulate_dtype
from .._core.fakes import register_fake
from .._core.kept_logits import NOTHING, check_keep, choose, new_kept
from .._core.loss_rows import flatten_rows
from .._core.memory_budget import check_budget_variable
from .._core.named_results import serialisable
from . import fused_linear_logprobs_kernel  # noqa: F401  registers the kernels
from .add_grad_weight import logprobs_adding_grad_weight, summed_weight
from .fused_linear_lora import check_lora, lora_logprobs

_OP = "fused_linear_logprobs"
_NAMES = LayerNames("hidden", "weight", "targets")


@serialisable
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


@serialisable
class LogProbMetrics(NamedTuple):
    """The results of :func:`fused_linear_logprobs` with ``return_log_sum_sq_probs`` or ``return_mean_logits``.

    Attributes:
        logprobs, entropy, argmax: as in :class:`LogProbs`.
        log_sum_sq_probs: ``log(sum(p ** 2))`` over the classes' probabilities p, the negative Renyi entropy of order 2,
            dtype of logprobs, without gradient; 0 in ignored rows.
        mean_logits: the mean over classes of the logits after softcap and temperature, dtype of logprobs, without
            gradient; 0 in ignored rows.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    argmax: torch.Tensor | None
    log_sum_sq_probs: torch.Tensor | None
    mean_logits: torch.Tensor | None


# --- fakes --------------------------------------------------------------------------------------------------------


@register_fake("liger::fused_linear_logprobs_forward")
def _(
    input, weight, target, bias, temperature, ignore_index, softcap, memory_budget, return_entropy, return_argmax,
    keep=NOTHING, need_grad_weight=False, logits_dtype=None,
):  # fmt: skip
    check_keep(_OP, keep)
    rows, wide = input.shape[0], accumulate_dtype(input.dtype)
    return (
        input.new_empty((rows,), dtype=wide),
        input.new_empty((rows,) if return_entropy else (0,), dtype=wide),
        input.new_empty((rows,) if return_argmax else (0,), dtype=torch.int64),
        *new_kept(keep, input, weight, wide, return_entropy, logits_dtype),
    )


@register_fake("liger::fused_linear_logprobs_metrics_forward")
def _(
    input, weight, target, bias, temperature, ignore_index, softcap, memory_budget, return_entropy, return_argmax,
    keep=NOTHING, need_grad_weight=False, logits_dtype=None, return_log_sum_sq_probs=False, return_mean_logits=False,
):  # fmt: skip
    results = torch.ops.liger.fused_linear_logprobs_forward.default(
        input, weight, target, bias, temperature, ignore_index, softcap, memory_budget, return_entropy,
        return_argmax, keep, need_grad_weight, logits_dtype,
    )  # fmt: skip
    rows, wide = input.shape[0], accumulate_dtype(input.dtype)
    requested = return_log_sum_sq_probs, return_mean_logits
    return *results, *(input.new_empty((rows,) if flag else (0,), dtype=wide) for flag in requested)


@register_fake("liger::fused_linear_logprobs_backward")
def _(
    grad_logprobs, grad_entropy, input, weight, target, bias, temperature, ignore_index, softcap, accum_dtype,
    memory_budget, need_grad_input, need_grad_weight, need_grad_bias, keep=NOTHING, kept=None, kept_rows=None,
    logits_dtype=None,
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
    input, weight, target, bias, *options, ctx.with_entropy, _, ctx.keep, _, ctx.logits_dtype = inputs[:13]
    kept = (None, None) if ctx.keep == NOTHING else output[3:5]
    ctx.arguments = len(inputs)
    ctx.save_for_backward(input, weight, target, bias, *kept)
    *ctx.options, ctx.memory_budget = options
    ctx.mark_non_differentiable(*(output[2:] if ctx.with_entropy else output[1:]))
    ctx.set_materialize_grads(False)


@differentiable_once(_OP)
def _backward(ctx, grad_logprobs, grad_entropy, *_grad_others):
    if grad_logprobs is None and grad_entropy is None:
        return (None,) * ctx.arguments
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(grad_entropy)
    positions = (0, 1, 3)  # of input, weight and bias among the arguments
    needed = [ctx.needs_input_grad[i] for i in positions]
    *tensors, kept, kept_rows = ctx.saved_tensors
    grads = torch.ops.liger.fused_linear_logprobs_backward.default(
        grad_logprobs, grad_entropy, *tensors, *ctx.options, None, ctx.memory_budget, *needed, ctx.keep, kept,
        kept_rows, ctx.logits_dtype,
    )  # fmt: skip
    return at_positions(ctx.arguments, positions, grads, needed)


_forward_op = differentiable(torch.ops.liger.fused_linear_logprobs_forward.default, _setup, _backward)
_metrics_op = differentiable(torch.ops.liger.fused_linear_logprobs_metrics_forward.default, _setup, _backward)


# --- public API ---------------------------------------------------------------------------------------------------


def logprobs_of_layer(
    op, names, hidden, weight, targets, bias, temperature, ignore_index, softcap, memory_budget, return_entropy=False,
    return_argmax=False, recompute=None, logits_dtype=None, accumulate_grad_weight=False,
    return_log_sum_sq_probs=False, return_mean_logits=False, lora=None,
):  # fmt: skip
    """The fields of :class:`LogProbMetrics` as in :func:`fused_linear_logprobs`, with the argument names of another
    function in messages."""
    check_budget_variable(memory_budget)
    check_logits_dtype(op, names.input, hidden, logits_dtype)
    check_ignore_index(op, names.target, targets, ignore_index)
    if is_dtensor(weight) and lora is None and not accumulate_grad_weight:
        found = in_shards["fused_linear_logprobs"](
            op, names, hidden, weight, targets, bias, temperature, ignore_index, softcap, memory_budget,
            return_entropy, return_argmax, logits_dtype, return_log_sum_sq_probs, return_mean_logits,
        )  # fmt: skip
        if found is not None:
            return found
    parameter = summed_weight(op, names.weight, weight, accumulate_grad_weight)
    if parameter is not None:
        weight = weight.detach()
    if logits_dtype is None:
        hidden, weight, bias = autocast_operands(hidden, weight, bias)
    hidden, targets, _ = align_tokens(op, hidden, targets, None, (names.input, names.target))
    rows, flat, _, tokens = flatten_rows(op, names.input, hidden, targets, None, names.target)
    check_layer(op, names, rows, weight, bias, flat, float32_weight=logits_dtype is not None)
    check_given_classes(op, names.target, targets, weight.shape[0], ignore_index)
    requested = (True, return_entropy, return_argmax, return_log_sum_sq_probs, return_mean_logits)
    if lora is not None:
        *factors, scale = lora
        results = lora_logprobs(
            rows, weight, flat, bias, (*factors, None), scale, float(temperature), ignore_index, softcap,
            memory_budget, return_entropy, return_argmax, logits_dtype, *requested[3:],
        )  # fmt: skip
        return tuple(tokens.restore(t) if flag else None for t, flag in zip(results, requested, strict=True))
    needs_grad = wants_grad(rows, weight, bias)
    keep = NOTHING
    if any(needs_grad):
        keep = choose(rows, weight, bias, softcap, memory_budget, recompute, logits_dtype is not None)
    metrics = requested[3:]
    op_with_results, flags = (_metrics_op, metrics) if any(metrics) else (_forward_op, ())
    results = op_with_results(
        rows, weight, flat, bias, float(temperature), ignore_index, softcap, memory_budget, return_entropy,
        return_argmax, keep, needs_grad[1], logits_dtype, *flags,
    )  # fmt: skip
    results = *results[:3], *(results[5:] or (None, None))
    if parameter is not None:
        logprobs, *others = logprobs_adding_grad_weight(
            op, names, parameter, results[: 1 + return_entropy], rows, flat, bias, float(temperature),
            ignore_index, softcap, memory_budget, logits_dtype,
        )  # fmt: skip
        results = logprobs, *(others or results[1:2]), *results[2:]
    return tuple(tokens.restore(t) if flag else None for t, flag in zip(results, requested, strict=True))


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
    recompute: bool | None = ...,
    *,
    logits_dtype: torch.dtype | None = ...,
    accumulate_grad_weight: bool = ...,
    return_log_sum_sq_probs: Literal[False] = ...,
    return_mean_logits: Literal[False] = ...,
    lora_a: torch.Tensor | None = ...,
    lora_b: torch.Tensor | None = ...,
    lora_scale: float = ...,
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
    recompute: bool | None = ...,
    *,
    logits_dtype: torch.dtype | None = ...,
    accumulate_grad_weight: bool = ...,
    return_log_sum_sq_probs: Literal[False] = ...,
    return_mean_logits: Literal[False] = ...,
    lora_a: torch.Tensor | None = ...,
    lora_b: torch.Tensor | None = ...,
    lora_scale: float = ...,
) -> LogProbs | Any: ...
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
    recompute: bool | None = ...,
    *,
    logits_dtype: torch.dtype | None = ...,
    accumulate_grad_weight: bool = ...,
    return_log_sum_sq_probs: bool = ...,
    return_mean_logits: bool = ...,
    lora_a: torch.Tensor | None = ...,
    lora_b: torch.Tensor | None = ...,
    lora_scale: float = ...,
) -> LogProbMetrics | Any: ...
@arguments(**HEAD, **RETURNS, **METRICS, **LORA, recompute=FLAG, accumulate_grad_weight=FLAG)
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
    recompute: bool | None = None,
    *,
    logits_dtype: torch.dtype | None = None,
    accumulate_grad_weight: bool = False,
    return_log_sum_sq_probs: bool = False,
    return_mean_logits: bool = False,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    lora_scale: float = 1.0,
) -> torch.Tensor | LogProbs | LogProbMetrics:
    """Log-probabilities of targets under ``softmax((hidden @ weight.T + bias) / temperature)``.

    The forward is one GEMM. On GPUs of compute capability 9.0 it keeps the exponentials of all logits for the backward
    where they fit the memory budget, which leaves two GEMMs for the backward. Else both process rows in chunks whose
    logits fit the budget, and the backward computes the logits again: four GEMMs in all.

    Args:
        hidden: (..., H), float16, bfloat16 or float32 (float64 on the torch backend), any strides.
        weight: (V, H), the dtype of hidden; with ``logits_dtype=torch.float32`` also float32. A DTensor whose rows a
            dimension of its mesh shards is computed in shards (docs/distributed.md#dtensors).
        targets: (...), int64 or int32 class indices.
        bias: (V,), as weight.
        temperature: positive and finite.
        ignore_index: the target of ignored rows, whose log-probability and entropy are 0, without gradient.
        softcap: logits become ``softcap * tanh(logits / softcap)`` before the division by the temperature.
        memory_budget: bytes for the logits of a chunk, or for the exponentials of all rows; None:
            ``LIGER_MEMORY_BUDGET``, or 512 MiB if that is unset.
        return_entropy: also return the entropy of each row, which is differentiable, too.
        return_argmax: also return the most probable class, -1 in ignored rows.
        recompute: None: the forward keeps exponentials, two bytes per row and class, if the wgmma engine takes the call
            (bfloat16 or float16, no bias, no softcap, no DTensor) and they fit the budget. True: it keeps nothing.
            False: it keeps exponentials of any size, and where the engine does not take the call the logits, in the
            dtype of hidden or in logits_dtype; then ignored rows cost as much as others.
        logits_dtype: ``torch.float32``: logits are as exact as those of IEEE float32 arithmetic on the given values,
            also in the backward, on every backend and whatever the process allows for float32 products (TF32). None:
            a backend may round them to the dtype of hidden. docs/logits_dtype.md has errors and costs.
        accumulate_grad_weight: the backward adds the gradient of the weight to ``weight.main_grad`` or, without that
            attribute, to ``weight.grad``, in float32 and without a temporary of its size. It computes the logits for
            this gradient again, whatever the forward keeps. docs/main_grad.md has the conditions.
        return_log_sum_sq_probs: also return the log of the sum over classes of the squared probabilities,
            ``logsumexp(2 * z) - 2 * logsumexp(z)`` of the logits z after softcap and temperature, without gradient.
        return_mean_logits: also return the mean over classes of these logits, without gradient.
        lora_a, lora_b: (r, H) and (V, r), the factors of a low-rank term (LoRA), of any floating dtype: the logits get
            ``lora_scale * (hidden @ lora_a.T) @ lora_b.T`` added, from factors rounded to the dtype of hidden, or with
            logits_dtype not rounded. No tensor of the size of the weight is allocated, and ignored rows are left out
            of all products, for whose number the host waits. The backward computes the logits again. Not with
            accumulate_grad_weight and recompute=False.
        lora_scale: finite.

    Kept exponentials are freed with the graph. The backward does not change them, so it may run again with
    ``retain_graph=True``. A gradient of the entropies takes one more pass over them, in chunks of at most 512 MiB.

    Under autocast, unless logits_dtype is given, hidden, weight and bias are cast as ``torch.nn.functional.linear``
    casts them.

    Returns:
        The log-probabilities, (...), float32 (float64 for float64 inputs); with ``return_entropy`` or ``return_argmax``
        a :class:`LogProbs`, with ``return_log_sum_sq_probs`` or ``return_mean_logits`` a :class:`LogProbMetrics`.
        Differentiable in hidden, weight, bias and the factors. The GEMM of a gradient that is not needed is skipped.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: mismatched shapes, dtypes or devices, a CPU target out of range.
        ValueError: options out of range, a LIGER_MEMORY_BUDGET that is not a positive number of bytes.

    Source: the chunked lm_head of Hsu et al., "Liger Kernel", arXiv 2410.10989, without its loss.
    """
    lora = None
    if lora_a is not None or lora_b is not None:
        lora = lora_a, lora_b, lora_scale
        check_lora(
            _OP, _NAMES[:2], hidden, weight, lora_a, lora_b,
            accumulate_grad_weight=(accumulate_grad_weight, (False,)), recompute=(recompute, (None, True)),
        )  # fmt: skip
    results = logprobs_of_layer(
        _OP, _NAMES, hidden, weight, targets, bias, temperature, ignore_index, softcap, memory_budget, return_entropy,
        return_argmax, recompute, logits_dtype, accumulate_grad_weight, return_log_sum_sq_probs, return_mean_logits,
        lora,
    )  # fmt: skip
    if return_log_sum_sq_probs or return_mean_logits:
        return LogProbMetrics(*results)
    return LogProbs(*results[:3]) if return_entropy or return_argmax else results[0]
