"""The matrix products of a linear layer that is computed a chunk of rows at a time.

Forms with ``out=`` throughout, because autocast casts the operands of the others.
"""

import torch


def write_linear(x, weight, bias, out):
    """``out = x @ weight.T + bias``; bias may be None."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


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
