# SPDX-License-Identifier: BSD-3-Clause
"""Log-probabilities of target tokens under the softmax of a linear layer, in chunks of rows.

The gradients of the log-probabilities arrive after the forward. Either the forward keeps the exponentials of
all logits (:mod:`liger._core.head.kept_logits`), or the backward computes the logits a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args, overload

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
from ..._core.head.cross_entropy import LogProbMetrics
from ..._core.head.kept_logits import NOTHING, check_keep, choose, new_kept
from ..._core.head.lm_head import HeadOptions
from ..._core.head.results import fake_gradients, fake_logprobs
from ..._core.math.dtypes import accumulate_dtype
from ..._core.op.arguments import FLAG, HEAD, LORA, SHARDS, arguments, names_among
from ..._core.op.autocast import autocast_operands
from ..._core.op.autograd import differentiable, wants_grad
from ..._core.op.by_name import arguments_type, by_name
from ..._core.op.fakes import register_fake
from ..._core.op.forward_gradients import backward_of_logprobs
from ..._core.op.loss_rows import flatten_rows
from ..._core.op.named_results import serialisable
from ..._core.op.tensors import (
    LayerNames,
    check_accum_dtype,
    check_given_classes,
    check_ignore_index,
    check_layer,
    check_logits_dtype,
)
from ..._core.op.types import LogProbMetric, LogProbOptions
from ..._core.runtime.memory_budget import check_budget_variable
from ..fused_linear_ce.add_grad_weight import logprobs_adding_grad_weight, summed_weight
from ..fused_linear_ce.lora import check_lora, lora_logprobs
from . import chunks  # noqa: F401  registers the kernels

_OP = "fused_linear_logprobs"
_NAMES = LayerNames()
METRICS = names_among(*get_args(LogProbMetric))
_NO_METRICS = LogProbMetrics()


@serialisable
class LogProbs(NamedTuple):
    """The results of :func:`fused_linear_logprobs`, each with the shape of target; metrics not requested are
    None.

    Attributes:
        logprobs: log-probabilities of the targets, float32 (float64 for float64 inputs); 0 in ignored rows.
        entropy: entropy of each row in nats, dtype of logprobs; 0 in ignored rows.
        argmax: the most probable class, int64; -1 in ignored rows.
        log_sum_sq_probs: ``log(sum(p ** 2)) = logsumexp(2 * z) - 2 * logsumexp(z)`` over the classes'
            probabilities p and logits z, the negative Renyi entropy of order 2, dtype of logprobs, without
            gradient; 0 in ignored rows.
        mean_logits: the mean over classes of the logits after softcap and temperature, dtype of logprobs,
            without gradient; 0 in ignored rows.

    Example::

        >>> result = liger.fused_linear_logprobs(input, weight, target, metrics=("entropy",))
        >>> isinstance(result, liger.LogProbs), result.entropy.shape == target.shape
        (True, True)
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    argmax: torch.Tensor | None
    log_sum_sq_probs: torch.Tensor | None
    mean_logits: torch.Tensor | None


# --- fakes --------------------------------------------------------------------------------------------------


@register_fake("liger::fused_linear_logprobs_forward")
@by_name(torch.ops.liger.fused_linear_logprobs_forward.default)
def _(a):
    check_keep(_OP, a.keep)
    wide = accumulate_dtype(a.input.dtype)
    return *fake_logprobs(a), *new_kept(a.keep, a.input, a.weight, wide, a.return_entropy, a.logits_dtype)


register_fake("liger::fused_linear_logprobs_backward")(
    by_name(torch.ops.liger.fused_linear_logprobs_backward.default)(fake_gradients)
)


# --- autograd -----------------------------------------------------------------------------------------------


_FORWARD = torch.ops.liger.fused_linear_logprobs_forward.default


def _setup(ctx, inputs, output):
    a = arguments_type(_FORWARD)(*inputs)
    ctx.options, ctx.keep = HeadOptions.of_op(a), a.keep
    kept = (None, None) if a.keep == NOTHING else output[5:]
    ctx.save_for_backward(a.input, a.weight, a.target, a.bias, *kept)
    ctx.mark_non_differentiable(*(output[2:] if a.return_entropy else output[1:]))
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_logprobs, grad_entropy, needed):
    *tensors, kept, kept_rows = ctx.saved_tensors
    options = ctx.options
    head = *options.of_logits, options.accum_dtype, options.memory_budget
    kept = ctx.keep, kept, kept_rows, options.logits_dtype
    backward = torch.ops.liger.fused_linear_logprobs_backward.default
    return backward(grad_logprobs, grad_entropy, *tensors, *head, *needed, *kept)


_backward = backward_of_logprobs(_FORWARD, _OP, ("input", "weight", "bias"), _gradients)
_forward_op = differentiable(_FORWARD, _setup, _backward)


