# SPDX-License-Identifier: BSD-3-Clause
"""The products of linear layers with adapters that share an input, and the gradients of all of them.

The second product of an adapter is added to the product of the base layer by the GEMM that computes it, and
so are the terms of the gradient of the input: nothing of the size of an activation is allocated besides the
results. Under autocast, factors are rounded to its dtype, as autocast does; their gradients are not rounded.
Without it, exact.py multiplies float32 factors with 16-bit operands; where it converts these, it allocates up
to 128 MiB at a time.
"""

from typing import NamedTuple

import torch
from torch import nn

from ..._core.math.float32_matmul import float32_product
from ..._core.modules.quantised import is_quantised
from .base_weight import dense
from .exact import add_product_, converted, wide


class Low(NamedTuple):
    """What the parts of one input have besides their base products.

    ``h``: (rows, R) ``dropout(x) A^T`` of all adapters side by side; ``a``: (R, inputs) their first factors;
    ``bs``: per part (outputs, r) the second factor; all in one dtype, of the products or float32. ``masks``:
    per part the dropout mask of the rows, True where x is kept. Each may be None.
    """

    h: torch.Tensor | None
    a: torch.Tensor | None
    bs: tuple
    masks: tuple


def saved(parts, low, with_weights=True):
    """The tensors of parts for a backward: no copies of factors, which :func:`unsaved` makes again."""
    # Hooks on saved tensors would return quantised weights as plain ones.
    weights = [
        p.weight if with_weights and p.state is None and not is_quantised(p.weight) else None for p in parts
    ]
    return low.h, *low.masks, *weights, *(t for p in parts for t in (p.a, p.b))


def unsaved(parts, tensors):
    """(parts, low) of :func:`saved`."""
    (h, *tensors), count = tensors, len(parts)
    masks, weights, factors = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
    parts = [
        part._replace(weight=part.weight if weight is None else weight, a=a, b=b)
        for part, weight, a, b in zip(parts, weights, factors[::2], factors[1::2], strict=True)
    ]
    return parts, Low(h, *_factors(parts, None if h is None else h.dtype), tuple(masks))


def _factors(parts, dtype):
    """a and bs of :class:`Low`"""
    firsts = [part.a.detach() for part in parts if part.a is not None]
    if not firsts:
        return None, (None,) * len(parts)
    a = firsts[0] if len(firsts) == 1 else torch.cat(firsts)
    return a.to(dtype), tuple(None if part.b is None else part.b.detach().to(dtype) for part in parts)


def rows_of(x):
    return x.reshape(-1, x.shape[-1])


def operands(x, parts):
    """An input as the weights take it, and as the adapters do. Parts of one input have one dtype."""
    operand = x.to(parts[0].dtype)
    return operand, operand if torch.is_autocast_enabled(x.device.type) else x


def _alpha(part):
    return part.scale / (1 - part.rate)


def _ranks(parts):
    """Per part the columns of its adapter in ``h``."""
    columns, end = [], 0
    for part in parts:
        start, end = end, end + (0 if part.a is None else part.a.shape[0])
        columns.append(slice(start, end))
    return columns


def _masks(x, parts):
    # Under autocast, PEFT does not cast the input of an adapter over 4 bits.
    is_cast = not torch.is_autocast_enabled(x.device.type)
    return tuple(
        _mask(x, p.a.dtype if is_cast or p.state is None else p.result, p.rate) if p.rate > 0 else None
        for p in parts
    )


def _mask(x, dtype, rate):
    """(rows, inputs) the mask that PEFT's dropout of x, cast to the dtype, would draw."""
    like = rows_of(x).to(dtype)
    if x.is_cuda:
        return torch.native_dropout(like, rate, True)[1]
    return nn.functional.dropout(torch.ones_like(like), rate) != 0


def low_products(x, parts):
    """:class:`Low` of an input in the dtype in which the adapters take it. Call it without grad mode."""
    adapted = [part for part in parts if part.a is not None]
    if not adapted:
        return Low(None, None, (None,) * len(parts), (None,) * len(parts))
    a, bs = _factors(parts, torch.float32 if _are_exact(x, adapted[0].a) else x.dtype)
    rows, masks = rows_of(x), _masks(x, parts)
    if any(mask is not None for mask in masks):
        each = [
            _times(_kept(rows, m), a[c].t())
            for p, m, c in zip(parts, masks, _ranks(parts), strict=True)
            if p.a is not None
        ]
        h = torch.cat(each, 1)
    else:
        h = _times(rows, a.t())
    return Low(h, a, bs, masks)


def _are_exact(x, factor):
    """Whether PEFT would multiply these in float32: autocast is off, and x has 16 bits."""
    return (
        factor.dtype == torch.float32
        and x.dtype.itemsize == 2
        and not torch.is_autocast_enabled(x.device.type)
    )


def _times(a, b):
    return a @ b if a.dtype == b.dtype else wide(a, b)


