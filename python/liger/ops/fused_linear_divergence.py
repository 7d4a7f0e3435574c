"""Divergences between the outputs of two linear layers whose logits exist only a chunk of rows at a time.

The loop is the same on every device: products of torch around the row ops of :mod:`.divergence`. Two slabs hold the
logits of a chunk, those of the student become their gradient in place. docs/divergence.md defines every term.
"""

import torch

from ..backend import register_portable
from ..distributed import unflatten_tokens
from ._autocast import autocast_operands
from ._autograd import differentiable, differentiable_once, may_write_saved, wants_grad
from ._products import product, write_linear
from .cross_entropy import denominator_tensor, refuse_gradients
from .divergence import divergence_forward_, flatten_pair, of_beta, row_weights
from .rescale import rescale, rescale_
from .rms_norm import accumulate_dtype

# --- kernel -------------------------------------------------------------------------------------------------------


class _Gradients:
    """The gradients of a call, chunk by chunk; one that is not needed stays empty."""

    def __init__(self, input, weight, bias, accumulator, need_input, need_weight, need_bias):
        self.source, self.head = input, weight
        self.input = input.new_empty(input.shape if need_input else 0)
        self.weight = input.new_empty(weight.shape if need_weight else 0)
        self.sum = torch.empty_like(self.weight, dtype=torch.float32) if accumulator else self.weight
        need_bias = need_bias and bias is not None
        wide = accumulate_dtype(input.dtype)
        self.bias = input.new_zeros(weight.shape[0] if need_bias else 0, dtype=wide)
        self.needed = need_input, need_weight, need_bias

    def add(self, rows, dlogits):
        need_input, need_weight, need_bias = self.needed
        if need_input:
            torch.mm(dlogits, self.head, out=self.input[rows])
        if need_weight:
            product(dlogits.t(), self.source[rows], self.sum, add=rows.start > 0)
        if need_bias:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)

    def finish(self):
        if self.source.shape[0] == 0:
            self.sum.zero_()
        if self.sum is not self.weight:
            self.weight.copy_(self.sum)
        return self.input, self.weight, self.bias.to(self.weight.dtype)