# --- public API ---------------------------------------------------------------------------------------------


def logprobs_of_layer(
    op,
    names,
    layer,
    options,
    metrics=_NO_METRICS,
    recompute=None,
    accumulate_grad_weight=False,
    lora=None,
    shards=None,
):
    """The fields of :class:`LogProbs` as in :func:`fused_linear_logprobs`, with the argument names of another
    function in messages.

    ``layer``: (input, weight, target, bias). ``options``: :class:`HeadOptions`.
    """
    input, weight, target, bias = layer
    check_budget_variable(options.memory_budget)
    check_logits_dtype(op, names.input, input, options.logits_dtype)
    check_ignore_index(op, names.target, target, options.ignore_index)
    if shards is not None or (is_dtensor(weight) and lora is None and not accumulate_grad_weight):
        found = in_shards["fused_linear_logprobs"](
            op, names, input, weight, target, bias, options, metrics, shards
        )
        if found is not None:
            return found
    parameter = summed_weight(op, names.weight, weight, accumulate_grad_weight)
    if parameter is not None:
        weight = weight.detach()
    # No property of options: torch.compile of torch 2.10 traces none of a named tuple.
    float32 = options.logits_dtype is not None
    if not float32:
        input, weight, bias = autocast_operands(input, weight, bias)
    check_accum_dtype(op, names.input, input, options.accum_dtype)
    input, target, _ = align_tokens(op, input, target, None, (names.input, names.target))
    rows, flat, _, tokens = flatten_rows(op, names.input, input, target, None, names.target)
    check_layer(op, names, rows, weight, bias, flat, float32_weight=float32)
    check_given_classes(op, names.target, target, weight.shape[0], options.ignore_index)
    options = options._replace(temperature=float(options.temperature))
    requested = True, *metrics
    if lora is not None:
        *factors, scale = lora
        results = lora_logprobs(rows, weight, flat, bias, (*factors, None), scale, options, metrics)
        return tuple(tokens.restore(t) if flag else None for t, flag in zip(results, requested, strict=True))
    needs_grad = wants_grad(rows, weight, bias)
    keep, budget = NOTHING, options.memory_budget
    if any(needs_grad):
        keep = choose(rows, weight, bias, options.softcap, budget, recompute, float32)
    head = options.temperature, options.ignore_index, options.softcap, budget
    dtypes = options.logits_dtype, options.accum_dtype
    results = _forward_op(rows, weight, flat, bias, *head, *metrics, keep, needs_grad[1], *dtypes)[:5]
    if parameter is not None:
        outputs = results[: 1 + metrics.entropy]
        logprobs, *others = logprobs_adding_grad_weight(
            op, names, parameter, outputs, rows, flat, bias, options
        )
        results = logprobs, *(others or results[1:2]), *results[2:]
    return tuple(tokens.restore(t) if flag else None for t, flag in zip(results, requested, strict=True))


