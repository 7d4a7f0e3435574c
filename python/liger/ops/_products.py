"""Matrix products as ops sum them over chunks of rows."""

import torch


def add_product(total, a, b, first):
    """``total += a.T @ b`` (``total =`` for the first chunk), summed in the dtype of total.

    Forms with ``out=`` throughout, because autocast casts the operands of the others.
    """
    a = a.t()
    if total.dtype != a.dtype and a.is_cuda:
        # 16-bit operands with a float32 result exist on CUDA only.
        if first:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return
    a, b = a.to(total.dtype), b.to(total.dtype)
    if first:
        torch.mm(a, b, out=total)
    else:
        torch.addmm(total, a, b, out=total)


def write_linear(x, weight, bias, out):
    """``out = x @ weight.T + bias``; bias may be None."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