def fused_linear_divergence_forward_kernel(
    input, weight, teacher, teacher_weight, target, bias, teacher_bias, row_weight, divergence, beta, temperature,
    ignore_index, per_row, accum_dtype, memory_budget, need_grad_input, need_grad_weight, need_grad_bias,
):  # fmt: skip
    torch.ops.liger.check_fused_linear_divergence(
        input, weight, teacher, teacher_weight, target, bias, teacher_bias, row_weight, divergence, beta, temperature,
        accum_dtype, memory_budget,
    )  # fmt: skip
    (rows, hidden), vocab, wide = input.shape, weight.shape[0], accumulate_dtype(input.dtype)
    budget = torch.ops.liger.default_memory_budget() if memory_budget is None else memory_budget
    slabs = 1 if teacher_weight is None else 2
    chunk_rows, _, _, accumulator = torch.ops.liger.plan_chunks(
        rows, hidden, vocab, input.element_size(), need_grad_weight, accum_dtype in (None, torch.float32),
        max(budget // slabs, 1),
    )  # fmt: skip
    gradients = _Gradients(
        input, weight, bias, accumulator, need_grad_input, need_grad_weight, need_grad_bias
    )
    row_weight = input.new_ones((), dtype=wide) if row_weight is None else row_weight.to(wide)
    row_weight = row_weight.expand(rows)
    losses = input.new_empty(rows, dtype=wide)
    # Rows of logits begin at multiples of 16 bytes.
    per_line = 16 // input.element_size()
    stride = -(-vocab // per_line) * per_line
    memory = input.new_empty(slabs, chunk_rows, stride)[..., :vocab]
    forward = torch.ops.liger.divergence_forward.default
    for start in range(0, rows, max(chunk_rows, 1)):
        chunk = slice(start, min(start + chunk_rows, rows))
        count = chunk.stop - start
        logits = memory[0, :count]
        write_linear(input[chunk], weight, bias, logits)
        if teacher_weight is None:
            of_teacher = teacher[chunk]
        else:
            of_teacher = memory[1, :count]
            write_linear(teacher[chunk], teacher_weight, teacher_bias, of_teacher)
        of_rows = None if target is None else target[chunk]
        options = (of_rows, row_weight[chunk], divergence, beta, temperature, False, ignore_index, True)
        if any(gradients.needed):
            losses[chunk] = divergence_forward_(logits, of_teacher, *options)
            gradients.add(chunk, logits)
        else:
            losses[chunk] = forward(logits, of_teacher, *options, False)[0]
    return losses if per_row else losses.sum(), *gradients.finish()


register_portable({"fused_linear_divergence_forward": fused_linear_divergence_forward_kernel})


# --- fake ---------------------------------------------------------------------------------------------------------


@torch.library.register_fake("liger::fused_linear_divergence_forward")
def _(
    input, weight, teacher, teacher_weight, target, bias, teacher_bias, row_weight, divergence, beta, temperature,
    ignore_index, per_row, accum_dtype, memory_budget, need_grad_input, need_grad_weight, need_grad_bias,
):  # fmt: skip
    return (
        input.new_empty(input.shape[:1] if per_row else (), dtype=accumulate_dtype(input.dtype)),
        input.new_empty(input.shape if need_grad_input else (0,)),
        input.new_empty(weight.shape if need_grad_weight else (0,)),
        input.new_empty(bias.shape if need_grad_bias and bias is not None else (0,)),
    )


# --- autograd -----------------------------------------------------------------------------------------------------

_op = torch.ops.liger.fused_linear_divergence_forward.default
# Positions among its arguments.
_DIFFERENTIABLE = (0, 1, 5)  # input, weight, bias
_TENSORS, _ROW_WEIGHT, _PER_ROW = 8, 7, 12
_NAME = "fused_linear_divergence"


def _setup(ctx, inputs, output):
    refuse_gradients(
        _NAME, teacher=inputs[2], teacher_weight=inputs[3], teacher_bias=inputs[6], row_weight=inputs[7]
    )
    wanted = [inputs[i] is not None and inputs[i].requires_grad for i in _DIFFERENTIABLE]
    # A graph that was traced without grad mode, and direct calls, may lack a gradient: then it is computed later.
    ctx.recompute = inputs[_PER_ROW] or any(
        want and not made for want, made in zip(wanted, inputs[-3:], strict=True)
    )
    if ctx.recompute:
        ctx.options = inputs[_TENSORS:-3]
        ctx.save_for_backward(*inputs[:_TENSORS])
    else:
        made = zip(output[1:], wanted, strict=True)
        ctx.save_for_backward(*(grad if want else None for grad, want in made))
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _recomputed(ctx, grad_loss, needed):
    """The gradients of ``(grad_loss * loss).sum()``, from a second pass over the logits."""
    tensors, options = list(ctx.saved_tensors), list(ctx.options)
    options[_PER_ROW - _TENSORS] = False
    row_weight = tensors[_ROW_WEIGHT]
    tensors[_ROW_WEIGHT] = grad_loss if row_weight is None else row_weight * grad_loss
    return _op(*tensors, *options, *needed)[1:]


@differentiable_once(_NAME)
def _backward(ctx, grad_loss, *_grad_others):
    result = [None] * len(_op._schema.arguments)
    if grad_loss is None:
        return tuple(result)
    needed = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    if ctx.recompute:
        grads = _recomputed(ctx, grad_loss, needed)
    else:
        grads = ctx.saved_tensors
        if may_write_saved(*grads):
            for grad, need in zip(grads, needed, strict=True):
                if need:
                    rescale_(grad, grad_loss)
        else:
            grads = [rescale(g, grad_loss) if need else None for g, need in zip(grads, needed, strict=True)]
    for position, grad, need in zip(_DIFFERENTIABLE, grads, needed, strict=True):
        result[position] = grad if need else None
    return tuple(result)


_forward_op = differentiable(_op, _setup, _backward)


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
    row_weight = row_weights(op, rows, batch, target, token_weight, denominator, ignore_index, reduction)
    per_row = reduction == "none"
    loss = _forward_op(
        rows, weight, teacher, teacher_weight, target, bias, teacher_bias, row_weight, divergence, beta, temperature,
        ignore_index, per_row, accum_dtype, memory_budget,
        *((False,) * 3 if per_row else wants_grad(rows, weight, bias)),
    )[0]  # fmt: skip
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
        RuntimeError: mismatched shapes (also of the two vocabularies), dtypes or devices, options out of range, a
            tensor of the teacher, a weight of tokens or a denominator that requires grad.

    Source: chunks as in Hsu et al., "Liger Kernel", arXiv 2410.10989.
    """
    denominator = denominator_tensor(denominator, input)
    return _fused_linear_kl_div(
        input, weight, teacher, teacher_weight, target, bias, teacher_bias, token_weight, denominator, reverse,
        temperature, ignore_index, reduction, accum_dtype, memory_budget,
    )  # fmt: skip


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
        RuntimeError: as :func:`liger.fused_linear_kl_div`.

    Source: GKD, arXiv 2306.13649, in the chunks of "Liger Kernel", arXiv 2410.10989.
    """
    denominator = denominator_tensor(denominator, input)
    return _fused_linear_jsd(
        input, weight, teacher, teacher_weight, target, bias, teacher_bias, token_weight, denominator, beta,
        temperature, ignore_index, reduction, accum_dtype, memory_budget,
    )  # fmt: skip
