"""The matrix products of a linear layer that is computed a chunk of rows at a time.

Forms with ``out=`` throughout, because autocast casts the operands of the others.
"""

import torch


def write_linear(x, weight, bias, out, scale=1.0):
    """``out = scale * (x @ weight.T + bias)``, rounded once; bias may be None."""
    if bias is not None:
        torch.addmm(bias, x, weight.t(), beta=scale, alpha=scale, out=out)
    elif scale == 1.0:
        torch.mm(x, weight.t(), out=out)
    else:
        # With beta 0 what out held, even NaN, is no part of the result.
        torch.addmm(out, x, weight.t(), beta=0.0, alpha=scale, out=out)


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
