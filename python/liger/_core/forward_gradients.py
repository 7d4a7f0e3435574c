"""Autograd for losses whose gradients are computed by the forward.

The backward multiplies them by the upstream gradient, a device scalar, with ``liger::rescale``. The autograd formula of
that op is here and not in ``ops/rescale.py``, because this layer calls it.
"""

import torch

from .autograd import differentiable, differentiable_once, forbid_autograd, may_write_saved, refuse_made
from .dtypes import accumulate_dtype
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
    """In a backward: the saved gradients of a loss, or None, times the upstream gradient; in place where they die with
    the node."""
    grads = [None if grad is None else grad.detach() for grad in grads]
    if not may_write_saved(ctx, *grads):
        return [None if grad is None else rescale(grad, grad_loss) for grad in grads]
    for grad in grads:
        if grad is not None:
            rescale_(grad, grad_loss)
    return grads


def gradients_in_forward(op, name, *, refused, row_weight, per_row):
    """:func:`differentiable` for an op whose first result is a loss and whose last three are the gradients, of
    ``input``, ``weight`` and ``bias``, that its last three arguments ask for.

    ``refused`` names the tensors that have no gradient, ``row_weight`` the tensor that is a factor of each row's loss.
    ``per_row`` is an argument, its value where the loss is one number for each row, and that where it is their sum:
    gradients of the former wait for the backward, which computes the logits a second time.
    """
    arguments = [argument.name for argument in op._schema.arguments]
    types = [str(argument.type) for argument in op._schema.arguments]
    tensors = next(i for i, kind in enumerate(types) if "Tensor" not in kind)
    places = tuple(map(arguments.index, ("input", "weight", "bias")))
    refused = {name: arguments.index(name) for name in refused}
    row_weight = arguments.index(row_weight)
    switch, of_rows, of_sum = per_row
    switch = arguments.index(switch)
    metrics = [i for i, argument in enumerate(arguments) if argument.startswith("return_")]

    def setup(ctx, inputs, output):
        refuse_gradients(name, **{of: inputs[i] for of, i in refused.items()})
        wanted = [inputs[i] is not None and inputs[i].requires_grad for i in places]
        # A graph that was traced without grad mode, and direct calls, may lack a gradient: then it is computed later.
        ctx.recompute = inputs[switch] == of_rows or any(
            want and not made for want, made in zip(wanted, inputs[-3:], strict=True)
        )
        if ctx.recompute:
            ctx.options = inputs[tensors:-3]
            ctx.save_for_backward(*inputs[:tensors])
        else:
            saved = [grad if want else None for grad, want in zip(output[-3:], wanted, strict=True)]
            ctx.save_for_backward(*saved)
        # The first of the saved gradients counts as differentiable: refuse_made says why.
        linked = None if ctx.recompute else next(grad for grad in saved if grad is not None)
        ctx.mark_non_differentiable(*(o for o in output[1:] if o is not linked))
        ctx.set_materialize_grads(False)

    def recomputed(ctx, grad_loss, needed):
        """The gradients of ``(grad_loss * loss).sum()``, from a second pass over the logits."""
        again = [*ctx.saved_tensors, *ctx.options]
        for i in metrics:
            again[i] = False
        if again[switch] != of_rows:
            return rescaled(op(*again, *needed)[-3:], grad_loss, needed)
        again[switch] = of_sum
        weights = again[row_weight]
        again[row_weight] = grad_loss.contiguous() if weights is None else grad_loss * weights
        return op(*again, *needed)[-3:]

    def rescaled(grads, factor, needed):
        return [rescale(g, factor) if need else None for g, need in zip(grads, needed, strict=True)]

    @differentiable_once(name)
    def backward(ctx, grad_loss, *grad_others):
        refuse_made(name, grad_others)
        result = [None] * len(arguments)
        if grad_loss is None:
            return tuple(result)
        needed = [ctx.needs_input_grad[i] for i in places]
        if ctx.recompute:
            grads = recomputed(ctx, grad_loss, needed)
        else:
            saved = zip(ctx.saved_tensors, needed, strict=True)
            grads = scaled_by_upstream(ctx, [g if need else None for g, need in saved], grad_loss)
        for place, grad, need in zip(places, grads, needed, strict=True):
            result[place] = grad if need else None
        return tuple(result)

    return differentiable(op, setup, backward)
