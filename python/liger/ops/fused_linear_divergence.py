"""Divergences between the outputs of two linear layers, in chunks of rows whose logits fit a memory budget.

The chunk loop is the same on every device: torch GEMMs around the row ops. Logits exist for a slice of a chunk at a
time. So most of the budget is for the gradient of the student's logits, which makes chunks larger and sums of weight
gradients fewer. The logits of 16-bit models are float32, because the gradient is a small difference if student and
teacher are similar; the gradient is rounded to 16 bits once. The loss can include cross entropy of the same logits.
docs/divergence.md defines every term.
"""

from __future__ import annotations

import torch

from .._core.arguments import (
    LayerNames,
    arguments,
    check_device,
    check_floating,
    check_layer,
    check_like,
    wrong_shape,
)
from .._core.autocast import autocast_operands
from .._core.autograd import wants_grad
from .._core.cross_entropy_math import check_targets
from .._core.dtensor import unflatten_tokens
from .._core.dtypes import accumulate_dtype
from .._core.fakes import register_fake
from .._core.forward_gradients import gradients_in_forward
from .._core.lm_head import LMHeadGradients, Sm90LMHeadGradients, row_chunks
from .._core.lm_head_fp16 import ScaledLMHeadGradients, scale_of
from .._core.loss_rows import denominator_tensor, refuse_gradients
from .._core.matmul import write_linear, write_wide_linear
from .._core.memory_budget import check_budget_variable
from .._core.types import DivergenceReduction, Scalar
from ..backend import register_portable, targets_checked
from .divergence import DIVERGENCE_OPTIONS, flatten_pair, jsd_divergence, nan_if_empty, row_weights
from .fused_linear_divergence_torch import Rows, RowWeights, Targets, Terms, distil_rows

# --- kernel -------------------------------------------------------------------------------------------------------

# A chunk is divided into about so many slices. Their logits exist together with the gradient of the whole chunk.
_SLICES_PER_GRADIENT = 3
# Rows of a GEMM tile.
_TILE = 128


def _gradients(input, weight, bias, needs_grad, exact, memory_budget, aux_rows, aux_in_grad_weight, scale):
    """(:class:`LMHeadGradients` of the student, rows of the first chunk, of any other chunk, of a slice)"""
    gradients = Sm90LMHeadGradients.plan(
        input, weight, bias, needs_grad, memory_budget, aux_rows, aux_in_grad_weight=aux_in_grad_weight
    )
    if gradients is not None:
        plan = gradients.layout
        return gradients, plan.first_rows, plan.chunk_rows, plan.slice_rows
    chunk_rows, chunks, slice_rows = _plan(input, weight, needs_grad, exact, memory_budget, aux_rows)
    if scale is None:
        gradients = LMHeadGradients(input, weight, bias, needs_grad, chunks, exact)
    else:
        gradients = ScaledLMHeadGradients(input, weight, bias, needs_grad, chunks, exact, scale)
    return gradients, chunk_rows, chunk_rows, slice_rows


