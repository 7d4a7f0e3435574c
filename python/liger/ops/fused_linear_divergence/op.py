# SPDX-License-Identifier: BSD-3-Clause
"""Divergences between the outputs of two linear layers, in chunks of rows with logits that fit a memory
budget.

The loss can include cross entropy of the same logits. docs/guides/divergence.md defines every term.
"""

from typing import NamedTuple

import torch

from ..._core.dtensor.inputs import is_dtensor
from ..._core.head.float16 import float16_factor
from ..._core.head.results import fake_gradients
from ..._core.math.dtypes import accumulate_dtype
from ..._core.op.arguments import arguments
from ..._core.op.autocast import autocast_operands
from ..._core.op.autograd import wants_grad
from ..._core.op.by_name import by_name
from ..._core.op.fakes import register_fake
from ..._core.op.forward_gradients import gradients_in_forward
from ..._core.op.loss_rows import denominator_tensor, refuse_gradients
from ..._core.op.registration import register_composite
from ..._core.op.tensors import (
    LayerNames,
    check_accum_dtype,
    check_device,
    check_floating,
    check_layer,
    wrong_shape,
)
from ..._core.op.types import DivergenceReduction, Scalar
from ..._core.runtime.memory_budget import check_budget_variable
from ..divergence.op import DIVERGENCE_OPTIONS, jsd_divergence, kl_divergence
from ..divergence.reduction import flatten_pair, nan_if_empty, row_weights
from . import chunks as _kernel  # noqa: F401  (registers the kernel)
from .rows import Terms

# --- fake ---------------------------------------------------------------------------------------------------


@register_fake("liger::fused_linear_divergence_forward")
@by_name(torch.ops.liger.fused_linear_divergence_forward.default)
def _(a):
    rows, wide = a.input.shape[:1], accumulate_dtype(a.input.dtype)
    return (
        a.input.new_empty(rows if a.per_row else (), dtype=wide),
        a.input.new_empty(rows if a.soft else (0,), dtype=wide),
        a.input.new_empty(rows if a.hard else (0,), dtype=wide),
        *fake_gradients(a),
    )


# --- autograd -----------------------------------------------------------------------------------------------

_NAME = "fused_linear_divergence"

_forward_op = gradients_in_forward(
    torch.ops.liger.fused_linear_divergence_forward.default,
    _NAME,
    refused=("teacher", "teacher_weight", "teacher_bias", "row_weight"),
    row_weight="row_weight",
    per_row=("per_row", True, False),
)


def fused_linear_distillation(op, layer, teacher, row_weight, terms, per_row, accum_dtype, memory_budget):
    """(loss, soft losses, hard losses) of rows: ``fused_linear_divergence_forward`` with the needed
    gradients.

    Args:
        op: the name in errors.
        layer: (input, weight, target, bias), after autocast.
        teacher: (hidden states, logits or log-probabilities, weight, indices, bias), after autocast.
        terms: :class:`Terms`.
    """
    (input, weight, target, bias), (teacher, teacher_weight, indices, teacher_bias) = layer, teacher
    frozen = {"teacher": teacher, "teacher_weight": teacher_weight, "teacher_bias": teacher_bias}
    refuse_gradients(op, **frozen, row_weight=row_weight)
    needs_grad = (False,) * 3 if per_row else wants_grad(input, weight, bias)
    factor = None
    is_plain = not (is_dtensor(input) or is_dtensor(row_weight))
    if (
        input.dtype == torch.float16
        and any(needs_grad)
        and is_plain
        and row_weight is not None
        and row_weight.numel()
    ):
        factor = float16_factor(row_weight.float().abs().amax().reciprocal(), input.shape[0])
        row_weight = row_weight * factor
    tensors = input, weight, teacher, teacher_weight, indices, target, bias, teacher_bias, row_weight
    results = _forward_op(*tensors, *terms, per_row, accum_dtype, memory_budget, *needs_grad)[:3]
    return results if factor is None else tuple(result / factor for result in results)


# --- composites ---------------------------------------------------------------------------------------------


