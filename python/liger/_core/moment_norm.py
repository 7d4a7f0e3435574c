"""Normalisation by mean and variance: torch formulas, fakes, autograd and vmap of layer_norm and group_norm."""

import torch

from .autograd import differentiable_once
from .dtypes import accumulate_dtype
from .vmap import to_front


def rows_normalised(rows, eps):
    """(normalised rows (..., H), mean (...), rstd (...)) in the accumulation dtype, for rows (..., H)."""
    wide = rows.to(accumulate_dtype(rows.dtype))
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * rstd, mean.squeeze(-1).contiguous(), rstd.squeeze(-1).contiguous()


def rows_grad(weighted, xhat, rstd):
    """The gradient of the rows from the gradient ``weighted`` of the normalised rows ``xhat``; rstd is (..., 1)."""
    mean = weighted.mean(-1, keepdim=True)
    return rstd * (weighted - mean - xhat * (weighted * xhat).mean(-1, keepdim=True))


def parameter_grad(parameter, need, x, values, dims):
    """``values`` summed over ``dims`` in the dtype of the parameter; an empty tensor if the gradient is not needed."""
    if parameter is None or not need:
        return (x if parameter is None else parameter).new_empty(0)
    return (values.sum(dims) if dims else values).to(parameter.dtype, copy=True)


def fake_backward(x, weight, bias, need_grad_x, need_grad_weight, need_grad_bias):
    def grad_like(parameter, need):
        if parameter is None:
            return x.new_empty(0)
        return parameter.new_empty(parameter.shape[0] if need else 0)

    grad_x = torch.empty_like(x) if need_grad_x else x.new_empty(0)
    return grad_x, grad_like(weight, need_grad_weight), grad_like(bias, need_grad_bias)


def formula(name, backward_op, options_before=0):
    """(setup_context, backward) of an op with arguments (x, ``options_before`` options, weight, bias, eps) and results
    (y, mean, rstd)."""
    first = 1 + options_before

    def setup(ctx, inputs, output):
        x, weight, bias = inputs[0], inputs[first], inputs[first + 1]
        ctx.options = inputs[1:first]
        _y, mean, rstd = output
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @differentiable_once(name)
    def backward(ctx, grad_y, _grad_mean, _grad_rstd):
        none = (None,) * options_before
        if grad_y is None:
            return None, *none, None, None, None
        x, weight, bias, mean, rstd = ctx.saved_tensors
        # Traced calls omit arguments that are equal to their defaults.
        needs_grad = (*ctx.needs_input_grad, False, False)
        needs = (needs_grad[0], *needs_grad[first : first + 2])
        grads = backward_op(grad_y, x, *ctx.options, weight, bias, mean, rstd, *needs)
        grad_x, *others = (grad if need else None for grad, need in zip(grads, needs, strict=True))
        return grad_x, *none, *others, None

    return setup, backward


def vmap_rule(op, fold, unfold):
    """The vmap rule of an op with arguments (x, options, weight, bias, eps).

    If no parameter is mapped, ``fold(x)`` merges the mapped dimension, moved to the front, into x, and
    ``unfold(result, sizes)`` restores it in each result. With mapped parameters the op runs once per element.
    """
    names = [argument.name for argument in op._schema.arguments]

    def rule(info, in_dims, *args):
        arguments = dict(zip(names, args, strict=False))
        mapped = {
            n: d for n, d in zip(names, in_dims, strict=False) if n in ("weight", "bias") and d is not None
        }
        x = arguments["x"] = to_front(args[0], in_dims[0], info.batch_size)
        if not mapped:
            outputs = op(**dict(arguments, x=fold(x)))
            outputs = tuple(unfold(o, x.shape[:2]) for o in outputs)
        else:
            each = [
                op(**dict(arguments, x=x[i], **{n: arguments[n].select(d, i) for n, d in mapped.items()}))
                for i in range(info.batch_size)
            ]
            outputs = tuple(map(torch.stack, zip(*each, strict=True)))
        return outputs, (0,) * len(outputs)

    return rule
