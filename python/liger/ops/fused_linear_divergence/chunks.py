# SPDX-License-Identifier: BSD-3-Clause
"""The chunk loop of the divergences between the outputs of two linear layers.

It is the same on every device: torch GEMMs around the row ops. Logits exist for a slice of a chunk at a time.
Most of the budget is therefore for the gradient of the student's logits, which makes chunks larger and sums
of weight gradients fewer. The logits of 16-bit models are float32, because the gradient is a small difference
if student and teacher are similar; the gradient is rounded to 16 bits once.
"""

import torch

from ..._core.head.cross_entropy import check_targets
from ..._core.head.float16 import ScaledLMHeadGradients, scale_of
from ..._core.head.lm_head import LMHeadGradients, Sm90LMHeadGradients
from ..._core.math.computed_rows import ignored_rows, row_chunks
from ..._core.math.dtypes import accumulate_dtype
from ..._core.math.matmul import write_linear, write_wide_linear
from ..._core.op.by_name import by_name
from ..._core.op.registration import register_portable
from ..._core.op.tensors import check_like
from ..._core.runtime.environment import targets_checked
from .rows import Rows, RowWeights, Targets, Terms, distil_rows

# A chunk is divided into about so many slices. Their logits exist together with the gradient of the whole
# chunk.
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
    """(rows of a chunk, chunks, rows of a slice). ``aux_rows`` counts the auxiliary rows, in the dtype of
    input, per row of dlogits."""
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

    # The hidden size is scaled as well: it limits the logits that fit the memory of the weight gradient.
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
    """Computes the logits of student and teacher for one slice at a time, in one dtype. The two heads may
    have different dtypes; each GEMM runs in its own.

    Attributes:
        wide: that dtype.
        width: size of its elements over the size of an element of the gradient: 1 or 2.
        num_buffers: 1, or 2 if the teacher's logits also need memory: they may be given in that dtype.
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
        wide = accumulate_dtype(x.dtype)
        if wide != out.dtype:  # float64 with another dtype
            return out.copy_(self._write(x, weight, bias, torch.empty_like(out, dtype=wide)))
        (write_linear if x.dtype == wide else write_wide_linear)(x, weight, bias, out)
        return out

    def student(self, x, memory):
        """The student's logits of the hidden states x, at the beginning of ``memory``."""
        return self._write(x, *self._head, memory[: x.shape[0]])

    def teacher(self, rows, memory):
        """The teacher's logits (or top-k log-probabilities) of these rows of the batch. Logits that must be
        computed or converted use the end of ``memory``."""
        given = self._teacher[rows]
        if not self._teacher_needs_buffer:
            return given
        memory = memory[memory.shape[0] - given.shape[0] :]
        if self._teacher_head[0] is None:
            return memory.copy_(given)
        return self._write(given, *self._teacher_head, memory)


def _check_classes(divergence, vocab, soft, hard, target, teacher, teacher_indices, ignore_index):
    """Raises RuntimeError for targets and teacher indices out of range. Not on a GPU, where they make the row
    nan, unless LIGER_CHECK_TARGETS is 1: the check synchronises."""
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
            bad &= (~ignored_rows(target, ignore_index)).unsqueeze(1)
        if bad.any():
            row, k = bad.nonzero()[0].tolist()
            raise RuntimeError(
                f"{op}: teacher_indices at row {row}, place {k} is {int(teacher_indices[row, k])}, expected "
                f"0 <= class < {vocab}"
            )


def _check_teacher_dtype(input, teacher, teacher_weight, teacher_bias):
    """The tensors of the teacher for a check that expects the dtype of input of all of them: the head of a
    teacher has a dtype of its own. Raises RuntimeError if its tensors differ in dtype or device."""
    tensors = teacher, teacher_weight, teacher_bias
    if teacher_weight is None or teacher.dtype == input.dtype or not teacher.is_floating_point():
        return tensors
    for name, tensor in (("teacher_weight", teacher_weight), ("teacher_bias", teacher_bias)):
        if tensor is not None:
            check_like("fused_linear_divergence", name, tensor, "teacher", teacher)
    return tuple(None if t is None else t.new_empty((), dtype=input.dtype).expand(t.shape) for t in tensors)


@by_name(torch.ops.liger.fused_linear_divergence_forward.default)
def fused_linear_divergence_forward_kernel(a):
    input, weight, bias, teacher, target = a.input, a.weight, a.bias, a.teacher, a.target
    teacher_indices, row_weight, terms = a.teacher_indices, a.row_weight, Terms.of_op(a)
    checked = _check_teacher_dtype(input, teacher, a.teacher_weight, a.teacher_bias)
    torch.ops.liger.check_fused_linear_divergence(
        *(input, weight, checked[0], checked[1], teacher_indices, target, bias, checked[2], row_weight),
        *(*terms.distance, terms.soft, terms.hard, a.accum_dtype, a.memory_budget),
    )
    rows, vocab, wide = input.shape[0], weight.shape[0], accumulate_dtype(input.dtype)
    soft, hard, ignore_index = terms.soft, terms.hard, terms.ignore_index
    _check_classes(a.divergence, vocab, soft, hard, target, teacher, teacher_indices, ignore_index)
    needs_grad, exact = a.needs_grad, a.accum_dtype in (None, torch.float32)
    need_gradient = any(needs_grad)
    targets = Targets.of_rows(input, target, ignore_index, vocab if hard else None)
    row_weight = (input.new_ones((), dtype=wide) if row_weight is None else row_weight.to(wide)).expand(rows)
    scale = scale_of(row_weight) if need_gradient and input.dtype == torch.float16 else None
    weights = RowWeights.of(row_weight if scale is None else row_weight * scale, terms, targets)

    needs_teacher = bool(soft) and teacher_indices is None
    logits = _Logits(input, weight, bias, teacher, a.teacher_weight, a.teacher_bias, needs_teacher)
    aux_rows = logits.width * (logits.num_buffers + terms.extra_logits)
    gradients, first_rows, chunk_rows, slice_rows = _gradients(
        input, weight, bias, needs_grad, exact, a.memory_budget, aux_rows, not terms.extra_logits, scale
    )
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
                logits=logits.student(x[part], buffers),
                teacher=logits.teacher(batch_rows, buffers),
                indices=None if teacher_indices is None else teacher_indices[batch_rows],
                targets=targets.at(batch_rows),
                weights=weights.at(batch_rows),
                gradient=memory[part] if need_gradient else None,
            )
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
    return total if a.per_row else total.sum(), *losses, *gradients.finish()


register_portable(fused_linear_divergence_forward_kernel)
