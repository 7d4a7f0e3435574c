"""Log-probabilities of targets under an lm_head whose vocabulary is sharded over the processes of a group.

docs/vocab_parallel.md says which data is exchanged and when.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from .._core.arguments import (
    HEAD,
    INTEGER,
    METRICS,
    RETURNS,
    LayerNames,
    arguments,
    check_given_classes,
    check_ignore_index,
    check_layer,
    check_logits_dtype,
    wrong_shape,
)
from .._core.autocast import autocast_operands
from .._core.autograd import is_traced, wants_grad
from .._core.loss_rows import flatten_rows
from .._core.memory_budget import check_budget_variable
from ..ops.fused_linear_logprobs import LogProbMetrics, LogProbs
from ._agreement import name_of_call, together
from ._vocab_parallel_logprobs_op import LOGPROBS, logprobs_op
from ._vocab_shards import GROUP, find_shard, layer_to_check, local_shard, replicated_tensor

_NAMES = LayerNames("hidden", "weight", "targets")
_checked = arguments(**HEAD, **RETURNS, **METRICS, group=GROUP, vocab_start=INTEGER, vocab_size=INTEGER)


# Any: with a flag that is a bool variable the result may also be the log-probabilities alone.
@overload
def vocab_parallel_fused_linear_logprobs(
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
    group: dist.ProcessGroup | None = ...,
    vocab_start: int | None = ...,
    vocab_size: int | None = ...,
    logits_dtype: torch.dtype | None = ...,
    return_log_sum_sq_probs: Literal[False] = ...,
    return_mean_logits: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def vocab_parallel_fused_linear_logprobs(
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
    group: dist.ProcessGroup | None = ...,
    vocab_start: int | None = ...,
    vocab_size: int | None = ...,
    logits_dtype: torch.dtype | None = ...,
    return_log_sum_sq_probs: Literal[False] = ...,
    return_mean_logits: Literal[False] = ...,
) -> LogProbs | Any: ...
@overload
def vocab_parallel_fused_linear_logprobs(
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
    group: dist.ProcessGroup | None = ...,
    vocab_start: int | None = ...,
    vocab_size: int | None = ...,
    logits_dtype: torch.dtype | None = ...,
    return_log_sum_sq_probs: bool = ...,
    return_mean_logits: bool = ...,
) -> LogProbMetrics | Any: ...
@together("weight", 0)
@_checked
def vocab_parallel_fused_linear_logprobs(
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
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    logits_dtype: torch.dtype | None = None,
    return_log_sum_sq_probs: bool = False,
    return_mean_logits: bool = False,
) -> torch.Tensor | LogProbs | LogProbMetrics:
    """:func:`liger.fused_linear_logprobs` of a weight whose rows, the classes, are sharded over the processes of a
    group.

    Every process calls it with the same hidden states, targets and options, and with its own shard of the weight.
    Logits are not exchanged, only two numbers per row, one more with the entropy and with each metric, and two more
    with the argmax.

    Args:
        hidden: (..., H), float16, bfloat16 or float32 (float64 on the torch backend), the same on every process. A
            DTensor over the group, for example sharded by tokens, is gathered first.
        weight: (classes of this process, H), the dtype of hidden; or a DTensor (V, H) with placement ``Shard(0)`` along
            one dimension of its mesh, replicated along others, whose processes have rows of their own (data parallel).
        targets: (...), int64 or int32 class indices among all V classes.
        bias: (classes of this process,), the dtype of hidden, or a DTensor like the weight.
        temperature, ignore_index, softcap, memory_budget, return_entropy, return_argmax: as in
            :func:`liger.fused_linear_logprobs`; the budget is for the logits of this process, and must be the same on
            all processes. Ignored rows are not computed, so the host waits for their number, unless the wgmma engine
            runs, which may also keep exponentials within the budget for the backward.
        group: the processes over which the vocabulary is sharded. None: those of a DTensor weight, else all
            processes.
        vocab_start, vocab_size: the first class of this process, and V. Without both, all shards have equal size. With
            ``vocab_size`` alone the shards are those of ``torch.chunk``: the last one may be smaller, and those behind
            it empty.
        logits_dtype: as in :func:`liger.fused_linear_logprobs`: ``torch.float32`` for logits as exact as those of
            float32 arithmetic, also with weights in float32. Autocast casts nothing then.
        return_log_sum_sq_probs, return_mean_logits: as in :func:`liger.fused_linear_logprobs`, over all V classes.

    Returns:
        As :func:`liger.fused_linear_logprobs`: the log-probabilities, a :class:`LogProbs` or a
        :class:`LogProbMetrics`, with the same bits on every process. Every process gets the complete gradient of
        hidden, and the gradients of its own shards of weight and bias.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: as :func:`liger.fused_linear_logprobs`; no process group, or this process is not a member; a shard
            that does not fit the vocabulary; a DTensor with another placement or mesh; another process has raised, or
            has called it with other options (docs/vocab_parallel.md#errors).
        ValueError: as :func:`liger.fused_linear_logprobs`; a vocab_start or vocab_size out of range.

    Source: the exchange is that of :func:`liger.vocab_parallel_fused_linear_ce`; the entropy is that of a mixture of
    the softmax distributions of all processes.
    """
    results = logprobs_in_shards(
        _NAMES, hidden, weight, targets, bias, temperature, ignore_index, softcap, memory_budget, return_entropy,
        return_argmax, logits_dtype, return_log_sum_sq_probs, return_mean_logits, group, vocab_start, vocab_size,
    )  # fmt: skip
    if return_log_sum_sq_probs or return_mean_logits:
        return LogProbMetrics(*results)
    return LogProbs(*results[:3]) if return_entropy or return_argmax else results[0]


def logprobs_in_shards(
    names, hidden, weight, targets, bias, temperature, ignore_index, softcap, memory_budget, return_entropy,
    return_argmax, logits_dtype, return_log_sum_sq_probs, return_mean_logits, group=None, vocab_start=None,
    vocab_size=None,
):  # fmt: skip
    """The fields of :class:`LogProbMetrics`; ``names``: the argument names of a public function in messages."""
    op = name_of_call(LOGPROBS)
    check_budget_variable(memory_budget)
    check_ignore_index(op, names.target, targets, ignore_index)
    weight, group, vocab_size = local_shard(op, names.weight, weight, 0, group, vocab_size, hidden)
    bias, group, vocab_size = local_shard(op, names.bias, bias, 0, group, vocab_size, hidden)
    if weight.dim() != 2:
        raise wrong_shape(op, names.weight, weight, "(classes, hidden)")
    shards = find_shard(op, names.weight, weight.shape[0], group, vocab_start, vocab_size)
    named = {names.input: hidden, names.target: targets}
    hidden, targets = (replicated_tensor(op, name, t, group) for name, t in named.items())
    check_logits_dtype(op, names.input, hidden, logits_dtype)
    if logits_dtype is None:
        hidden, weight, bias = autocast_operands(hidden, weight, bias)
    rows, flat, _, tokens = flatten_rows(op, names.input, hidden, targets, None, names.target)
    layer = layer_to_check(op, weight, bias)
    check_layer(op, names, rows, *layer, flat, float32_weight=logits_dtype is not None)
    check_given_classes(op, names.target, targets, shards.vocab, ignore_index)
    requested = return_entropy, return_argmax, return_log_sum_sq_probs, return_mean_logits
    options = float(temperature), ignore_index, softcap, memory_budget, logits_dtype, *shards, *requested
    # Compiled code keeps nothing: its results have fixed sizes.
    keep = any(wants_grad(rows, weight)) and not is_traced(rows, weight)
    logprobs, entropy, argmax, _, *metrics, _, _ = logprobs_op(rows, weight, flat, bias, *options, keep)
    optional = zip((entropy, argmax, *metrics), requested, strict=True)
    return tokens.restore(logprobs), *(tokens.restore(t) if flag else None for t, flag in optional)
