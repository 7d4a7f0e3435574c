"""Divergences between the outputs of two linear layers, in chunks of rows whose logits fit a memory budget.

The loss can include cross entropy of the same logits. docs/divergence.md defines every term.
"""

from __future__ import annotations

import torch

from .._core.arguments import (
    LayerNames,
    arguments,
    check_accum_dtype,
    check_device,
    check_floating,
    check_layer,
    check_like,
    wrong_shape,
)
from .._core.autocast import autocast_operands
from .._core.autograd import wants_grad
from .._core.dtensor import is_dtensor
from .._core.dtypes import accumulate_dtype
from .._core.fakes import register_fake
from .._core.float16_factor import float16_factor
from .._core.forward_gradients import gradients_in_forward
from .._core.loss_rows import denominator_tensor, refuse_gradients
from .._core.memory_budget import check_budget_variable
from .._core.types import DivergenceReduction, Scalar
from . import fused_linear_divergence_kernel as _kernel  # noqa: F401  (registers the kernel)
from .divergence import DIVERGENCE_OPTIONS, flatten_pair, jsd_divergence, nan_if_empty, row_weights

# --- fake ---------------------------------------------------------------------------------------------------------


@register_fake("liger::fused_linear_divergence_forward")
def _(
    input, weight, teacher, teacher_weight, teacher_indices, target, bias, teacher_bias, row_weight, divergence, beta,
    temperature, soft, hard, ignore_index, per_row, accum_dtype, memory_budget, need_grad_input, need_grad_weight,
    need_grad_bias,
):  # fmt: skip
    rows, wide = input.shape[:1], accumulate_dtype(input.dtype)
    return (
        input.new_empty(rows if per_row else (), dtype=wide),
        input.new_empty(rows if soft else (0,), dtype=wide),
        input.new_empty(rows if hard else (0,), dtype=wide),
        input.new_empty(input.shape if need_grad_input else (0,)),
        input.new_empty(weight.shape if need_grad_weight else (0,)),
        input.new_empty(bias.shape if need_grad_bias and bias is not None else (0,)),
    )


# --- autograd -----------------------------------------------------------------------------------------------------

_NAME = "fused_linear_divergence"

_forward_op = gradients_in_forward(
    torch.ops.liger.fused_linear_divergence_forward.default,
    _NAME,
    refused=("teacher", "teacher_weight", "teacher_bias", "row_weight"),
    row_weight="row_weight",
    per_row=("per_row", True, False),
)


def fused_linear_distillation(
    op, input, weight, teacher, teacher_weight, teacher_indices, target, bias, teacher_bias, row_weight, divergence,
    beta, temperature, soft, hard, ignore_index, per_row, accum_dtype, memory_budget,
):  # fmt: skip
    """(loss, soft losses, hard losses) of rows: ``fused_linear_divergence_forward`` with the needed gradients.

    The caller has applied autocast to the operands. Errors name ``op``.
    """
    refuse_gradients(
        op, teacher=teacher, teacher_weight=teacher_weight, teacher_bias=teacher_bias, row_weight=row_weight
    )
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
    results = _forward_op(
        input, weight, teacher, teacher_weight, teacher_indices, target, bias, teacher_bias, row_weight, divergence,
        beta, temperature, soft, hard, ignore_index, per_row, accum_dtype, memory_budget, *needs_grad,
    )[:3]  # fmt: skip
    return results if factor is None else tuple(result / factor for result in results)


_TEACHER = LayerNames("teacher", "teacher_weight", bias="teacher_bias")

# --- composites ---------------------------------------------------------------------------------------------------


def _run(
    op, input, weight, teacher, teacher_weight, target, bias, teacher_bias, token_weight, denominator, divergence, beta,
    temperature, ignore_index, reduction, accum_dtype, memory_budget,
):  # fmt: skip
    # A teacher given as logits is not an operand of a GEMM, so autocast does not cast it.
    operands = (input, weight, bias, teacher_weight, teacher_bias)
    input, weight, bias, teacher_weight, teacher_bias, *states = autocast_operands(
        *operands, *(() if teacher_weight is None else (teacher,))
    )
    teacher = states[0] if states else teacher
    check_accum_dtype(op, "input", input, accum_dtype)
    refuse_gradients(op, teacher=teacher, teacher_weight=teacher_weight, teacher_bias=teacher_bias)
    batch = input.shape[0] if input.dim() > 1 else 1
    rows, teacher, target, token_weight, tokens = flatten_pair(
        op, ("input", "teacher"), input, teacher, target, token_weight
    )
    check_layer(op, LayerNames(), rows, weight, bias, target)
    expected = f"{weight.shape[0]} classes, those of weight"
    if teacher_weight is None:
        check_floating(op, "teacher", teacher)
        check_device(op, "teacher", teacher, "input", rows)
        if teacher.shape[-1] != weight.shape[0]:
            raise wrong_shape(
                op, "teacher", teacher, f"logits of {expected}, or hidden states with teacher_weight"
            )
    else:
        if teacher_weight.dim() != 2 or teacher_weight.shape[0] != weight.shape[0]:
            raise wrong_shape(op, "teacher_weight", teacher_weight, expected)
        check_like(op, "teacher", teacher, "input", rows)
        check_layer(op, _TEACHER, teacher, teacher_weight, teacher_bias)
    row_weight = row_weights(op, rows, batch, target, token_weight, denominator, ignore_index, reduction)
    per_row = reduction == "none"
    loss, _, _ = fused_linear_distillation(
        op, rows, weight, teacher, teacher_weight, None, target, bias, teacher_bias, row_weight, divergence, beta,
        temperature, 1.0, 0.0, ignore_index, per_row, accum_dtype, memory_budget,
    )  # fmt: skip
    if per_row:
        return tokens.restore(loss)
    return nan_if_empty(loss, rows, batch, reduction, denominator)


