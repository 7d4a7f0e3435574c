# SPDX-License-Identifier: BSD-3-Clause
"""GEMMs of a linear layer that is computed in chunks of rows.

All use ``out=`` forms: autocast does not cast their operands.
"""

import torch

from .row_blocks import row_blocks


def write_linear(x, weight, bias, out, scale=1.0):
    """``out = scale * (x @ weight.T + bias)``, rounded once; bias may be None."""
    if bias is not None:
        torch.addmm(bias, x, weight.t(), beta=scale, alpha=scale, out=out)
    elif scale == 1.0:
        torch.mm(x, weight.t(), out=out)
    else:
        # beta=0: the old values of out, even NaN, do not affect the result.
        torch.addmm(out, x, weight.t(), beta=0.0, alpha=scale, out=out)


def write_wide_linear(x, weight, bias, out):
    """``out = x @ weight.T + bias``, rounded once to the dtype of out, which is wider than the dtype of x."""
    if bias is not None:
        out.copy_(bias)
    if x.is_cuda:
        product(x, weight.t(), out, add=bias is not None)
        return
    # Blocks of classes bound the size of the wide copy of the weight.
    x = x.to(out.dtype)
    for classes in row_blocks(weight):
        product(x, weight[classes].t(), out[:, classes], add=bias is not None)


def without_ignored(x, ignored, out=None):
    """x with zeros in ignored rows; x itself if ``ignored`` is None.

    For the weight gradient ``dlogits.T @ x``: the gradient of an ignored row is zero, but zero times an
    infinite or NaN hidden state is NaN.

    Args:
        x: (rows, H).
        ignored: (rows,) mask, or None.
        out: memory for the result, which may be x, or None.
    """
    return x if ignored is None else torch.where(ignored.unsqueeze(1), x.new_zeros(()), x, out=out)


def product(a, b, out, add=False):
    """``out = a @ b``, or ``out += a @ b`` with ``add``, accumulated in the dtype of out, which may be wider
    than the dtype of a and b."""
    if out.dtype != a.dtype and a.is_cuda:
        # out_dtype, for 16-bit operands with a float32 result, exists on CUDA only.
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        return
    b = b.to(out.dtype)
    if out.dtype != a.dtype:
        # Blocks bound the size of the wide copy of a, the larger operand.
        for rows in row_blocks(a):
            product(a[rows].to(out.dtype), b, out[rows], add)
    elif add:
        torch.addmm(out, a, b, out=out)
    else:
        torch.mm(a, b, out=out)
