# SPDX-License-Identifier: BSD-3-Clause
"""Divergences between the distributions of a student and of a teacher: KL, generalised Jensen-Shannon, total
variation.

docs/guides/divergence.md defines every term, and says when the forward computes the gradient. Every reduction
is a weight per row and, except for "none", a sum over rows.
"""

from typing import NamedTuple

import torch

from ..._core.math.dtypes import accumulate_dtype
from ..._core.op.arguments import DIVISOR, FLAG, FRACTION, HEAD, arguments, choice, described
from ..._core.op.autograd import differentiable, differentiable_once, forbid_autograd, refuse_gradient_outputs
from ..._core.op.fakes import register_fake
from ..._core.op.forward_gradients import computes_gradient, scaled_by_upstream
from ..._core.op.loss_rows import denominator_tensor, refuse_gradients
from ..._core.op.registration import register_composite
from ..._core.op.tensors import check_floating
from ..._core.op.types import DivergenceReduction, Scalar
from . import rows as _rows  # noqa: F401  registers the torch kernels
from .reduction import flatten_pair, nan_if_empty, row_weights

# --- fakes --------------------------------------------------------------------------------------------------


def _fake_loss(student, per_row):
    return student.new_empty(student.shape[0] if per_row else (), dtype=accumulate_dtype(student.dtype))


@register_fake("liger::divergence_forward")
def _(student, *rest):
    *_, per_row, need_grad = rest
    return (
        _fake_loss(student, per_row),
        student.new_empty((5, student.shape[0]), dtype=accumulate_dtype(student.dtype)),
        torch.empty_like(student) if need_grad else student.new_empty(0),
    )


@register_fake("liger::divergence_forward_")
def _(student, *rest):
    return _fake_loss(student, rest[-1])


@register_fake("liger::divergence_ce_forward_")
def _(student, *rest):
    *_, cross_entropy, _, _ = rest
    wide = accumulate_dtype(student.dtype)
    return _fake_loss(student, True), student.new_empty(student.shape[0] if cross_entropy else 0, dtype=wide)


@register_fake("liger::divergence_backward")
def _(grad_loss, student, *rest):
    return torch.empty_like(student)


# --- autograd -----------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    student, teacher, target, row_weight, *ctx.options, per_row, need_grad = inputs
    refuse_gradients("divergence", teacher=teacher, row_weight=row_weight)
    # The backward reads the logits again for per-row upstream gradients, and in a graph traced without grad
    # mode.
    ctx.has_gradient = need_grad and not per_row
    if ctx.has_gradient:
        ctx.save_for_backward(output[2])
    else:
        ctx.save_for_backward(student, teacher, target, row_weight, output[1])
    # The gradient is marked as differentiable: see refuse_gradient_outputs.
    ctx.mark_non_differentiable(*(output[1:2] if ctx.has_gradient else output[1:]))
    ctx.set_materialize_grads(False)


@differentiable_once("divergence")
def _backward(ctx, grad_loss, *grad_others):
    refuse_gradient_outputs("divergence", grad_others)
    if grad_loss is None:
        grad_student = None
    elif not ctx.has_gradient:
        student, teacher, target, row_weight, stats = ctx.saved_tensors
        grad_rows = grad_loss if row_weight is None else grad_loss * row_weight
        backward = torch.ops.liger.divergence_backward.default
        grad_student = backward(grad_rows, student, teacher, target, stats, *ctx.options)
    else:
        grad_student = scaled_by_upstream(ctx, ctx.saved_tensors, grad_loss)[0]
    return grad_student, *(None,) * 10


_forward_op = differentiable(torch.ops.liger.divergence_forward.default, _setup, _backward)
divergence_forward_ = forbid_autograd("divergence_forward_")
divergence_ce_forward_ = forbid_autograd("divergence_ce_forward_")


# --- composites ---------------------------------------------------------------------------------------------


def jsd_divergence(beta):
    """The name of the generalised Jensen-Shannon divergence for ``beta``; at 0 and 1 it is defined as a
    KL."""
    return {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta), "jsd")


class _Options(NamedTuple):
    """The options of a divergence, in the order of the op schemas."""

    divergence: str
    beta: float
    temperature: float
    log_probs: bool
    ignore_index: int


def _divergence(op, student, teacher, target, token_weight, denominator, options, reduction):
    denominator = denominator_tensor(denominator, student)
    batch = student.shape[0] if student.dim() > 1 else 1
    rows, teacher, target, token_weight, tokens = flatten_pair(
        op, ("student", "teacher"), student, teacher, target, token_weight
    )
    if rows.dtype != teacher.dtype:
        check_floating(op, "student", rows)
        check_floating(op, "teacher", teacher)
        # Autograd returns the gradient in the dtype of the student.
        rows, teacher = (t.to(torch.promote_types(rows.dtype, teacher.dtype)) for t in (rows, teacher))
    weight = row_weights(op, rows, batch, target, token_weight, denominator, options.ignore_index, reduction)
    if options.log_probs and options.temperature != 1.0:
        raise ValueError(
            f"{op}: temperature is {described(options.temperature)} with log_probs, expected 1: log-probabilities "
            "are logits too, so pass them without log_probs"
        )
    torch.ops.liger.check_divergence(op, rows, teacher, target, weight, *options[:4])
    refuse_gradients(op, teacher=teacher)
    per_row = reduction == "none"
    need_grad = computes_gradient(rows, reduction)
    loss, _, _ = _forward_op(rows, teacher, target, weight, *options, per_row, need_grad)
    if per_row:
        return tokens.restore(loss)
    return nan_if_empty(loss, rows, batch, reduction, denominator)