def _fused_linear_kl_div(
    input, weight, teacher, teacher_weight=None, target=None, bias=None, teacher_bias=None, token_weight=None,
    denominator=None, reverse=False, temperature=1.0, ignore_index=-100, reduction="mean", accum_dtype=None,
    memory_budget=None,
):  # fmt: skip
    return _run(
        "fused_linear_kl_div", input, weight, teacher, teacher_weight, target, bias, teacher_bias, token_weight,
        denominator, "reverse_kl" if reverse else "forward_kl", 0.5, temperature, ignore_index, reduction, accum_dtype,
        memory_budget,
    )  # fmt: skip


def _fused_linear_jsd(
    input, weight, teacher, teacher_weight=None, target=None, bias=None, teacher_bias=None, token_weight=None,
    denominator=None, beta=0.5, temperature=1.0, ignore_index=-100, reduction="mean", accum_dtype=None,
    memory_budget=None,
):  # fmt: skip
    return _run(
        "fused_linear_jsd", input, weight, teacher, teacher_weight, target, bias, teacher_bias, token_weight,
        denominator, jsd_divergence(beta), beta, temperature, ignore_index, reduction, accum_dtype, memory_budget,
    )  # fmt: skip


_library = torch.library.Library("liger", "IMPL")
for _name, _composite in (
    ("fused_linear_kl_div", _fused_linear_kl_div),
    ("fused_linear_jsd", _fused_linear_jsd),
):
    _library.impl(_name, _composite, "CompositeImplicitAutograd")


# --- public API ---------------------------------------------------------------------------------------------------


@arguments(**DIVERGENCE_OPTIONS)
def fused_linear_kl_div(
    input: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor,
    teacher_weight: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    denominator: Scalar | None = None,
    reverse: bool = False,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: DivergenceReduction = "mean",
    accum_dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
) -> torch.Tensor:
    """``kl_div(input @ weight.T + bias, teacher @ teacher_weight.T + teacher_bias)`` without materialising all logits.

    Rows are processed in chunks whose logits, of student and teacher, fit a memory budget. The gradient of the
    student's logits overwrites them. The teacher gets no gradient.

    Args:
        input: (..., H), float16, bfloat16 or float32 (float64 on the torch backend of divergence), any strides.
        weight: (V, H), the dtype of input, like bias and the tensors of the teacher other than logits.
        teacher: (..., Ht), the hidden states of the teacher; without ``teacher_weight`` its logits (..., V), in any
            floating dtype.
        teacher_weight: (V, Ht) or None.
        target, token_weight, denominator, reverse, temperature, ignore_index, reduction: as in :func:`liger.kl_div`.
            With ``"none"`` the backward computes the logits a second time.
        bias, teacher_bias: (V,) or None.
        accum_dtype: as in :func:`liger.fused_linear_ce`.
        memory_budget: bytes for the logits of a chunk; None: ``LIGER_MEMORY_BUDGET``, or 512 MiB if that is unset.

    Under autocast the operands are cast as ``torch.nn.functional.linear`` casts them.

    Returns:
        As :func:`liger.kl_div`. Differentiable once, in input, weight and bias. The GEMM of a gradient that is not
        needed is skipped.

    Raises:
        TypeError: an argument of another type.
        ValueError: options out of range, a denominator with ``"none"``, a LIGER_MEMORY_BUDGET that is not a positive
            number of bytes.
        RuntimeError: mismatched shapes, vocabularies, dtypes or devices, a tensor of the teacher, a token_weight or a
            denominator that requires grad.

    Source: the divergence as in :func:`liger.kl_div`; the chunks as in Hsu et al., "Liger Kernel", arXiv 2410.10989.
    """
    check_budget_variable(memory_budget)
    denominator = denominator_tensor(denominator, input)
    return _fused_linear_kl_div(
        input, weight, teacher, teacher_weight, target, bias, teacher_bias, token_weight, denominator, reverse,
        temperature, ignore_index, reduction, accum_dtype, memory_budget,
    )  # fmt: skip


@arguments(**DIVERGENCE_OPTIONS)
def fused_linear_jsd(
    input: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor,
    teacher_weight: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    denominator: Scalar | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: DivergenceReduction = "mean",
    accum_dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
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
    """
    check_budget_variable(memory_budget)
    denominator = denominator_tensor(denominator, input)
    return _fused_linear_jsd(
        input, weight, teacher, teacher_weight, target, bias, teacher_bias, token_weight, denominator, beta,
        temperature, ignore_index, reduction, accum_dtype, memory_budget,
    )  # fmt: skip
