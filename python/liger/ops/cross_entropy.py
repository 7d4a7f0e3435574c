"""Cross entropy with class and token weights, label smoothing, z-loss, softcap and metrics of the same pass.

docs/cross_entropy.md defines every term, and says when the gradient is made in the forward.
"""

import torch

from .._core.arguments import CE_OPTIONS, FLAG, arguments
from .._core.autograd import (
    check_given_up,
    differentiable,
    differentiable_once,
    forbid_autograd,
    is_traced,
    may_write_saved,
    own_their_memory,
    refuse_made,
    wants_grad,
)
from .._core.cross_entropy_math import Metrics
from .._core.cross_entropy_results import fake_results, output_like
from .._core.dtensor import align_tokens
from .._core.dtypes import accumulate_dtype
from .._core.fakes import register_fake
from .._core.forward_gradients import scaled_by_upstream
from .._core.loss_rows import denominator_tensor, flatten_rows, refuse_gradients
from ..backend import register_family
from .cross_entropy_torch import (
    cross_entropy_backward__torch,
    cross_entropy_backward_torch,
    cross_entropy_forward__torch,
    cross_entropy_forward_torch,
)

register_family(
    "cross_entropy",
    {
        "cross_entropy_forward": cross_entropy_forward_torch,
        "cross_entropy_forward_": cross_entropy_forward__torch,
        "cross_entropy_backward": cross_entropy_backward_torch,
        "cross_entropy_backward_": cross_entropy_backward__torch,
    },
    "liger.triton_kernels.cross_entropy",
)


# --- fakes --------------------------------------------------------------------------------------------------------


_REDUCTION = 9
_WANTED = slice(10, 15)


@register_fake("liger::cross_entropy_forward")
def _(*arguments):
    logits, need_grad = arguments[0], arguments[-1]
    rows, wide = logits.shape[0], accumulate_dtype(logits.dtype)
    return (
        *fake_results(logits, rows, arguments[_REDUCTION], Metrics(*arguments[_WANTED])),
        logits.new_empty((rows,), dtype=wide),
        logits.new_empty((), dtype=wide),
        torch.empty_like(logits) if need_grad else logits.new_empty(0),
    )


@register_fake("liger::cross_entropy_forward_")
def _(*arguments):
    logits = arguments[0]
    return fake_results(logits, logits.shape[0], arguments[_REDUCTION], Metrics(*arguments[_WANTED]))


@register_fake("liger::cross_entropy_backward")
def _(grad_loss, logits, *rest):
    return torch.empty_like(logits)


@register_fake("liger::cross_entropy_backward_")
def _(grad_loss, logits, *rest):
    return None


# --- autograd -----------------------------------------------------------------------------------------------------


def _made_in_forward(logits, reduction):
    """Whether the forward makes the gradient, which the backward then multiplies by the upstream scalar.

    Not of float16 logits: a loss scale must come before the gradient is rounded. Nor for a compiler, whose backward
    cannot write over what was saved: there the product would be a pass of its own.
    """
    wanted = reduction != "none" and logits.dtype != torch.float16 and wants_grad(logits)[0]
    return wanted and not is_traced(logits)


def _setup(ctx, inputs, output):
    _refuse_gradients(inputs)
    # Per-row upstream gradients are for a second look at the logits; so is a graph traced without grad mode.
    ctx.made = inputs[-1] and inputs[_REDUCTION] != "none"
    _save(ctx, inputs, *output[6:])
    # A made gradient counts as differentiable: refuse_made says why.
    ctx.mark_non_differentiable(*(output[1:-1] if ctx.made else output[1:]))
    ctx.set_materialize_grads(False)


def _refuse_gradients(inputs):
    _, _, ce_weight, token_weight, denominator, *_ = inputs
    refuse_gradients("cross_entropy", ce_weight=ce_weight, token_weight=token_weight, denominator=denominator)


def _save(ctx, inputs, lse, used_denominator, grad_logits):
    if ctx.made:
        ctx.save_for_backward(grad_logits)
    else:
        logits, target, ce_weight, token_weight, _, *ctx.options = inputs[:_REDUCTION]
        ctx.save_for_backward(logits, target, lse, used_denominator, ce_weight, token_weight)


@differentiable_once("cross_entropy")
def _backward(ctx, grad_loss, *grad_others):
    refuse_made("cross_entropy", grad_others)
    if grad_loss is None:
        grad_logits = None
    elif not ctx.made:
        backward = torch.ops.liger.cross_entropy_backward.default
        grad_logits = backward(grad_loss, *ctx.saved_tensors, *ctx.options)
    else:
        (grad_logits,) = scaled_by_upstream(ctx, ctx.saved_tensors, grad_loss)
    return grad_logits, *(None,) * 15


_forward_op = differentiable(torch.ops.liger.cross_entropy_forward.default, _setup, _backward)
_forward_op_ = forbid_autograd("cross_entropy_forward_")
_backward_op_ = forbid_autograd("cross_entropy_backward_")


