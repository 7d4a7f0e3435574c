# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy with class and token weights, label smoothing, z-loss, softcap and metrics of the same pass.

docs/guides/cross_entropy.md defines every term, and says when the forward computes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ..._core.dtensor.inputs import align_tokens, given_shards, in_shards, is_dtensor, together
from ..._core.head.cross_entropy import CEOptions, Metrics
from ..._core.head.results import CrossEntropyOutput, fake_results, output_like
from ..._core.math.dtypes import accumulate_dtype
from ..._core.op.arguments import CE_OPTIONS, FLAG, arguments
from ..._core.op.autograd import (
    differentiable,
    differentiable_once,
    forbid_autograd,
    may_write_inputs,
    may_write_saved,
    non_overlapping,
    refuse_gradient_outputs,
    refuse_inplace_leaf,
    wants_grad,
)
from ..._core.op.by_name import arguments_type, by_name
from ..._core.op.fakes import register_fake
from ..._core.op.forward_gradients import computes_gradient, scaled_by_upstream
from ..._core.op.loss_rows import denominator_tensor, flatten_rows, refuse_gradients
from ..._core.op.nodes import entering, register_cross_entropy
from ..._core.op.registration import register_composite
from ..._core.op.tensors import check_denominator, check_ignore_index
from ..._core.op.types import CrossEntropyMetric, CrossEntropyOptions, Reduction, Scalar
from . import rows as _rows  # noqa: F401  registers the torch kernels

# --- fakes --------------------------------------------------------------------------------------------------


@register_fake("liger::cross_entropy_forward")
@by_name(torch.ops.liger.cross_entropy_forward.default)
def _(a):
    logits = a.logits
    rows, wide = logits.shape[0], accumulate_dtype(logits.dtype)
    return (
        *fake_results(logits, rows, a.reduction, Metrics.of_op(a)),
        logits.new_empty((2, rows), dtype=wide),
        logits.new_empty((), dtype=wide),
        torch.empty_like(logits) if a.need_grad else logits.new_empty(0),
    )


@register_fake("liger::cross_entropy_forward_")
@by_name(torch.ops.liger.cross_entropy_forward_.default)
def _(a):
    return fake_results(a.logits, a.logits.shape[0], a.reduction, Metrics.of_op(a))


@register_fake("liger::cross_entropy_backward")
def _(grad_loss, logits, *rest):
    return torch.empty_like(logits)


# --- autograd -----------------------------------------------------------------------------------------------

# Position among the arguments of cross_entropy_forward, behind the tensors and numbers that the backward
# takes.
_REDUCTION = arguments_type(torch.ops.liger.cross_entropy_forward.default)._fields.index("reduction")


def _setup(ctx, inputs, output):
    _refuse_gradients(inputs)
    # The backward reads the logits again for per-row upstream gradients, and in a graph traced without grad
    # mode.
    ctx.has_gradient = inputs[-1] and inputs[_REDUCTION] != "none"
    _save(ctx, inputs, *output[6:])
    # The gradient is marked as differentiable: see refuse_gradient_outputs.
    ctx.mark_non_differentiable(*(output[1:-1] if ctx.has_gradient else output[1:]))
    ctx.set_materialize_grads(False)


def _refuse_gradients(inputs):
    _, _, ce_weight, token_weight, denominator, *_ = inputs
    refuse_gradients("cross_entropy", ce_weight=ce_weight, token_weight=token_weight, denominator=denominator)


def _save(ctx, inputs, stats, used_denominator, grad_logits):
    if ctx.has_gradient:
        ctx.save_for_backward(grad_logits)
    else:
        logits, target, ce_weight, token_weight, _, *ctx.options = inputs[:_REDUCTION]
        ctx.save_for_backward(logits, target, stats, used_denominator, ce_weight, token_weight)