class _Teacher(NamedTuple):
    """The tensors of a teacher, as the public functions take them."""

    teacher_input: torch.Tensor | None
    teacher_weight: torch.Tensor | None
    teacher_bias: torch.Tensor | None
    teacher_logits: torch.Tensor | None

    def check(self, op):
        """Raises ValueError unless there is one teacher."""
        if (self.teacher_input is None) == (self.teacher_logits is None):
            found = "neither" if self.teacher_input is None else "both"
            raise ValueError(
                f"{op}: {found} of teacher_input and teacher_logits were given, expected teacher_input with "
                "teacher_weight, or teacher_logits"
            )
        if self.teacher_logits is None and self.teacher_weight is None:
            raise ValueError(f"{op}: teacher_input was given without teacher_weight, expected both")
        for name, tensor in (("teacher_weight", self.teacher_weight), ("teacher_bias", self.teacher_bias)):
            if tensor is not None and self.teacher_logits is not None:
                raise ValueError(
                    f"{op}: {name} was given with teacher_logits, expected it with teacher_input"
                )


class _Options(NamedTuple):
    """The options besides the divergence, in the order of the op schemas."""

    ignore_index: int
    reduction: str
    accum_dtype: torch.dtype | None
    memory_budget: int | None
    temperature: float


def _fused_linear_divergence(op, divergence, layer, given_teacher, token_weight, denominator, options):
    check_budget_variable(options.memory_budget)
    (input, weight, target, bias), given_teacher = layer, _Teacher(*given_teacher)
    denominator = denominator_tensor(denominator, input)
    given_teacher.check(op)
    teacher_weight, teacher_bias = given_teacher.teacher_weight, given_teacher.teacher_bias
    teacher, teacher_name = given_teacher.teacher_input, "teacher_input"
    if teacher is None:
        teacher, teacher_name = given_teacher.teacher_logits, "teacher_logits"
    ignore_index, reduction = options.ignore_index, options.reduction
    # A teacher given as logits is not an operand of a GEMM, so autocast does not cast it.
    operands = (input, weight, bias, teacher_weight, teacher_bias)
    input, weight, bias, teacher_weight, teacher_bias, *states = autocast_operands(
        *operands, *(() if teacher_weight is None else (teacher,))
    )
    teacher = states[0] if states else teacher
    check_accum_dtype(op, "input", input, options.accum_dtype)
    frozen = {teacher_name: teacher, "teacher_weight": teacher_weight, "teacher_bias": teacher_bias}
    refuse_gradients(op, **frozen)
    batch = input.shape[0] if input.dim() > 1 else 1
    rows, teacher, target, token_weight, tokens = flatten_pair(
        op, ("input", teacher_name), input, teacher, target, token_weight
    )
    check_layer(op, LayerNames(), rows, weight, bias, target)
    expected = f"{weight.shape[0]} classes, as weight has"
    if teacher_weight is None:
        check_floating(op, teacher_name, teacher)
        check_device(op, teacher_name, teacher, "input", rows)
        if teacher.shape[-1] != weight.shape[0]:
            raise wrong_shape(op, teacher_name, teacher, f"logits of {expected}")
    else:
        if teacher_weight.dim() != 2 or teacher_weight.shape[0] != weight.shape[0]:
            raise wrong_shape(op, "teacher_weight", teacher_weight, expected)
        check_device(op, teacher_name, teacher, "input", rows)
        names = LayerNames(teacher_name, "teacher_weight", bias="teacher_bias")
        check_layer(op, names, teacher, teacher_weight, teacher_bias)
    row_weight = row_weights(op, rows, batch, target, token_weight, denominator, ignore_index, reduction)
    per_row = reduction == "none"
    terms = Terms(*divergence, options.temperature, soft=1.0, hard=0.0, ignore_index=ignore_index)
    layer, teacher = (rows, weight, target, bias), (teacher, teacher_weight, None, teacher_bias)
    limits = options.accum_dtype, options.memory_budget
    loss, _, _ = fused_linear_distillation(op, layer, teacher, row_weight, terms, per_row, *limits)
    if per_row:
        return tokens.restore(loss)
    return nan_if_empty(loss, rows, batch, reduction, denominator)


# --- public API ---------------------------------------------------------------------------------------------