class _Inplace(torch.autograd.Function):
    """cross_entropy_forward whose gradient takes the memory of the logits, in the forward (``made``) or the backward.

    It saves what the registered formula saves, with the written logits for their gradient.
    """

    @staticmethod
    def forward(ctx, made, logits, *rest):
        _refuse_gradients((logits, *rest))
        # Detached, they share their version counter with the logits: whoever saved those will know of the write.
        detached = logits.detach()
        output = (
            (*_forward_op_(detached, *rest), None, None, logits)
            if made
            else _forward_op(detached, *rest, False)
        )
        ctx.made = made
        _save(ctx, (logits, *rest), *output[6:])
        ctx.mark_non_differentiable(*output[1:6])
        ctx.set_materialize_grads(False)
        return output[:6]

    @staticmethod
    @differentiable_once("cross_entropy")
    def backward(ctx, grad_loss, *_grad_others):
        if grad_loss is None or ctx.made or not may_write_saved(ctx):
            grad_logits = _backward(ctx, grad_loss)[0]
        else:
            logits, *others = ctx.saved_tensors
            # Without the history of the logits, which is no part of the gradient.
            grad_logits = logits.detach()
            _backward_op_(grad_loss, grad_logits, *others, *ctx.options)
        return None, grad_logits, *(None,) * 14


def _inplace_applies(logits):
    """Whether the in-place form runs; raises where it would destroy a parameter.

    Compiled code takes the functional form, whose buffers the compiler places itself.
    """
    if is_traced(logits) or not wants_grad(logits)[0]:
        return False
    check_given_up("cross_entropy", ["logits"], [logits])
    return own_their_memory([logits])


# --- composite ----------------------------------------------------------------------------------------------------


def _run(
    logits, target, ce_weight, token_weight, denominator, ignore_index, label_smoothing, lse_square_scale, softcap,
    reduction, metrics, inplace,
):  # fmt: skip
    logits, target, token_weight = align_tokens("cross_entropy", logits, target, token_weight)
    rows, flat_target, flat_weight = flatten_rows("cross_entropy", "logits", logits, target, token_weight)
    arguments = (
        rows, flat_target, ce_weight, flat_weight, denominator, ignore_index, label_smoothing, lse_square_scale,
        softcap, reduction, *metrics,
    )  # fmt: skip
    made = _made_in_forward(rows, reduction)
    in_place = inplace and _inplace_applies(rows)
    results = _Inplace.apply(made, *arguments) if in_place else _forward_op(*arguments, made)
    return output_like(target, reduction, metrics, results)


def _composite(
    logits, target, ce_weight=None, token_weight=None, denominator=None, ignore_index=-100, label_smoothing=0.0,
    lse_square_scale=0.0, softcap=None, reduction="mean",
):  # fmt: skip
    return _run(
        logits, target, ce_weight, token_weight, denominator, ignore_index, label_smoothing, lse_square_scale, softcap,
        reduction, Metrics(), inplace=False,
    )  # fmt: skip


_library = torch.library.Library("liger", "IMPL")
_library.impl("cross_entropy", _composite, "CompositeImplicitAutograd")


# --- public API ---------------------------------------------------------------------------------------------------


@arguments(inplace=FLAG, **CE_OPTIONS)
def cross_entropy(
    logits, target, *, ce_weight=None, token_weight=None, denominator=None, ignore_index=-100, label_smoothing=0.0,
    lse_square_scale=0.0, softcap=None, reduction="mean", inplace=False, return_z_loss=False,
    return_token_accuracy=False, return_predicted_tokens=False, return_logprobs=False, return_entropy=False,
):  # fmt: skip
    """Cross entropy between logits and class indices, computed in float32.

    Without the options that torch lacks it is ``torch.nn.functional.cross_entropy(logits, target, weight=ce_weight,
    ...)`` with the classes in the last dimension. docs/cross_entropy.md defines every term.

    Args:
        logits: (..., V), float16, bfloat16 or float32 (float64 on the torch backend), any strides.
        target: (...), int64 or int32 class indices.
        ce_weight: (V,), a weight per class, any floating dtype.
        token_weight: (...), a factor on the loss of each row, any floating dtype.
        denominator: what ``"mean"`` and ``"sum"`` divide by, a number or a device tensor with one element, instead
            of the class weights of the rows that are not ignored. Pass the count of the whole batch to split it into
            micro-batches whose losses add up.
        ignore_index: rows with this target have no loss and no gradient.
        label_smoothing: the share of the loss that is spread evenly over all classes, between 0 and 1.
        lse_square_scale: the factor of the z-loss, ``logsumexp(logits)^2`` (de Brebisson and Vincent, arXiv
            1604.08859; PaLM, arXiv 2204.02311, section 5).
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2, arXiv 2408.00118).
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        inplace: the gradient takes the memory of the logits, whose values are lost: they must not be used afterwards,
            and autograd raises where it needs their old values. With a scalar reduction the forward writes it; with
            ``"none"``, and for float16 logits, the backward does, unless the graph is kept for another one. Has no
            effect in compiled code, or where the logits need no gradient or overlap themselves.
        return_z_loss, return_token_accuracy, return_predicted_tokens, return_logprobs, return_entropy: metrics of
            the same pass.

    Returns:
        The loss, float32 (float64 for float64 logits), of shape () or, with ``"none"``, of the target's shape.
        With any ``return_*`` a :class:`CrossEntropyOutput`, whose per-row parts have the target's shape. Only the
        loss is differentiable, and only in the logits.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: mismatched shapes, dtypes or devices, options out of range, a CPU target out of range, a weight
            or denominator that requires grad. With ``inplace``: logits that are a leaf which requires grad.
    """
    metrics = Metrics(
        return_z_loss, return_token_accuracy, return_predicted_tokens, return_logprobs, return_entropy
    )
    return _run(
        logits, target, ce_weight, token_weight, denominator_tensor(denominator, logits), ignore_index,
        label_smoothing, lse_square_scale, softcap, reduction, metrics, inplace,
    )  # fmt: skip