# An empty tuple is also a sequence of names.
@overload
def fused_linear_logprobs(  # type: ignore[overload-overlap]
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    metrics: tuple[()] = ...,
    **options: Unpack[LogProbOptions],
) -> torch.Tensor: ...
@overload
def fused_linear_logprobs(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    metrics: Sequence[LogProbMetric],
    **options: Unpack[LogProbOptions],
) -> LogProbs: ...
@together("weight", 0)
@arguments(**HEAD, **SHARDS, **LORA, metrics=METRICS, recompute=FLAG, accumulate_grad_weight=FLAG)
def fused_linear_logprobs(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    recompute: bool | None = None,
    metrics: Sequence[LogProbMetric] = (),
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    accum_dtype: torch.dtype | None = None,
    logits_dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    accumulate_grad_weight: bool = False,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    lora_scale: float = 1.0,
) -> torch.Tensor | LogProbs:
    """Log-probabilities of targets under ``softmax((input @ weight.T + bias) / temperature)``.

    The forward is one GEMM. On GPUs of compute capability 9.0 it keeps the exponentials of all logits for the
    backward where they fit the memory budget, which leaves two GEMMs for the backward. Else both process rows
    in chunks whose logits fit the budget, and the backward computes the logits again: four GEMMs in all.

    Args:
        input: (..., H), float16, bfloat16 or float32 (float64 on the torch backend), any strides.
        weight: (V, H), the dtype of input; with ``logits_dtype=torch.float32`` also float32. A DTensor whose
            rows a dimension of its mesh shards is computed in shards (docs/guides/distributed.md#dtensors).
        target: (...), int64 or int32 class indices.
        bias: (V,), as weight.
        ignore_index: the target of ignored rows. Their log-probability and entropy are 0, without gradient.
        recompute: None: the forward keeps exponentials, two bytes per row and class, if the wgmma engine
            takes the call (bfloat16 or float16, no bias, no softcap, no DTensor) and they fit the budget.
            True: it keeps nothing. False: it keeps exponentials of any size, and where the engine does not
            take the call the logits, in the dtype of input or in logits_dtype; then ignored rows cost as much
            as others. Choose True if memory is short, and False if the logits fit and the backward is to save
            a GEMM.
        metrics: names among ``"entropy"``, which is also differentiable, ``"argmax"``, ``"log_sum_sq_probs"``
            and ``"mean_logits"``; :class:`LogProbs` describes each.
        group, vocab_start, vocab_size: as in :func:`liger.fused_linear_ce`. The budget must be the same on
            all processes. Ignored rows are not computed, so the host waits for their number, unless the wgmma
            engine runs. Not with accumulate_grad_weight, lora_a and recompute.
        accum_dtype: the dtype in which the weight gradient is summed over chunks: None or ``torch.float32``
            rounds it once at the end; the dtype of input needs no float32 buffer, but rounds the sum after
            every chunk. Change it only if that buffer, of the size of the weight, does not fit.
        logits_dtype: ``torch.float32``: logits are as exact as IEEE float32 arithmetic on the given values
            makes them, also in the backward, on every backend and whatever the process allows for float32
            products (TF32). None: a backend may round them to the dtype of input. Choose float32 if the
            results are compared with log-probabilities of another program, as importance weights of policy
            losses do. docs/guides/logits_dtype.md has errors and costs.
        memory_budget: bytes for the logits of a chunk, or for the exponentials of all rows; None:
            ``LIGER_MEMORY_BUDGET``, or 512 MiB if that is unset. Lower it if the loss runs out of memory;
            raise it to keep the exponentials of more rows.
        softcap: logits become ``softcap * tanh(logits / softcap)`` before the division by the temperature.
        temperature: positive and finite.
        accumulate_grad_weight: the backward adds the gradient of the weight to ``weight.main_grad`` or,
            without that attribute, to ``weight.grad``, in float32 and without a temporary of its size. It
            computes the logits for this gradient again, whatever the forward keeps. docs/guides/main_grad.md
            has the conditions.
        lora_a, lora_b: (r, H) and (V, r), the factors of a low-rank term (LoRA), of any floating dtype: the
            logits get ``lora_scale * (input @ lora_a.T) @ lora_b.T`` added, from factors rounded to the dtype
            of input, or with logits_dtype not rounded. No tensor of the size of the weight is allocated, and
            ignored rows are left out of all products, for whose number the host waits. The backward computes
            the logits again. Not with accumulate_grad_weight and recompute=False.
        lora_scale: finite.

    Kept exponentials are freed with the graph. The backward does not change them, so it may run again with
    ``retain_graph=True``. A gradient of the entropies takes one more pass over them, in chunks of at most 512
    MiB.

    Under autocast, unless logits_dtype is given, input, weight and bias are cast as
    ``torch.nn.functional.linear`` casts them.

    Returns:
        The log-probabilities, (...), float32 (float64 for float64 inputs); with metrics a :class:`LogProbs`.
        Differentiable in input, weight, bias and the factors. The GEMM of a gradient that is not needed is
        skipped.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: mismatched shapes, dtypes or devices, a CPU target out of range; of shards, as
            docs/guides/vocab_parallel.md#errors says.
        ValueError: options out of range or that exclude each other, a LIGER_MEMORY_BUDGET that is not a
            positive number of bytes.

    Source: the chunked lm_head of Hsu et al., "Liger Kernel", arXiv 2410.10989, without its loss.

    Example::

        >>> logprobs = liger.fused_linear_logprobs(input, weight, target)
        >>> result = liger.fused_linear_logprobs(input, weight, target, metrics=("entropy",))
    """
    lora = None
    if lora_a is not None or lora_b is not None:
        lora = lora_a, lora_b, lora_scale
        refused = {
            "accumulate_grad_weight": (accumulate_grad_weight, (False,)),
            "recompute": (recompute, (None, True)),
        }
        check_lora(_OP, input, weight, lora_a, lora_b, **refused)
    shards = given_shards(group, vocab_start, vocab_size)
    refuse_with_shards(
        _OP, shards, accumulate_grad_weight=accumulate_grad_weight, lora_a=lora_a, recompute=recompute
    )
    options = HeadOptions(temperature, ignore_index, softcap, accum_dtype, memory_budget, logits_dtype)
    layer, wanted = (input, weight, target, bias), LogProbMetrics.named(metrics)
    results = logprobs_of_layer(
        _OP, _NAMES, layer, options, wanted, recompute, accumulate_grad_weight, lora, shards
    )
    return LogProbs(*results) if metrics else results[0]
