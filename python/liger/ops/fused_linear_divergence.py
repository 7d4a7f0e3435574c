"""Divergences between the outputs of two linear layers whose logits exist only a chunk of rows at a time.

The loop is the same on every device: products of torch around the row ops. The logits of a chunk of the student become
their gradient in place; those of the teacher, which nothing needs afterwards, exist for a part of the chunk at a time,
so that most of the budget is for the student: fewer sums of the weight's gradient. Cross entropy of the same logits can
be a part of the loss. docs/divergence.md defines every term.
"""

from typing import NamedTuple

import torch

from ..backend import register_portable
from ..distributed import unflatten_tokens
from ._arguments import LayerNames, arguments, check_layer, check_like, wrong_shape
from ._autocast import autocast_operands
from ._autograd import wants_grad
from ._budget import check_budget_variable
from ._distillation_rows import Part, RowWeights, Targets, Terms, distil_rows
from ._fakes import register_fake
from ._linear_chunks import HeadGradients, Sm90HeadGradients, row_chunks
from ._made_gradients import gradients_in_forward
from ._products import write_linear
from .cross_entropy import denominator_tensor, refuse_gradients
from .divergence import DIVERGENCE_OPTIONS, flatten_pair, of_beta, row_weights
from .rms_norm import accumulate_dtype

# --- kernel -------------------------------------------------------------------------------------------------------

# Parts of a chunk, each with logits of the teacher (or a gradient apart) beside the chunk's of the student.
_PARTS = 3
# Rows of a tile of the products.
_TILE = 128


def _gradients(input, weight, bias, wanted, exact, memory_budget, apart, hosted):
    """(the gradients of the student's layer, rows of the first chunk, of another one, of a part)"""
    gradients = Sm90HeadGradients.plan(input, weight, bias, wanted, memory_budget, apart, hosted=hosted)
    if gradients is not None:
        return gradients, gradients.first_rows, gradients.chunk_rows, gradients.part_rows
    chunk_rows, chunks, part_rows = _plan(input, weight, wanted[1], exact, memory_budget, apart)
    return HeadGradients(input, weight, bias, wanted, chunks, exact), chunk_rows, chunk_rows, part_rows


