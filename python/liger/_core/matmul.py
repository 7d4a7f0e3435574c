"""GEMMs of a linear layer that is computed in chunks of rows.

All are ``out=`` forms, because autocast casts the operands of the others.
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
        # With beta 0 what out held, even NaN, is no part of the result.
        torch.addmm(out, x, weight.t(), beta=0.0, alpha=scale, out=out)


def write_wide_linear(x, weight, bias, out):
    """``out = x @ weight.T + bias`` in the dtype of out, wider than that of the others: rounded there alone."""
    if bias is not None:
        out.copy_(bias)
    if x.is_cuda:
        product(x, weight.t(), out, add=bias is not None)
        return
    # A copy of a few classes of the weight at a time.
    x = x.to(out.dtype)
    for classes in row_blocks(weight):
        product(x, weight[classes].t(), out[:, classes], add=bias is not None)


def without_ignored(x, ignored, out=None):
    """Rows of x, with zeros in place of those that ``ignored``, (rows,), marks; None marks none, and x is returned.

    For the weight gradient ``dlogits.T @ x``, a sum over rows: the gradient of an ignored row is zero, but zero times
    an infinite or NaN hidden state is NaN. ``out``: memory for the rows, maybe that of x.
    """
    return x if ignored is None else torch.where(ignored.unsqueeze(1), x.new_zeros(()), x, out=out)


def product(a, b, out, add=False):
    """``out = a @ b``, or ``out += a @ b``, summed in the dtype of out, which may be wider than that of a and b."""
    if out.dtype != a.dtype and a.is_cuda:
        # 16-bit operands with a float32 result exist on CUDA only.
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        return
    a, b = a.to(out.dtype), b.to(out.dtype)
    if add:
        torch.addmm(out, a, b, out=out)
    else:
        torch.mm(a, b, out=out)