@differentiable_once("cross_entropy")
def _backward(ctx, grad_loss, *grad_others):
    refuse_gradient_outputs("cross_entropy", grad_others)
    if grad_loss is None:
        grad_logits = None
    elif not ctx.has_gradient:
        backward = torch.ops.liger.cross_entropy_backward.default
        grad_logits = backward(grad_loss, *ctx.saved_tensors, *ctx.options)
    else:
        (grad_logits,) = scaled_by_upstream(ctx, ctx.saved_tensors, grad_loss)
    return grad_logits, *(None,) * 15


_forward_op = differentiable(torch.ops.liger.cross_entropy_forward.default, _setup, _backward)
_forward_op_ = forbid_autograd("cross_entropy_forward_")
_backward_op_ = forbid_autograd("cross_entropy_backward_")


def _backward_of_gradient(ctx, *grads):
    ctx.has_gradient = True
    return _backward(ctx, *grads)


register_cross_entropy(_backward_of_gradient)


class _Inplace(torch.autograd.Function):
    """cross_entropy_forward with a gradient that overwrites the logits, in the forward (``has_gradient``) or
    the backward.

    It saves the same tensors as the registered formula, with the overwritten logits as their gradient.
    """

    @staticmethod
    def forward(ctx, has_gradient, logits, *rest):
        _refuse_gradients((logits, *rest))
        # A detached tensor shares the version counter of the logits, so autograd detects the write.
        detached = logits.detach()
        output = (
            (*_forward_op_(detached, *rest), None, None, logits)
            if has_gradient
            else _forward_op(detached, *rest, False)
        )
        ctx.has_gradient = has_gradient
        _save(ctx, (logits, *rest), *output[6:])
        ctx.mark_non_differentiable(*output[1:6])
        ctx.set_materialize_grads(False)
        return output[:6]

    @staticmethod
    @differentiable_once("cross_entropy")
    def backward(ctx, grad_loss, *_grad_others):
        if grad_loss is None or ctx.has_gradient or not may_write_saved(ctx):
            grad_logits = _backward(ctx, grad_loss)[0]
        else:
            logits, *others = ctx.saved_tensors
            # Detached: the gradient must not have the history of the logits.
            grad_logits = logits.detach()
            _backward_op_(grad_loss, grad_logits, *others, *ctx.options)
        return None, grad_logits, *(None,) * 14


def _inplace_applies(logits):
    """True if the in-place form runs. Raises RuntimeError if it would overwrite a parameter.

    Compiled code takes the functional form; the compiler reuses buffers itself.
    """
    if not may_write_inputs(logits) or not wants_grad(logits)[0]:
        return False
    refuse_inplace_leaf("cross_entropy", ["logits"], [logits])
    return non_overlapping([logits])


# --- public API ---------------------------------------------------------------------------------------------