def _plan(input, weight, needs_grad, exact, memory_budget, aux_rows):
    """(rows of a chunk, chunks, rows of a slice). ``aux_rows`` counts the auxiliary rows, in the dtype of input, per
    row of dlogits."""
    rows, hidden = input.shape
    vocab, size = weight.shape[0], input.element_size()
    budget = torch.ops.liger.default_memory_budget() if memory_budget is None else memory_budget
    row_bytes = -(-vocab * size // 16) * 16
    if not any(needs_grad):
        # No dlogits: a chunk is one slice.
        slice_rows = max(min(_whole_tiles(budget // (row_bytes * aux_rows)), rows), 1)
        return slice_rows, -(-rows // slice_rows), slice_rows

    def for_student(amount):
        return max(amount * _SLICES_PER_GRADIENT // (_SLICES_PER_GRADIENT + aux_rows), 1)

    # The hidden size is scaled, too: it limits the logits that fit the memory of the weight gradient.
    chunk_rows, chunks, _, _ = torch.ops.liger.plan_chunks(
        rows, for_student(hidden), vocab, size, needs_grad[1], exact, for_student(budget)
    )
    if aux_rows == 0:
        return chunk_rows, chunks, chunk_rows
    slice_rows = _whole_tiles(
        max(chunk_rows // _SLICES_PER_GRADIENT, (budget // row_bytes - chunk_rows) // aux_rows, 1)
    )
    if slice_rows < chunk_rows:
        # Slices of equal size, in whole tiles if a tile fits.
        even = -(-chunk_rows // -(-chunk_rows // slice_rows))
        slice_rows = min(-(-even // _TILE) * _TILE, slice_rows)
    return chunk_rows, chunks, min(slice_rows, chunk_rows)


def _whole_tiles(rows):
    return rows // _TILE * _TILE or rows


class _Logits:
    """Computes the logits of student and teacher for one slice at a time, in one dtype.

    Attributes:
        wide: that dtype.
        width: size of its elements over the size of an element of the gradient: 1 or 2.
        num_buffers: 1, or 2 if the teacher's logits need memory, too: they may be given in that dtype.
    """

    def __init__(self, input, weight, bias, teacher, teacher_weight, teacher_bias, needs_teacher):
        self.wide = accumulate_dtype(input.dtype)
        self.width = self.wide.itemsize // input.element_size()
        self._head, self._teacher = (weight, bias), teacher
        self._teacher_head = teacher_weight, teacher_bias
        self._teacher_needs_buffer = needs_teacher and (
            teacher_weight is not None or teacher.dtype != self.wide
        )
        self.num_buffers = 1 + self._teacher_needs_buffer

    def rows_in(self, memory):
        """Memory of rows of the gradient as half as many rows of float32 logits."""
        if self.width == 1:
            return memory
        (gradient_rows, classes), stride = memory.shape, memory.stride(0)
        rows = gradient_rows // 2
        flat = memory.as_strided((2 * rows * stride,), (1,))
        return flat.view(self.wide).view(rows, stride)[:, :classes]

    def _write(self, x, weight, bias, out):
        (write_linear if self.width == 1 else write_wide_linear)(x, weight, bias, out)
        return out

    def student(self, x, memory):
        """The student's logits of the hidden states x, at the beginning of ``memory``."""
        return self._write(x, *self._head, memory[: x.shape[0]])

    def teacher(self, rows, memory):
        """The teacher's logits (or top-k log-probabilities) of these rows of the batch. Logits that must be computed or
        converted use the end of ``memory``."""
        given = self._teacher[rows]
        if not self._teacher_needs_buffer:
            return given
        memory = memory[memory.shape[0] - given.shape[0] :]
        if self._teacher_head[0] is None:
            return memory.copy_(given)
        return self._write(given, *self._teacher_head, memory)


def _check_classes(divergence, vocab, soft, hard, target, teacher, teacher_indices, ignore_index):
    """Raises RuntimeError for targets and teacher indices out of range. Not on a GPU, where they make the row nan,
    unless LIGER_CHECK_TARGETS is 1: the check synchronises."""
    named = {"forward_kl": "kl_div", "reverse_kl": "kl_div", "topk_tail": "topk"}.get(divergence, divergence)
    for tensor in (target, teacher_indices):
        if tensor is not None and tensor.device.type != "cpu" and not targets_checked():
            return
    op = f"fused_linear_{named}"
    if hard:
        check_targets(op, target, vocab, ignore_index)
    if soft and teacher_indices is not None:
        bad = ((teacher_indices < 0) | (teacher_indices >= vocab)) & (teacher > -torch.inf)
        if target is not None:
            bad &= (target != ignore_index).unsqueeze(1)
        if bad.any():
            row, k = bad.nonzero()[0].tolist()
            raise RuntimeError(
                f"{op}: teacher_indices at row {row}, place {k} is {int(teacher_indices[row, k])}, expected "
                f"0 <= class < {vocab}"
            )


def fused_linear_divergence_forward_kernel(
    input, weight, teacher, teacher_weight, teacher_indices, target, bias, teacher_bias, row_weight, divergence, beta,
    temperature, soft, hard, ignore_index, per_row, accum_dtype, memory_budget, need_grad_input, need_grad_weight,
    need_grad_bias,
):  # fmt: skip
    torch.ops.liger.check_fused_linear_divergence(
        input, weight, teacher, teacher_weight, teacher_indices, target, bias, teacher_bias, row_weight, divergence,
        beta, temperature, soft, hard, accum_dtype, memory_budget,
    )  # fmt: skip
    rows, vocab, wide = input.shape[0], weight.shape[0], accumulate_dtype(input.dtype)
    _check_classes(divergence, vocab, soft, hard, target, teacher, teacher_indices, ignore_index)
    terms = Terms(divergence, beta, temperature, soft, hard, ignore_index)
    needs_grad, exact = (
        (need_grad_input, need_grad_weight, need_grad_bias),
        accum_dtype in (None, torch.float32),
    )
    need_gradient = any(needs_grad)
    targets = Targets.of_rows(input, target, ignore_index, vocab if hard else None)
    row_weight = (input.new_ones((), dtype=wide) if row_weight is None else row_weight.to(wide)).expand(rows)
    scale = scale_of(row_weight) if need_gradient and input.dtype == torch.float16 else None
    weights = RowWeights.of(row_weight if scale is None else row_weight * scale, terms, targets)

    logits = _Logits(
        input, weight, bias, teacher, teacher_weight, teacher_bias, bool(soft) and teacher_indices is None
    )
    gradients, first_rows, chunk_rows, slice_rows = _gradients(
        input, weight, bias, needs_grad, exact, memory_budget, logits.width * (logits.num_buffers + terms.extra_logits),
        aux_in_grad_weight=not terms.extra_logits, scale=scale,
    )  # fmt: skip
    if need_gradient:
        # An even number of rows, so that the float32 rows after them are aligned.
        memory, aux_rows = gradients.new_logits_with_aux(
            chunk_rows + chunk_rows % 2, logits.width * logits.num_buffers * slice_rows
        )
        buffer = logits.rows_in(aux_rows)
    else:
        memory, buffer = None, input.new_empty(logits.num_buffers * slice_rows, vocab, dtype=wide)
    results = []
    for chunk in row_chunks(rows, chunk_rows, first_rows):
        x, slice_buffer, step = input[chunk], buffer, slice_rows
        unused = gradients.unwritten_weight_rows() if need_gradient and not terms.extra_logits else None
        if unused is not None:
            unused_rows = unused.shape[0] // (logits.width * logits.num_buffers) // _TILE * _TILE
            # A longer first chunk uses the memory of the auxiliary rows.
            if unused_rows > step or x.shape[0] > chunk_rows:
                slice_buffer, step = logits.rows_in(unused), unused_rows
        for part in row_chunks(x.shape[0], step):
            batch_rows = slice(chunk.start + part.start, chunk.start + part.stop)
            buffers = slice_buffer[: logits.num_buffers * (part.stop - part.start)]
            inputs = Rows(
                logits.student(x[part], buffers), logits.teacher(batch_rows, buffers),
                None if teacher_indices is None else teacher_indices[batch_rows], targets.at(batch_rows),
                weights.at(batch_rows), memory[part] if need_gradient else None,
            )  # fmt: skip
            results.append(distil_rows(terms, inputs))
        if need_gradient:
            ignored = None if target is None else targets.at(chunk).ignored
            gradients.add(x, memory[: x.shape[0]], gradients.input[chunk], ignored)

    def joined(factor, losses):
        if not (factor and losses):
            return input.new_empty(0, dtype=wide)
        return torch.cat(losses) if scale is None else torch.cat(losses) / scale

    losses = [joined(factor, [r[i] for r in results]) for i, factor in enumerate((soft, hard))]
    total = losses[0] + losses[1] if soft and hard else losses[0 if soft else 1].clone()
    return total if per_row else total.sum(), *losses, *gradients.finish()


register_portable({"fused_linear_divergence_forward": fused_linear_divergence_forward_kernel})


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
    return _forward_op(
        input, weight, teacher, teacher_weight, teacher_indices, target, bias, teacher_bias, row_weight, divergence,
        beta, temperature, soft, hard, ignore_index, per_row, accum_dtype, memory_budget,
        *((False,) * 3 if per_row else wants_grad(input, weight, bias)),
    )[:3]  # fmt: skip


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
    refuse_gradients(op, teacher=teacher, teacher_weight=teacher_weight, teacher_bias=teacher_bias)
    batch = input.shape[0] if input.dim() > 1 else 1
    rows, teacher, target, token_weight, like = flatten_pair(
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
        return unflatten_tokens(loss, like)
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
        RuntimeError: mismatched shapes, vocabularies, dtypes or devices, options out of range, a tensor of the teacher,
            a token_weight or a denominator that requires grad.
        ValueError: a LIGER_MEMORY_BUDGET that is not a positive number of bytes.

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
