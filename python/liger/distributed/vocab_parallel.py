"""Cross entropy, with and without the lm_head, over a vocabulary that is sharded over the processes of a group.

docs/vocab_parallel.md says which data is exchanged and when; docs/cross_entropy.md defines every term.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from .._core.arguments import (
    CE_OPTIONS,
    INTEGER,
    arguments,
    check_accum_dtype,
    check_denominator,
    check_ignore_index,
    wrong_shape,
)
from .._core.autocast import autocast_operands
from .._core.autograd import wants_grad
from .._core.cross_entropy_results import CrossEntropyOutput, output_like
from .._core.loss_rows import denominator_tensor, flatten_rows
from .._core.memory_budget import check_budget_variable
from .._core.types import Reduction, Scalar
from ._agreement import name_of_call, together
from ._vocab_parallel_ops import FUSED, PLAIN, fused_op, metrics_of, plain_op
from ._vocab_shards import GROUP, find_shard, local_shard, replicated_tensor, whole_tensor

# Any: with a flag that is a bool variable the result may also be the loss alone.
_checked = arguments(**CE_OPTIONS, group=GROUP, vocab_start=INTEGER, vocab_size=INTEGER)


@overload
def vocab_parallel_fused_linear_ce(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    group: dist.ProcessGroup | None = ...,
    vocab_start: int | None = ...,
    vocab_size: int | None = ...,
    ce_weight: torch.Tensor | None = ...,
    token_weight: torch.Tensor | None = ...,
    denominator: Scalar | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    lse_square_scale: float = ...,
    softcap: float | None = ...,
    reduction: Reduction = ...,
    accum_dtype: torch.dtype | None = ...,
    memory_budget: int | None = ...,
    return_z_loss: Literal[False] = ...,
    return_logprobs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def vocab_parallel_fused_linear_ce(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    group: dist.ProcessGroup | None = ...,
    vocab_start: int | None = ...,
    vocab_size: int | None = ...,
    ce_weight: torch.Tensor | None = ...,
    token_weight: torch.Tensor | None = ...,
    denominator: Scalar | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    lse_square_scale: float = ...,
    softcap: float | None = ...,
    reduction: Reduction = ...,
    accum_dtype: torch.dtype | None = ...,
    memory_budget: int | None = ...,
    return_z_loss: bool = ...,
    return_logprobs: bool = ...,
) -> CrossEntropyOutput | Any: ...
@together("weight", 0)
@_checked
def vocab_parallel_fused_linear_ce(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    ce_weight: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    denominator: Scalar | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    accum_dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    return_z_loss: bool = False,
    return_logprobs: bool = False,
) -> torch.Tensor | CrossEntropyOutput:
    """:func:`liger.fused_linear_ce` of a weight whose rows, the classes, are sharded over the processes of a group.

    Every process calls it with the same input, target and options, and with its own shard of the weight. Logits are not
    exchanged, only three numbers per row (four with label smoothing). docs/vocab_parallel.md has the details.

    Args:
        input: (..., H), float16, bfloat16 or float32 (float64 on the torch backend), the same on every process. A
            DTensor over the group, for example sharded by tokens, is gathered first.
        weight: (classes of this process, H), the dtype of input; or a DTensor (V, H) with placement ``Shard(0)`` along
            one dimension of its mesh, replicated along others, whose processes have rows of their own (data parallel).
        target: (...), int64 or int32 class indices among all V classes.
        bias: (classes of this process,), the dtype of input, or a DTensor like the weight.
        group: the processes over which the vocabulary is sharded. None: those of a DTensor weight, else all
            processes.
        vocab_start, vocab_size: the first class of this process, and V. Without both, all shards have equal size. With
            ``vocab_size`` alone the shards are those of ``torch.chunk``: the last one may be smaller, and those behind
            it empty.
        ce_weight: (V,), for the whole vocabulary, on every process; or a DTensor, which is gathered.
        ignore_index: as in :func:`liger.cross_entropy`. Ignored rows are not computed, so the host waits for the number
            of the others.
        token_weight, denominator, label_smoothing, lse_square_scale, softcap, reduction: as in
            :func:`liger.cross_entropy`. With ``"none"`` the backward computes the logits a second time. A DTensor is
            gathered.
        accum_dtype, memory_budget: as in :func:`liger.fused_linear_ce`, for the logits of this process.
        return_z_loss, return_logprobs: also return this metric, computed in the same pass.

    Returns:
        As :func:`liger.cross_entropy`: the loss, or a :class:`CrossEntropyOutput` with the metrics, with the same bits
        on every process. Every process gets the complete gradient of input, and the gradients of its own shards of
        weight and bias.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: as :func:`liger.fused_linear_ce`; no process group, or this process is not a member; a shard that
            does not fit the vocabulary; a DTensor with another placement or mesh; class weights of a shard only;
            another process has raised, or has called it with other options (docs/vocab_parallel.md#errors).
        ValueError: as :func:`liger.fused_linear_ce`; a vocab_start or vocab_size out of range.

    Source: the exchange of maxima, sums and target logits is that of Narayanan et al., arXiv 2104.04473, section 3.2
    (Megatron-LM); the chunks are those of Hsu et al., "Liger Kernel", arXiv 2410.10989.
    """
    op = name_of_call(FUSED)
    check_budget_variable(memory_budget)
    check_ignore_index(op, "target", target, ignore_index)
    check_denominator(op, denominator, reduction)
    weight, group, vocab_size = local_shard(op, "weight", weight, 0, group, vocab_size, input)
    bias, group, vocab_size = local_shard(op, "bias", bias, 0, group, vocab_size, input)
    if weight.dim() != 2:
        raise wrong_shape(op, "weight", weight, "(classes, hidden)")
    shards = find_shard(op, "weight", weight.shape[0], group, vocab_start, vocab_size)
    named = {"input": input, "target": target, "token_weight": token_weight}
    input, target, token_weight = (replicated_tensor(op, name, t, group) for name, t in named.items())
    ce_weight, denominator = whole_tensor(ce_weight), whole_tensor(denominator)
    input, weight, bias = autocast_operands(input, weight, bias)
    check_accum_dtype(op, "input", input, accum_dtype)
    rows, flat_target, flat_weight, tokens = flatten_rows(op, "input", input, target, token_weight)
    results = fused_op(
        rows, weight, flat_target, bias, ce_weight, flat_weight, denominator_tensor(denominator, input), ignore_index,
        label_smoothing, lse_square_scale, softcap, reduction, accum_dtype, memory_budget, *shards, return_z_loss,
        return_logprobs, *((False,) * 3 if reduction == "none" else wants_grad(rows, weight, bias)),
    )  # fmt: skip
    return output_like(tokens, reduction, metrics_of(return_z_loss, return_logprobs), results)


@overload
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    vocab_start: int | None = ...,
    vocab_size: int | None = ...,
    ce_weight: torch.Tensor | None = ...,
    token_weight: torch.Tensor | None = ...,
    denominator: Scalar | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    lse_square_scale: float = ...,
    softcap: float | None = ...,
    reduction: Reduction = ...,
    return_z_loss: Literal[False] = ...,
    return_logprobs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    vocab_start: int | None = ...,
    vocab_size: int | None = ...,
    ce_weight: torch.Tensor | None = ...,
    token_weight: torch.Tensor | None = ...,
    denominator: Scalar | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    lse_square_scale: float = ...,
    softcap: float | None = ...,
    reduction: Reduction = ...,
    return_z_loss: bool = ...,
    return_logprobs: bool = ...,
) -> CrossEntropyOutput | Any: ...
@together("logits", -1)
@_checked
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    ce_weight: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    denominator: Scalar | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_z_loss: bool = False,
    return_logprobs: bool = False,
) -> torch.Tensor | CrossEntropyOutput:
    """:func:`liger.cross_entropy` of logits whose last dimension, the classes, is sharded over the processes of a
    group.

    Args:
        logits: (..., classes of this process), float16, bfloat16 or float32 (float64 on the torch backend); or a
            DTensor (..., V) that is sharded in its last dimension along one dimension of its mesh.
        target: (...), int64 or int32 class indices among all V classes.
        group, vocab_start, vocab_size, ce_weight and the others: as in :func:`vocab_parallel_fused_linear_ce`.

    Returns:
        As :func:`liger.cross_entropy`, with the same bits on every process. Each process gets the gradient of its own
        logits.

    Raises:
        TypeError: an argument of another type.
        RuntimeError, ValueError: as :func:`liger.cross_entropy` and :func:`vocab_parallel_fused_linear_ce`.

    Source: as :func:`vocab_parallel_fused_linear_ce`.
    """
    op = name_of_call(PLAIN)
    check_ignore_index(op, "target", target, ignore_index)
    check_denominator(op, denominator, reduction)
    logits, group, vocab_size = local_shard(op, "logits", logits, logits.dim() - 1, group, vocab_size)
    if logits.dim() == 0:
        raise wrong_shape(op, "logits", logits, "(..., classes)")
    shards = find_shard(op, "logits", logits.shape[-1], group, vocab_start, vocab_size)
    named = {"target": target, "token_weight": token_weight}
    target, token_weight = (replicated_tensor(op, name, t, group) for name, t in named.items())
    ce_weight, denominator = whole_tensor(ce_weight), whole_tensor(denominator)
    rows, flat_target, flat_weight, tokens = flatten_rows(op, "logits", logits, target, token_weight)
    results = plain_op(
        rows, flat_target, ce_weight, flat_weight, denominator_tensor(denominator, logits), ignore_index,
        label_smoothing, lse_square_scale, softcap, reduction, *shards, return_z_loss, return_logprobs,
    )  # fmt: skip
    return output_like(tokens, reduction, metrics_of(return_z_loss, return_logprobs), results)
