# SPDX-License-Identifier: BSD-3-Clause
"""Products of a thin factor in float32 with a large operand of 16 bits, as exact as in float32.

A float32 number is the sum of three bfloat16 numbers of 8 bits each. Side by side along the rank, they are
one operand of one GEMM of bfloat16, which reads the large operand once and sums in float32. The parts take a
dozen launches. Where the host needs longer for these than the device for the product, the large operand is
converted instead, as PEFT does.
"""

import functools

import torch

from ..._core.math.float32_matmul import float32_product
from ..._core.math.row_blocks import row_blocks

# Elements of a large operand up to which it is converted: 128 MiB in float32.
_CONVERTED = 2**25


def _parts(t, count):
    """bfloat16 views that add up to a float32 tensor, the largest first: two have 16 bits; three are exact
    from 2^-110 on, and err by less than 2^-133 below.

    The parts after an infinity are NaN, and an infinite operand times a part that is zero is NaN. So a result
    may be NaN where float32 gives an infinity; the same elements are finite.
    """
    if 1 not in t.stride():
        t = t.contiguous()
    if t.stride(1) != 1:
        return [part.t() for part in _parts(t.t(), count)]
    parts = []
    for _ in range(count - 1):
        # The upper half of a float32 is the number itself, cut off.
        parts.append(t.view(torch.bfloat16)[:, 1::2])
        t = t - parts[-1]
    return [*parts, t.view(torch.bfloat16)[:, 1::2]]


def without_autocast(function):
    """Autocast may be on in the backward alone, where it would round the operands."""

    @functools.wraps(function)
    def exact(*args):
        device = next(a for a in args if isinstance(a, torch.Tensor)).device.type
        if not torch.is_autocast_enabled(device):
            return function(*args)
        with torch.autocast(device, enabled=False):
            return function(*args)

    return exact


def converted(t, dtype):
    """A large operand of several products in their dtype, or itself if each is to split the other operand."""
    return t if t.dtype == dtype or t.numel() > _CONVERTED else t.to(dtype)


def wide(a, b, scale=1.0):
    """``scale * a @ b`` in float32, where one operand is float32 and thin, the other has 16 bits. Call it
    without autocast, as :func:`add_product_`."""
    m, n = a.shape[0], b.shape[1]
    if max(a.numel(), b.numel()) <= _CONVERTED:
        out = a.float() @ b.float()
        return out if scale == 1 else out.mul_(scale)
    if torch.float16 in (a.dtype, b.dtype):
        out = a.new_empty((m, n), dtype=torch.float32)
        float32_product(a, b, out, scale=scale)
        return out
    if a.dtype == torch.float32:
        a, shape, dim = torch.cat(_parts(a, 3)), (3, m, n), 0
    else:
        b, shape, dim = torch.cat(_parts(b, 3), 1), (m, 3, n), 1
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32)
    float32_product(a, b, out)
    out = out.view(shape).sum(dim)
    return out if scale == 1 else out.mul_(scale)


def add_product_(y, a, b, scale):
    """``y += scale * a @ b`` for y of 16 bits and thin float32 operands, with twice the precision of y."""
    if y.numel() <= _CONVERTED:
        return y.add_(a @ b, alpha=scale)
    count = 2 if y.dtype == torch.bfloat16 else 3
    lefts, rights = _parts(a, count), _parts(b, count)
    a = torch.cat([part for i, part in enumerate(lefts) for _ in range(count - i)], 1)
    b = torch.cat([part for i in range(count) for part in rights[: count - i]])
    if y.dtype == torch.bfloat16:
        return y.addmm_(a, b, alpha=scale)
    # A GEMM of float16 takes no operands in bfloat16, and float16 lacks the range of the factors.
    for rows in row_blocks(y):
        out = torch.empty_like(y[rows], dtype=torch.float32)
        float32_product(a[rows], b, out)
        y[rows].add_(out, alpha=scale)
    return y