@arguments(**DIVERGENCE_OPTIONS)
def fused_linear_kl_div(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    teacher_input: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    teacher_logits: torch.Tensor | None = None,
    reverse: bool = False,
    token_weight: torch.Tensor | None = None,
    denominator: Scalar | None = None,
    ignore_index: int = -100,
    reduction: DivergenceReduction = "mean",
    accum_dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """``kl_div(input @ weight.T + bias, teacher_input @ teacher_weight.T + teacher_bias)`` without
    materialising all logits.

    Rows are processed in chunks whose logits, of student and teacher, fit a memory budget. The gradient of
    the student's logits overwrites them. The teacher gets no gradient.

    Args:
        input: (..., H), float16, bfloat16 or float32 (float64 on the torch backend of divergence), any
            strides.
        weight: (V, H), the dtype of input, like bias.
        target: (...), int64 or int32: only rows with another target than ignore_index count; None: all rows.
        bias: (V,) or None.
        teacher_input, teacher_weight, teacher_bias: (..., Ht), (V, Ht), and (V,) or None, of one floating
            dtype: the hidden states and the lm_head of the teacher. The GEMM runs in their dtype.
        teacher_logits: (..., V), any floating dtype: instead of these, its logits.
        reverse, token_weight, denominator, ignore_index, reduction, temperature: as in :func:`liger.kl_div`.
            With ``reduction="none"`` the backward computes the logits a second time.
        accum_dtype: as in :func:`liger.fused_linear_ce`.
        memory_budget: bytes for the logits of a chunk; None: ``LIGER_MEMORY_BUDGET``, or 512 MiB if that is
            unset. Lower it if the loss runs out of memory.

    It takes no softcap, logits_dtype, accumulate_grad_weight and lora_a: the kernels of divergences read two
    rows of logits as a GEMM writes them. Under autocast the operands are cast as
    ``torch.nn.functional.linear`` casts them.

    Returns:
        As :func:`liger.kl_div`. Differentiable once, in input, weight and bias. The GEMM of a gradient that
        is not needed is skipped.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: mismatched shapes, vocabularies, dtypes or devices, a tensor of the teacher, a
            token_weight or a denominator that requires grad.
        ValueError: options out of range, no teacher or two, a denominator with ``"none"``, a
            LIGER_MEMORY_BUDGET that is not a positive number of bytes.

    Source: the divergence as in :func:`liger.kl_div`; the chunks as in Hsu et al., "Liger Kernel", arXiv
    2410.10989.

    Example::

        >>> teacher = {"teacher_input": teacher_input, "teacher_weight": teacher_weight}
        >>> loss = liger.fused_linear_kl_div(input, weight, target, **teacher)
    """
    teacher = teacher_input, teacher_weight, teacher_bias, teacher_logits
    options = _Options(ignore_index, reduction, accum_dtype, memory_budget, temperature)
    layer, divergence = (input, weight, target, bias), (kl_divergence(reverse), 0.5)
    return _fused_linear_divergence(
        "fused_linear_kl_div", divergence, layer, teacher, token_weight, denominator, options
    )


@arguments(**DIVERGENCE_OPTIONS)
def fused_linear_jsd(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    teacher_input: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    teacher_logits: torch.Tensor | None = None,
    beta: float = 0.5,
    token_weight: torch.Tensor | None = None,
    denominator: Scalar | None = None,
    ignore_index: int = -100,
    reduction: DivergenceReduction = "mean",
    accum_dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """:func:`liger.jsd` of the outputs of two linear layers without materialising all logits.

    Args:
        beta: as in :func:`liger.jsd`.
        input, weight and the others: as in :func:`liger.fused_linear_kl_div`.

    Returns:
        As :func:`liger.fused_linear_kl_div`.

    Raises:
        TypeError, RuntimeError, ValueError: as :func:`liger.fused_linear_kl_div`.

    Source: GKD, arXiv 2306.13649, in the chunks of "Liger Kernel", arXiv 2410.10989.

    Example::

        >>> teacher = {"teacher_input": teacher_input, "teacher_weight": teacher_weight}
        >>> loss = liger.fused_linear_jsd(input, weight, target, beta=0.1, **teacher)
    """
    teacher = teacher_input, teacher_weight, teacher_bias, teacher_logits
    options = _Options(ignore_index, reduction, accum_dtype, memory_budget, temperature)
    layer, divergence = (input, weight, target, bias), (jsd_divergence(beta), beta)
    return _fused_linear_divergence(
        "fused_linear_jsd", divergence, layer, teacher, token_weight, denominator, options
    )


for _function in (fused_linear_kl_div, fused_linear_jsd):
    register_composite(_function)
