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
from .base_weight import dense
from .exact import add_product_, wide


class Low(NamedTuple):
    """What the parts of one input have besides their base products.

    ``h``: (rows, R) ``dropout(x) A^T`` of all adapters side by side; ``a``: (R, inputs) their first factors;
    ``bs``: per part (outputs, r) the second factor, scaled; all in one dtype, of the products or float32.
    ``masks``: per part the dropout mask of the rows, True where x is kept. Each may be None.
    """

    h: torch.Tensor | None
    a: torch.Tensor | None
    bs: tuple
    masks: tuple

    def tensors(self):
        return self.h, self.a, *self.bs, *self.masks

    @classmethod
    def of_tensors(cls, tensors):
        h, a, *others = tensors
        return cls(h, a, tuple(others[: len(others) // 2]), tuple(others[len(others) // 2 :]))


def rows_of(x):
    return x.reshape(-1, x.shape[-1])


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
    return tuple(_mask(x, p.a.dtype, p.rate) if p.rate > 0 else None for p in parts)


def _mask(x, dtype, rate):
    """(rows, inputs) the mask that PEFT's dropout of x, cast to the dtype of the adapter, would draw."""
    like = rows_of(x).to(dtype)
    if x.is_cuda:
        return torch.native_dropout(like, rate, True)[1]
    return nn.functional.dropout(torch.ones_like(like), rate) != 0


def _scaled(part, dtype):
    scale = _alpha(part)
    if part.b.dtype == dtype:
        return part.b.detach() if scale == 1 else part.b * scale
    return torch.mul(part.b, scale, out=part.b.new_empty(part.b.shape, dtype=dtype))


def low_products(x, parts):
    """:class:`Low` of an input in the dtype of the products. Call it without grad mode."""
    adapted = [part for part in parts if part.a is not None]
    if not adapted:
        return Low(None, None, (None,) * len(parts), (None,) * len(parts))
    a = adapted[0].a.detach() if len(adapted) == 1 else torch.cat([part.a for part in adapted])
    dtype = torch.float32 if _are_exact(x, a) else x.dtype
    a, rows = a.to(dtype), rows_of(x)
    masks = _masks(x, parts)
    if any(mask is not None for mask in masks):
        columns = _ranks(parts)
        each = [
            _times(_kept(rows, m), a[c].t())
            for p, m, c in zip(parts, masks, columns, strict=True)
            if p.a is not None
        ]
        h = torch.cat(each, 1)
    else:
        h = _times(rows, a.t())
    bs = tuple(None if part.a is None else _scaled(part, dtype) for part in parts)
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


def _add_(y, a, b):
    """``y += a @ b``"""
    return y.addmm_(a, b) if a.dtype == y.dtype else add_product_(y, a, b)


def _kept(rows, mask):
    # The scale of the dropout is part of the second factor.
    return rows if mask is None else rows * mask


def linear_products(x, parts, low):
    """The result of each part, in the dtype of x."""
    results = []
    for part, b, columns in zip(parts, low.bs, _ranks(parts), strict=True):
        bias = None if part.bias is None else part.bias.to(x.dtype)
        y = nn.functional.linear(x, dense(part.weight, part.state, x.dtype), bias)
        if b is not None:
            _add_(y.view(-1, y.shape[-1]), low.h[:, columns], b.t())
        results.append(y)
    return results


class Gradients(NamedTuple):
    """The gradients of the input, in the dtype of the products, and per part of bias, a and b."""

    x: torch.Tensor | None
    parts: list


def ups_of(grads, low):
    """Per part (rows, r) the gradient of its columns of ``h``, or None; ``grads`` are rows."""
    return [None if b is None else _times(grad, b) for grad, b in zip(grads, low.bs, strict=True)]


def gradients(x, grads, ups, parts, low, weights, need_x, needs):
    """The :class:`Gradients` of :func:`linear_products`.

    Args:
        x: the input, or None if no first factor trains.
        grads: the gradients of the results, as rows.
        ups: of :func:`ups_of`.
        weights: of the base layers, as :func:`dense` takes them.
        need_x: whether the gradient of the input is needed.
        needs: per part whether the gradients of bias, a and b are.
    """
    columns = _ranks(parts)
    known = [up for up in ups if up is not None]
    up = None if not known else known[0] if len(known) == 1 else torch.cat(known, 1)
    dropped = any(mask is not None for mask in low.masks)
    grad_x = None
    if need_x:
        for grad, weight, part in zip(grads, weights, parts, strict=True):
            wide = dense(weight, part.state, grad.dtype)
            grad_x = grad @ wide if grad_x is None else grad_x.addmm_(grad, wide)
            del wide
        if up is not None and not dropped:
            _add_(grad_x, up, low.a)
        elif up is not None:
            for each, mask, at in zip(ups, low.masks, columns, strict=True):
                if each is not None:
                    term = _add_(torch.zeros_like(grad_x), each, low.a[at])
                    grad_x.add_(term if mask is None else term.mul_(mask))
    of_a = [None] * len(parts)
    if any(need_a for _, need_a, _ in needs):
        rows = rows_of(x)
        dtype = next(part.a.dtype for part in parts if part.a is not None)
        if not dropped:
            whole = _product(up.t(), rows, dtype)
            of_a = [None if each is None else whole[at] for each, at in zip(ups, columns, strict=True)]
        else:
            of_a = [
                None if each is None else _product(each.t(), _kept(rows, mask), dtype)
                for each, mask in zip(ups, low.masks, strict=True)
            ]
    results = []
    for grad, part, at, grad_a, (need_bias, need_a, need_b) in zip(
        grads, parts, columns, of_a, needs, strict=True
    ):
        grad_bias = grad.sum(0).to(part.bias.dtype) if need_bias else None
        grad_b = _product(grad.t(), low.h[:, at], part.b.dtype, _alpha(part)) if need_b else None
        results += [grad_bias, grad_a if need_a else None, grad_b]
    return Gradients(grad_x, results)


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
