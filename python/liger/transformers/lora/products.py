# SPDX-License-Identifier: BSD-3-Clause
"""The products of linear layers with adapters that share an input, and the gradients of all of them.

The second product of an adapter is added to the product of the base layer by the GEMM that computes it, and
so are the terms of the gradient of the input: nothing of the size of an activation is allocated besides the
results. Under autocast, factors are rounded to its dtype, as autocast does; their gradients are not rounded.
Without it, exact.py multiplies float32 factors with 16-bit operands; where it converts these, it allocates up
to 128 MiB at a time.

The host issues a step with adapters hardly faster than a GPU computes it. So nothing is converted, sliced or
asked here that need not be.
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
    per part the dropout mask of the rows, True where x is kept, or an empty tuple without dropout. Each may
    be None.
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
    return low.h, *weights, *[p.a for p in parts], *[p.b for p in parts], *low.masks


def count_saved(parts):
    """How many tensors :func:`saved` returns."""
    return 1 + (4 if _drops(parts) else 3) * len(parts)


def unsaved(parts, tensors):
    """(the weight of each part, low) of :func:`saved`."""
    h, count = tensors[0], len(parts)
    weights = [
        part.weight if weight is None else weight
        for part, weight in zip(parts, tensors[1 : 1 + count], strict=True)
    ]
    firsts, seconds = tensors[1 + count : 1 + 2 * count], tensors[1 + 2 * count : 1 + 3 * count]
    a, bs = (None, seconds) if h is None else _factors(firsts, seconds, h.dtype)
    return weights, Low(h, a, bs, tensors[1 + 3 * count :])


def _factors(firsts, seconds, dtype):
    """a and bs of :class:`Low`, of factors one of which is not None."""
    firsts = [a for a in firsts if a is not None]
    a = firsts[0] if len(firsts) == 1 else torch.cat(firsts)
    if a.dtype == dtype:  # and so has each second factor
        return a, seconds
    return a.to(dtype), [None if b is None else b.to(dtype) for b in seconds]


def rows_of(x):
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def operands(x, parts):
    """An input as the weights take it, and as the adapters do. Parts of one input have one dtype."""
    operand = _cast(x, parts[0].dtype)
    return operand, operand if operand is x or torch.is_autocast_enabled(x.device.type) else x


def _cast(t, dtype):
    return t if t.dtype == dtype else t.to(dtype)


def _alpha(part):
    return part.scale / (1 - part.rate)


def _split(t, bs, dim):
    """``t`` by the ranks of the second factors of the parts, 0 without an adapter."""
    if len(bs) == 1:
        return (t,)
    return torch.split_with_sizes(t, [0 if b is None else b.shape[1] for b in bs], dim)


def _drops(parts):
    return any(part.rate > 0 for part in parts)


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
    firsts = [part.a for part in parts if part.a is not None]
    if not firsts:
        return Low(None, None, (None,) * len(parts), ())
    dtype = torch.float32 if _are_exact(x, firsts[0]) else x.dtype
    a, bs = _factors(firsts, [part.b for part in parts], dtype)
    rows = rows_of(x)
    if not _drops(parts):
        return Low(_times(rows, a.t()), a, bs, ())
    masks = _masks(x, parts)
    each = [
        _times(_kept(rows, mask), factor.t())
        for mask, factor in zip(masks, _split(a, bs, 0), strict=True)
        if factor.shape[0] > 0
    ]
    return Low(torch.cat(each, 1), a, bs, masks)


def _are_exact(x, factor):
    """Whether PEFT would multiply these in float32: autocast is off, and x has 16 bits."""
    return (
        factor.dtype == torch.float32 != x.dtype
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
    results, dtype = [], x.dtype
    hs = low.bs if low.h is None else _split(low.h, low.bs, 1)
    for part, b, h in zip(parts, low.bs, hs, strict=True):
        bias = None if part.bias is None else _cast(part.bias, dtype)
        y = nn.functional.linear(x, dense(part.weight, part.state, dtype), bias)
        if b is not None:
            y = y if b.dtype == y.dtype else _cast(y, part.result)
            # A view, never a copy.
            _add_(y.view(-1, y.shape[-1]), h, b.t(), _alpha(part))
        results.append(_cast(y, part.result))
    return results


def gradients(x, grads, parts, weights, low, dtype, needs):
    """(the gradient of the input of :func:`linear_products` or None, per part the gradients of bias, a and b)

    Args:
        x: the input as the adapters take it, or None if no first factor trains.
        grads: the gradients of the results.
        weights: of the parts, from :func:`unsaved`, as low.
        dtype: of the gradient of the input; None if it is not needed.
        needs: per part whether the gradients of bias, a and b are.
    """
    grads = rows_of_grads(grads, parts, low)
    up, of_b = of_products(grads, parts, low, needs)
    grad_x = None if dtype is None else of_input(grads, up, parts, weights, low, dtype)
    return grad_x, of_parameters(x, grads, up, of_b, parts, low, needs)


def rows_of_grads(grads, parts, low):
    """The gradients of the results as rows; in the dtype of the products, if weights and adapters have
    one."""
    dtype = None if low.h is None else low.h.dtype
    return [
        _cast(rows_of(grad), part.dtype) if dtype in (None, part.dtype) else rows_of(grad)
        for grad, part in zip(grads, parts, strict=True)
    ]


def of_products(grads, parts, low, needs):
    """(the gradient of ``h`` or None, per part the gradient of b)"""
    ups, of_b = [], []
    hs = low.bs if low.h is None else _split(low.h, low.bs, 1)
    for grad, part, b, h, (*_, need_b) in zip(grads, parts, low.bs, hs, needs, strict=True):
        if b is not None:
            grad, alpha = converted(grad, b.dtype), _alpha(part)
            ups.append(_product(grad, b, b.dtype, alpha))
        of_b.append(_product(grad.t(), h, part.b.dtype, alpha) if need_b else None)
    return (torch.cat(ups, 1) if len(ups) > 1 else ups[0] if ups else None), of_b


def of_input(grads, up, parts, weights, low, dtype):
    """The gradient of the input in a dtype, as rows."""
    grad_x = None
    for grad, part, weight in zip(grads, parts, weights, strict=True):
        grad = _cast(grad, part.dtype)
        weight = dense(weight, part.state, grad.dtype)
        grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
        del weight
    if up is not None and up.dtype != grad_x.dtype:
        grad_x = _cast(grad_x, dtype)
    if low.masks:
        factors = zip(parts, low.masks, _split(up, low.bs, 1), _split(low.a, low.bs, 0), strict=True)
        for part, mask, of_h, a in factors:
            if part.a is not None:
                term = _add_(torch.zeros_like(grad_x), of_h, a)
                grad_x.add_(term if mask is None else term.mul_(mask))
    elif up is not None:
        _add_(grad_x, up, low.a)
    return _cast(grad_x, dtype)


def of_parameters(x, grads, up, of_b, parts, low, needs):
    """Per part the gradients of bias, a and b, in one list."""
    of_a = [None] * len(parts)
    if any(need_a for _, need_a, _ in needs):
        # The product in a gated MLP may have more bits than its adapter takes.
        rows = rows_of(x) if up.dtype == torch.float32 else _cast(rows_of(x), up.dtype)
        dtype = next(part.a.dtype for part in parts if part.a is not None)
        if low.masks:
            of_a = [
                _product(of_h.t(), _kept(rows, mask), dtype) if need_a else None
                for of_h, mask, (_, need_a, _) in zip(_split(up, low.bs, 1), low.masks, needs, strict=True)
            ]
        else:
            of_a = _split(_product(up.t(), rows, dtype), low.bs, 0)
    results = []
    for grad, part, grad_a, grad_b, (need_bias, need_a, _) in zip(
        grads, parts, of_a, of_b, needs, strict=True
    ):
        of_bias = _cast(grad.sum(0), part.bias.dtype) if need_bias else None
        results += (of_bias, grad_a if need_a else None, grad_b)
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
        return _cast(a @ b, dtype)
    out = a.new_empty((a.shape[0], b.shape[1]))
    return _cast(torch.addmm(out, a, b, beta=0, alpha=scale, out=out), dtype)