def _add_(y, a, b, scale=1.0):
    """``y += scale * a @ b``"""
    return y.addmm_(a, b, alpha=scale) if a.dtype == y.dtype else add_product_(y, a, b, scale)


def _kept(rows, mask):
    # The scale of the dropout is a factor of the second product.
    return rows if mask is None else rows * mask


def linear_products(x, parts, low):
    """The result of each part; ``x``: as the weights take it."""
    results = []
    for part, b, columns in zip(parts, low.bs, _ranks(parts), strict=True):
        bias = None if part.bias is None else part.bias.to(x.dtype)
        y = nn.functional.linear(x, dense(part.weight, part.state, x.dtype), bias)
        if b is not None:
            y = y if b.dtype == y.dtype else y.to(part.result)
            _add_(y.view(-1, y.shape[-1]), low.h[:, columns], b.t(), _alpha(part))
        results.append(y.to(part.result))
    return results


def gradients(x, grads, parts, low, dtype, needs):
    """(the gradient of the input of :func:`linear_products` or None, per part the gradients of bias, a and b)

    Args:
        x: the input as the adapters take it, or None if no first factor trains.
        grads: the gradients of the results.
        dtype: of the gradient of the input; None if it is not needed.
        needs: per part whether the gradients of bias, a and b are.
    """
    grads = rows_of_grads(grads, parts, low)
    up, of_b = of_products(grads, parts, low, needs)
    grad_x = None if dtype is None else of_input(grads, up, parts, low, dtype)
    return grad_x, of_parameters(x, grads, up, of_b, parts, low, needs)


def rows_of_grads(grads, parts, low):
    """The gradients of the results as rows; in the dtype of the products, if weights and adapters have
    one."""
    dtype = None if low.h is None else low.h.dtype
    return [
        rows_of(grad).to(part.dtype) if dtype in (None, part.dtype) else rows_of(grad)
        for grad, part in zip(grads, parts, strict=True)
    ]


def of_products(grads, parts, low, needs):
    """(the gradient of ``h`` or None, per part the gradient of b)"""
    ups, of_b = [], []
    for grad, part, b, at, (*_, need_b) in zip(grads, parts, low.bs, _ranks(parts), needs, strict=True):
        if b is not None:
            grad = converted(grad, b.dtype)
            ups.append(_product(grad, b, b.dtype, _alpha(part)))
        of_b.append(_product(grad.t(), low.h[:, at], part.b.dtype, _alpha(part)) if need_b else None)
    return (torch.cat(ups, 1) if len(ups) > 1 else ups[0] if ups else None), of_b


def of_input(grads, up, parts, low, dtype):
    """The gradient of the input in a dtype, as rows."""
    grad_x = None
    for grad, part in zip(grads, parts, strict=True):
        grad = grad.to(part.dtype)
        weight = dense(part.weight, part.state, grad.dtype)
        grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
        del weight
    if up is not None and up.dtype != grad_x.dtype:
        grad_x = grad_x.to(dtype)
    if any(mask is not None for mask in low.masks):
        for part, mask, at in zip(parts, low.masks, _ranks(parts), strict=True):
            if part.a is not None:
                term = _add_(torch.zeros_like(grad_x), up[:, at], low.a[at])
                grad_x.add_(term if mask is None else term.mul_(mask))
    elif up is not None:
        _add_(grad_x, up, low.a)
    return grad_x.to(dtype)


def of_parameters(x, grads, up, of_b, parts, low, needs):
    """Per part the gradients of bias, a and b, in one list."""
    columns, of_a = _ranks(parts), [None] * len(parts)
    if any(need_a for _, need_a, _ in needs):
        # The product in a gated MLP may have more bits than its adapter takes.
        rows = rows_of(x) if up.dtype == torch.float32 else rows_of(x).to(up.dtype)
        dtype = next(part.a.dtype for part in parts if part.a is not None)
        if any(mask is not None for mask in low.masks):
            of_a = [
                _product(up[:, at].t(), _kept(rows, mask), dtype) if need_a else None
                for at, mask, (_, need_a, _) in zip(columns, low.masks, needs, strict=True)
            ]
        else:
            whole = _product(up.t(), rows, dtype)
            of_a = [whole[at] if need_a else None for at, (_, need_a, _) in zip(columns, needs, strict=True)]
    results = []
    for grad, part, grad_a, grad_b, (need_bias, _, _) in zip(grads, parts, of_a, of_b, needs, strict=True):
        results += [grad.sum(0).to(part.bias.dtype) if need_bias else None, grad_a, grad_b]
    return results


def _product(a, b, dtype, scale=1.0):
    """``scale * a @ b`` in a dtype, to which it is rounded once."""
    if a.dtype != b.dtype:
        return wide(a, b, scale)
    if dtype == torch.float32 != a.dtype:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
        float32_product(a, b, out, scale=scale)
        return out
    if scale == 1:
        return (a @ b).to(dtype)
    out = a.new_empty((a.shape[0], b.shape[1]))
    return torch.addmm(out, a, b, beta=0, alpha=scale, out=out).to(dtype)
