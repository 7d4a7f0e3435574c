# SPDX-License-Identifier: BSD-3-Clause
"""Autograd for losses that compute their gradients in the forward.

The backward multiplies them by the upstream gradient, a device scalar, with ``liger::rescale``. This module
also has the autograd formula of that op, because ``_core`` cannot import ``ops/rescale.py``.
"""

import torch

from ..math.dtypes import accumulate_dtype
from .autograd import (
    at_positions,
    differentiable,
    differentiable_once,
    forbid_autograd,
    is_traced,
    may_write_saved,
    refuse_gradient_outputs,
    wants_grad,
)
from .by_name import arguments_type
from .loss_rows import refuse_gradients


def _rescale_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _rescale_backward(ctx, grad_out):
    x, factor = ctx.saved_tensors
    need_x, need_factor = ctx.needs_input_grad
    grad_x = rescale(grad_out, factor) if need_x else None
    grad_factor = None
    if need_factor:
        wide = accumulate_dtype(x.dtype)
        grad_factor = (grad_out.to(wide) * x.to(wide)).sum().to(factor.dtype).reshape(factor.shape)
    return grad_x, grad_factor


rescale = differentiable(torch.ops.liger.rescale.default, _rescale_setup, _rescale_backward)
rescale_ = forbid_autograd("rescale_")


def scaled_by_upstream(ctx, grads, grad_loss):
    """In a backward: the saved gradients of a loss (or None) times the upstream gradient. In place if the
    node is the last user of the saved tensors."""
    grads = [None if grad is None else grad.detach() for grad in grads]
    if not may_write_saved(ctx, *grads):
        return [None if grad is None else rescale(grad, grad_loss) for grad in grads]
    for grad in grads:
        if grad is not None:
            rescale_(grad, grad_loss)
    return grads


def computes_gradient(logits, reduction):
    """True if the forward of a loss of logits computes their gradient, which the backward then multiplies by
    the upstream scalar.

    Not for float16 logits: a loss scale must be applied before the gradient is rounded. Not in compiled code:
    its backward cannot overwrite saved tensors: the product would be an extra pass.
    """
    possible = reduction != "none" and logits.dtype != torch.float16 and wants_grad(logits)[0]
    return possible and not is_traced(logits)


def backward_of_logprobs(op, name, differentiated, gradients):
    """The backward of an op with results log-probabilities, entropies and others without a gradient.

    Args:
        op: the op.
        name: its name in error messages.
        differentiated: names of the arguments with a gradient.
        gradients: ``gradients(ctx, grad_logprobs, grad_entropy, needed)``, one for each of them;
            ``grad_entropy`` may be None.
    """
    arguments = arguments_type(op)._fields
    positions = tuple(map(arguments.index, differentiated))

    @differentiable_once(name)
    def backward(ctx, grad_logprobs, grad_entropy, *_grad_others):
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * len(arguments)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(grad_entropy)
        needed = [ctx.needs_input_grad[i] for i in positions]
        grads = gradients(ctx, grad_logprobs, grad_entropy, needed)
        return at_positions(len(arguments), positions, grads, needed)

    return backward


def gradients_in_forward(
    op, name, *, refused, row_weight, per_row, differentiated=("input", "weight", "bias")
):
    """:func:`differentiable` for an op that returns a loss and, as its last results, the gradients of the
    arguments ``differentiated`` that as many last arguments (flags) request.

    Args:
        op: the op.
        name: its name in error messages.
        refused: names of the tensor arguments without a gradient; they must not require grad.
        row_weight: name of the argument that multiplies the loss of each row.
        per_row: (name of an argument, its value for one loss per row, its value for the sum of rows). With
            one loss per row the backward computes the logits a second time, since each row has an upstream
            gradient of its own.
        differentiated: names of the arguments with a gradient.
    """
    arguments = [argument.name for argument in op._schema.arguments]
    of_gradients = slice(-len(differentiated), None)
    types = [str(argument.type) for argument in op._schema.arguments]
    tensors = next(i for i, kind in enumerate(types) if "Tensor" not in kind)
    positions = tuple(map(arguments.index, differentiated))
    refused = {argument: arguments.index(argument) for argument in refused}
    row_weight = arguments.index(row_weight)
    reduction, per_row_value, sum_value = per_row
    reduction = arguments.index(reduction)
    metrics = [i for i, argument in enumerate(arguments) if argument.startswith("return_")]

    def setup(ctx, inputs, output):
        refuse_gradients(name, **{argument: inputs[i] for argument, i in refused.items()})
        needs_grad = [inputs[i] is not None and inputs[i].requires_grad for i in positions]
        # Direct calls, and graphs that were traced without grad mode, may not have requested a gradient that
        # is needed: then the backward computes it.
        ctx.recompute = inputs[reduction] == per_row_value or any(
            needed and not computed for needed, computed in zip(needs_grad, inputs[of_gradients], strict=True)
        )
        if ctx.recompute:
            ctx.options = inputs[tensors : -len(differentiated)]
            ctx.save_for_backward(*inputs[:tensors])
        else:
            saved = [
                grad if needed else None
                for grad, needed in zip(output[of_gradients], needs_grad, strict=True)
            ]
            ctx.save_for_backward(*saved)
        # The first saved gradient is marked as differentiable: see refuse_gradient_outputs.
        linked = None if ctx.recompute else next(grad for grad in saved if grad is not None)
        ctx.mark_non_differentiable(*(o for o in output[1:] if o is not linked))
        ctx.set_materialize_grads(False)

    def recomputed(ctx, grad_loss, needed):
        """The gradients of ``(grad_loss * loss).sum()``, from a second pass over the logits."""
        inputs = [*ctx.saved_tensors, *ctx.options]
        for i in metrics:
            inputs[i] = False
        if inputs[reduction] != per_row_value:
            return rescaled(op(*inputs, *needed)[of_gradients], grad_loss, needed)
        inputs[reduction] = sum_value
        weights = inputs[row_weight]
        inputs[row_weight] = grad_loss.contiguous() if weights is None else grad_loss * weights
        return op(*inputs, *needed)[of_gradients]

    def rescaled(grads, factor, needed):
        return [rescale(g, factor) if need else None for g, need in zip(grads, needed, strict=True)]

    @differentiable_once(name)
    def backward(ctx, grad_loss, *grad_others):
        refuse_gradient_outputs(name, grad_others)
        if grad_loss is None:
            return (None,) * len(arguments)
        needed = [ctx.needs_input_grad[i] for i in positions]
        if ctx.recompute:
            grads = recomputed(ctx, grad_loss, needed)
        else:
            saved = zip(ctx.saved_tensors, needed, strict=True)
            grads = scaled_by_upstream(ctx, [g if need else None for g, need in saved], grad_loss)
        return at_positions(len(arguments), positions, grads, needed)

    return differentiable(op, setup, backward)