def kl_divergence(reverse):
    """The name of the divergence of ``kl_div``."""
    return "reverse_kl" if reverse else "forward_kl"


# --- public API ---------------------------------------------------------------------------------------------


DIVERGENCE_OPTIONS = {
    **HEAD,
    "beta": FRACTION,
    "denominator": DIVISOR,
    "log_probs": FLAG,
    "reduction": choice(DivergenceReduction),
    "reverse": FLAG,
}


@arguments(**DIVERGENCE_OPTIONS)
def kl_div(
    student: torch.Tensor,
    teacher: torch.Tensor,
    target: torch.Tensor | None = None,
    *,
    token_weight: torch.Tensor | None = None,
    denominator: Scalar | None = None,
    reverse: bool = False,
    temperature: float = 1.0,
    log_probs: bool = False,
    ignore_index: int = -100,
    reduction: DivergenceReduction = "mean",
) -> torch.Tensor:
    """``KL(teacher || student)`` or ``KL(student || teacher)`` of the distributions over the last dimension.

    Computed from logits in float32 without storing a softmax. docs/guides/divergence.md defines every term.

    Args:
        student: (..., V) logits, float16, bfloat16 or float32 (float64 on the torch backend), any strides.
        teacher: logits with the shape of student, any floating dtype; they get no gradient. -inf is a class
            with probability 0. Of different dtypes one is promoted, at the cost of a copy.
        target: (...), int64 or int32: rows with target ``ignore_index`` have no loss and no gradient. None:
            all rows are valid.
        token_weight: (...), a factor of the loss of each row, any floating dtype.
        denominator: the divisor of ``"sum"``, ``"mean"`` and ``"batchmean"``, a number or a device tensor
            with one element. Pass the count of the whole batch to split it into micro-batches whose losses
            add up.
        reverse: ``KL(student || teacher)``, which is mode-seeking; False: ``KL(teacher || student)``.
        temperature: both logits are divided by it. The loss is not multiplied by its square.
        log_probs: student and teacher are log-probabilities, used without normalisation; the gradient is with
            respect to them.
        ignore_index: the target of ignored rows.
        reduction: ``"none"``, ``"sum"``, ``"mean"`` over the valid rows (nan without any), or
            ``"batchmean"``, the sum divided by the first dimension of student (nan if that is 0).

    Returns:
        The loss, float32 (float64 for float64 logits), of shape () or, with ``"none"``, the shape of student
        without its last dimension. Differentiable once, in student.

    Raises:
        TypeError: an argument of another type.
        ValueError: options out of range, a temperature with ``log_probs``, a denominator with ``"none"``.
        RuntimeError: mismatched shapes, dtypes or devices, a teacher, weight or denominator that requires
            grad.

    Example::

        >>> loss = liger.kl_div(student, teacher, temperature=2.0)
        >>> loss.backward()

    Source: Hinton, Vinyals and Dean, arXiv 1503.02531; the reverse form as in Gu et al., "MiniLLM", arXiv
    2306.08543.
    """
    options = _Options(kl_divergence(reverse), 0.5, temperature, log_probs, ignore_index)
    return _divergence("kl_div", student, teacher, target, token_weight, denominator, options, reduction)


@arguments(**DIVERGENCE_OPTIONS)
def jsd(
    student: torch.Tensor,
    teacher: torch.Tensor,
    target: torch.Tensor | None = None,
    *,
    token_weight: torch.Tensor | None = None,
    denominator: Scalar | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    log_probs: bool = False,
    ignore_index: int = -100,
    reduction: DivergenceReduction = "mean",
) -> torch.Tensor:
    """``beta * KL(teacher || m) + (1 - beta) * KL(student || m)`` with the mixture
    ``m = beta * teacher + (1 - beta) * student``.

    Args:
        beta: between 0 and 1. At 0 it is ``KL(teacher || student)`` and at 1 ``KL(student || teacher)``, as
            in GKD.
        student, teacher and the others: as in :func:`liger.kl_div`.

    Returns:
        As :func:`liger.kl_div`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`liger.kl_div`.

    Example::

        >>> loss = liger.jsd(student, teacher, target, beta=0.1)
        >>> loss.backward()

    Source: Agarwal et al., "On-Policy Distillation of Language Models" (GKD), arXiv 2306.13649.
    """
    options = _Options(jsd_divergence(beta), beta, temperature, log_probs, ignore_index)
    return _divergence("jsd", student, teacher, target, token_weight, denominator, options, reduction)


@arguments(**DIVERGENCE_OPTIONS)
def tvd(
    student: torch.Tensor,
    teacher: torch.Tensor,
    target: torch.Tensor | None = None,
    *,
    token_weight: torch.Tensor | None = None,
    denominator: Scalar | None = None,
    temperature: float = 1.0,
    log_probs: bool = False,
    ignore_index: int = -100,
    reduction: DivergenceReduction = "mean",
) -> torch.Tensor:
    """Total variation distance, ``sum(abs(teacher - student)) / 2`` of the probabilities.

    Args:
        student, teacher and the others: as in :func:`liger.kl_div`.

    Returns:
        As :func:`liger.kl_div`. The derivative for a class with equal probabilities is taken as 0.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`liger.kl_div`.

    Example::

        >>> loss = liger.tvd(student, teacher)
        >>> loss.backward()

    Source: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation", arXiv
    2307.15190.
    """
    options = _Options("tvd", 0.5, temperature, log_probs, ignore_index)
    return _divergence("tvd", student, teacher, target, token_weight, denominator, options, reduction)


for _function in (kl_div, jsd, tvd):
    register_composite(_function)