def _plan(input, weight, need_grad_weight, exact, memory_budget, apart):
    """(rows of a chunk, chunks, rows of a part). ``apart`` counts the logits that a part has beside the student's."""
    rows, hidden = input.shape
    vocab, size = weight.shape[0], input.element_size()
    budget = torch.ops.liger.default_memory_budget() if memory_budget is None else memory_budget

    def for_student(amount):
        return max(amount * _PARTS // (_PARTS + apart), 1)

    # Where logits lie in the memory of the weight's gradient, its hidden size is what limits them.
    chunk_rows, chunks, _, _ = torch.ops.liger.plan_chunks(
        rows, for_student(hidden), vocab, size, need_grad_weight, exact, for_student(budget)
    )
    if apart == 0:
        return chunk_rows, chunks, chunk_rows
    line = -(-vocab * size // 16) * 16
    part = max(chunk_rows // _PARTS, (budget // line - chunk_rows) // apart, 1)
    part = part // _TILE * _TILE or part
    if part < chunk_rows:
        # Parts of one size, in whole tiles if there is room for one.
        even = -(-chunk_rows // -(-chunk_rows // part))
        part = min(-(-even // _TILE) * _TILE, part)
    return chunk_rows, chunks, min(part, chunk_rows)


class _Teacher(NamedTuple):
    """What it says of the rows of a batch. Its logits, if they are products, exist for a part of a chunk at a time.

    Attributes:
        rows: (T, Ht) hidden states, or what :class:`Part` says.
        weight, bias: of the products, else None.
        indices: (T, k) or None.
        memory: for the logits of ``part_rows`` rows, where they are products.
        part_rows: of a part.
    """

    rows: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    indices: torch.Tensor | None
    memory: torch.Tensor
    part_rows: int

    def parts(self, chunk, unused):
        """The :class:`Part` of each part of a chunk. ``unused``: other memory for logits, or None."""
        memory, step = self.memory, self.part_rows
        if unused is not None and unused.shape[0] > step:
            memory, step = unused, unused.shape[0]
        for part in row_chunks(chunk.stop - chunk.start, step):
            here = slice(chunk.start + part.start, chunk.start + part.stop)
            known = self.rows[here]
            if self.weight is not None:
                known = memory[: part.stop - part.start]
                write_linear(self.rows[here], self.weight, self.bias, known)
            yield Part(part, known, None if self.indices is None else self.indices[here])


def fused_linear_divergence_forward_kernel(
    input, weight, teacher, teacher_weight, teacher_indices, target, bias, teacher_bias, row_weight, divergence, beta,
    temperature, soft, hard, ignore_index, per_row, accum_dtype, memory_budget, need_grad_input, need_grad_weight,
    need_grad_bias,
):  # fmt: skip
    torch.ops.liger.check_fused_linear_divergence(
        input, weight, teacher, teacher_weight, teacher_indices, target, bias, teacher_bias, row_weight, divergence,
        beta, temperature, soft, hard, accum_dtype, memory_budget,
    )  # fmt: skip
    rows, wide = input.shape[0], accumulate_dtype(input.dtype)
    terms = Terms(divergence, beta, temperature, soft, hard, ignore_index)
    wanted, exact = (need_grad_input, need_grad_weight, need_grad_bias), accum_dtype in (None, torch.float32)
    teacher_weight = teacher_weight if soft else None
    of_teacher = teacher_weight is not None
    # What is made apart would be as large as a part.
    hosted = of_teacher and not terms.hard_apart
    gradients, first_rows, chunk_rows, part_rows = _gradients(
        input, weight, bias, wanted, exact, memory_budget, of_teacher + terms.hard_apart, hosted
    )
    memory, beside = gradients.new_logits_beside(chunk_rows, part_rows if of_teacher else 0)
    known = _Teacher(teacher, teacher_weight, teacher_bias, teacher_indices, beside, part_rows)
    row_weight = input.new_ones((), dtype=wide) if row_weight is None else row_weight.to(wide)
    weights = RowWeights((row_weight * soft).expand(rows), (row_weight * hard).expand(rows))
    targets = Targets.of_rows(input, target, ignore_index)
    losses = [input.new_empty(rows if factor else 0, dtype=wide) for factor in (soft, hard)]
    for chunk in row_chunks(rows, chunk_rows, first_rows):
        logits = memory[: chunk.stop - chunk.start]
        write_linear(input[chunk], weight, bias, logits)
        unused = gradients.unused_rows() if hosted else None
        found = distil_rows(
            terms, logits, known.parts(chunk, unused), targets.at(chunk), weights.at(chunk), any(wanted)
        )
        for loss, of_rows in zip(losses, found, strict=True):
            if of_rows is not None:
                loss[chunk] = of_rows
        if any(wanted):
            ignored = None if target is None else targets.at(chunk).ignored
            gradients.add(input[chunk], logits, gradients.input[chunk], ignored)
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
    """(loss, soft losses, hard losses) of rows: ``fused_linear_divergence_forward`` with the gradients that are needed.

    Operands have the dtype of autocast already. Errors name ``op``.
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
    input, weight, bias, teacher, teacher_weight, teacher_bias = autocast_operands(
        input, weight, bias, teacher, teacher_weight, teacher_bias
    )
    refuse_gradients(op, teacher=teacher, teacher_weight=teacher_weight, teacher_bias=teacher_bias)
    batch = input.shape[0] if input.dim() > 1 else 1
    rows, teacher, target, token_weight, like = flatten_pair(
        op, ("input", "teacher"), input, teacher, target, token_weight
    )
    check_layer(op, LayerNames(), rows, weight, bias, target)
    check_like(op, "teacher", teacher, "input", rows)
    expected = f"{weight.shape[0]} classes, those of weight"
    if teacher_weight is None:
        if teacher.shape[-1] != weight.shape[0]:
            raise wrong_shape(
                op, "teacher", teacher, f"logits of {expected}, or hidden states with teacher_weight"
            )
    else:
        if teacher_weight.dim() != 2 or teacher_weight.shape[0] != weight.shape[0]:
            raise wrong_shape(op, "teacher_weight", teacher_weight, expected)
        check_layer(op, _TEACHER, teacher, teacher_weight, teacher_bias)
    row_weight = row_weights(op, rows, batch, target, token_weight, denominator, ignore_index, reduction)
    per_row = reduction == "none"
    loss, _, _ = fused_linear_distillation(
        op, rows, weight, teacher, teacher_weight, None, target, bias, teacher_bias, row_weight, divergence, beta,
        temperature, 1.0, 0.0, ignore_index, per_row, accum_dtype, memory_budget,
    )  # fmt: skip
    return unflatten_tokens(loss, like) if per_row else loss


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
        denominator, of_beta(beta), beta, temperature, ignore_index, reduction, accum_dtype, memory_budget,
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
    input, weight, teacher, teacher_weight=None, target=None, *, bias=None, teacher_bias=None, token_weight=None,
    denominator=None, reverse=False, temperature=1.0, ignore_index=-100, reduction="mean", accum_dtype=None,
    memory_budget=None,
):  # fmt: skip
    """``kl_div(input @ weight.T + bias, teacher @ teacher_weight.T + teacher_bias)`` without ever holding all logits.

    The rows are cut into chunks whose logits, of student and teacher, fit a memory budget; the student's become their
    gradient in place. The teacher is frozen.

    Args:
        input: (..., H), float16, bfloat16 or float32 (float64 where divergence is served by plain torch), any strides.
        weight: (V, H), the dtype of input, as all tensors but target, token_weight and denominator.
        teacher: (..., Ht), the hidden states of the teacher, or its logits (..., V) without ``teacher_weight``.
        teacher_weight: (V, Ht) or None.
        target, token_weight, denominator, reverse, temperature, ignore_index, reduction: as in :func:`liger.kl_div`.
            With ``"none"`` the backward computes the logits a second time.
        bias, teacher_bias: (V,) or None.
        accum_dtype: as in :func:`liger.fused_linear_ce`.
        memory_budget: bytes for the logits of a chunk; None for ``LIGER_MEMORY_BUDGET``, else 512 MiB.

    Under autocast the operands are cast as ``torch.nn.functional.linear`` casts them.

    Returns:
        As :func:`liger.kl_div`. Differentiable once, in input, weight and bias; no work is done for those that need no
        gradient.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: mismatched shapes (also of the two vocabularies), dtypes or devices, options out of range, a
            tensor of the teacher, a weight of tokens or a denominator that requires grad.
        ValueError: a LIGER_MEMORY_BUDGET that is not a positive number of bytes.

    Source: chunks as in Hsu et al., "Liger Kernel", arXiv 2410.10989.
    """
    check_budget_variable(memory_budget)
    denominator = denominator_tensor(denominator, input)
    return _fused_linear_kl_div(
        input, weight, teacher, teacher_weight, target, bias, teacher_bias, token_weight, denominator, reverse,
        temperature, ignore_index, reduction, accum_dtype, memory_budget,
    )  # fmt: skip


@arguments(**DIVERGENCE_OPTIONS)
def fused_linear_jsd(
    input, weight, teacher, teacher_weight=None, target=None, *, bias=None, teacher_bias=None, token_weight=None,
    denominator=None, beta=0.5, temperature=1.0, ignore_index=-100, reduction="mean", accum_dtype=None,
    memory_budget=None,
):  # fmt: skip
    """:func:`liger.jsd` of two linear layers' outputs without ever holding all logits.

    Args:
        beta: as in :func:`liger.jsd`.
        input, weight and the others: as in :func:`liger.fused_linear_kl_div`.

    Returns:
        As :func:`liger.fused_linear_kl_div`.

    Raises:
        RuntimeError, ValueError: as :func:`liger.fused_linear_kl_div`.

    Source: GKD, arXiv 2306.13649, in the chunks of "Liger Kernel", arXiv 2410.10989.
    """
    check_budget_variable(memory_budget)
    denominator = denominator_tensor(denominator, input)
    return _fused_linear_jsd(
        input, weight, teacher, teacher_weight, target, bias, teacher_bias, token_weight, denominator, beta,
        temperature, ignore_index, reduction, accum_dtype, memory_budget,
    )  # fmt: skip