# An empty tuple is also a sequence of names.
@overload
def cross_entropy(  # type: ignore[overload-overlap]
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    metrics: tuple[()] = ...,
    **options: Unpack[CrossEntropyOptions],
) -> torch.Tensor: ...
@overload
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    metrics: Sequence[CrossEntropyMetric],
    **options: Unpack[CrossEntropyOptions],
) -> CrossEntropyOutput: ...
@entering
@together("logits", -1)
@arguments(inplace=FLAG, **CE_OPTIONS)
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
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
    softcap: float | None = None,
    inplace: bool = False,
) -> torch.Tensor | CrossEntropyOutput:
    """Cross entropy between logits and class indices, computed in float32.

    Without the options that torch lacks it is
    ``torch.nn.functional.cross_entropy(logits, target, weight=ce_weight, ...)`` with the classes in the last
    dimension. docs/guides/cross_entropy.md defines every term.

    Args:
        logits: (..., V), float16, bfloat16 or float32 (float64 on the torch backend), any strides. A DTensor
            whose classes a dimension of its mesh shards is computed in shards
            (docs/guides/distributed.md#dtensors).
        target: (...), int64 or int32 class indices.
        ce_weight: (V,), a weight per class, any floating dtype.
        token_weight: (...), a factor of the loss of each row, any floating dtype.
        denominator: the divisor of ``"mean"`` and ``"sum"``, a number or a device tensor with one element. By
            default ``"mean"`` divides by the sum of class weights over valid rows. Pass the count of the
            whole batch to split it into micro-batches whose losses add up.
        ignore_index: rows with this target have no loss and no gradient.
        label_smoothing: the probability mass that is distributed evenly over all classes, between 0 and 1.
        lse_square_scale: the factor of the z-loss, ``logsumexp(logits)^2`` (de Brebisson and Vincent, arXiv
            1604.08859; PaLM, arXiv 2204.02311, section 5).
        reduction: ``"mean"``; ``"sum"``, so that the losses of micro-batches add up; or ``"none"``, a loss
            per row. For weights per row, pass token_weight instead of multiplying the result of ``"none"``.
        metrics: names among ``"z_loss"``, ``"token_accuracy"``, ``"argmax"``, ``"logprobs"`` and
            ``"entropy"``, which are computed in the same pass; :class:`CrossEntropyOutput` describes each.
        group, vocab_start, vocab_size: the logits have the classes of this process alone, one shard among the
            processes of a group (None: all processes): the first of its classes, and the number of all
            classes (docs/guides/vocab_parallel.md#arguments). The loss has the same bits on every process.
            Only ``"z_loss"`` and ``"logprobs"`` are then available as metrics, and inplace has no effect.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2, arXiv 2408.00118).
        inplace: the gradient overwrites the logits, which saves a tensor of their size. Set it if only the
            loss uses the logits: autograd raises if it needs their old values. With a scalar reduction the
            forward writes it; with ``"none"``, and for float16 logits, the backward does, unless the graph is
            retained. No effect in compiled code, or if the logits need no gradient or overlap themselves.

    Returns:
        The loss, float32 (float64 for float64 logits), of shape () or, with ``"none"``, of the shape of the
        target. With metrics a :class:`CrossEntropyOutput`; its per-row fields have the shape of the target.
        Only the loss is differentiable, and only with respect to the logits.

    Raises:
        TypeError: an argument of another type.
        ValueError: options out of range, a denominator with ``"none"``.
        RuntimeError: mismatched shapes, dtypes or devices, a CPU target out of range, a weight or denominator
            that requires grad. With ``inplace``: logits that are a leaf and require grad.

    Example::

        >>> loss = liger.cross_entropy(logits, target, label_smoothing=0.1)
        >>> output = liger.cross_entropy(logits, target, metrics=("token_accuracy",))

    Sources: "Online normalizer calculation for softmax", arXiv 1805.02867, for the single pass over a row;
    label smoothing as in Szegedy et al., arXiv 1512.00567.
    """
    op, divisor = "cross_entropy", denominator_tensor(denominator, logits)
    shards, flags = given_shards(group, vocab_start, vocab_size), Metrics.named(metrics)
    check_ignore_index(op, "target", target, ignore_index)
    check_denominator(op, divisor, reduction)
    numbers = ignore_index, label_smoothing, lse_square_scale, softcap
    if shards is not None or is_dtensor(logits):
        options = CEOptions(ce_weight, token_weight, divisor, *numbers, reduction)
        found = in_shards["cross_entropy"](op, logits, target, options, flags, shards)
        if found is not None:
            return found
    logits, target, token_weight = align_tokens(op, logits, target, token_weight, ("logits", "target"))
    rows, flat_target, flat_weight, tokens = flatten_rows(op, "logits", logits, target, token_weight)
    given = rows, flat_target, ce_weight, flat_weight, divisor, *numbers, reduction, *flags
    need_grad = computes_gradient(rows, reduction)
    in_place = inplace and _inplace_applies(rows)
    results = _Inplace.apply(need_grad, *given) if in_place else _forward_op(*given, need_grad)
    return output_like(tokens, reduction, flags, results)


register_composite(cross_entropy)
