# SPDX-License-Identifier: BSD-3-Clause
"""Products of matrices as exact as in IEEE float32, whatever the process allows for float32 matrix products
(TF32 on a GPU, bfloat16 in oneDNN on a CPU).

GEMMs of 16-bit operands sum exact products in float32. An operand in float32 is the sum of three bfloat16
numbers of 8 bits each, so on a GPU a product with it is three GEMMs of bfloat16, and one of two such operands
is six: tensor cores take a fraction of the time of float32 arithmetic, and no setting for TF32 applies. What
the six leave out is below 2^-26 of a product.
"""

import torch

from .matmul import product
from .row_blocks import row_blocks

# Tensor cores truncate as they add, by about 2^-23 of the sum for every 16 terms. Sums of so many terms,
# which are added to one another with rounding, have a smaller error than a float32 GEMM.
_GPU_TERMS = 256
# Elements of a block of the weight: its parts, and what is left of it after each, are 10 bytes per element.
_GPU_BLOCK = 1 << 24
_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def weight_blocks(weight):
    """Slices of classes that bound the size of temporaries: parts of the weight, or its copy in float32."""
    if not weight.is_cuda:
        return row_blocks(weight)
    # Whole tiles: their results are aligned.
    step = max(_GPU_BLOCK // max(1, weight.shape[1]) // 128, 1) * 128
    return (slice(i, min(i + step, weight.shape[0])) for i in range(0, weight.shape[0], step))


def float32_product(a, b, out, add=False, scale=1.0, terms=None):
    """``out = scale * a @ b``, or ``out += scale * a @ b`` with ``add``.

    Args:
        a, b: (m, k) and (k, n), float16, bfloat16 or float32, of any strides.
        out: (m, n) float32.
        terms: how many terms a GEMM on a GPU may sum; all by default.
    """
    if not a.is_cuda:
        _cpu_product(a, b, out, add, scale)
    elif a.dtype == b.dtype and _gemm_sums_in_float32(a.dtype):
        _gemm_of_terms(a, b, out, add, scale, terms)
    else:
        split_product(a, b, out, add, scale, terms)


def _gemm_sums_in_float32(dtype):
    return dtype == torch.bfloat16 or (
        dtype == torch.float16 and not torch.backends.cuda.matmul.allow_fp16_accumulation
    )


def split_product(a, b, out, add=False, scale=1.0, terms=None):
    """:func:`float32_product` by GEMMs of bfloat16."""
    lefts, rights = _bfloat16_parts(a), _bfloat16_parts(b)
    pairs = [(i, j) for i in range(len(lefts)) for j in range(len(rights)) if i + j < 3]
    # The smallest terms first.
    for i, j in sorted(pairs, key=sum, reverse=True):
        largest = i + j == 0
        _gemm_of_terms(lefts[i], rights[j], out, add, scale, terms if largest else None)
        add = True


def _bfloat16_parts(x):
    """bfloat16 tensors that add up to x, the largest first. Below 2^-110 a float32 loses its last bits."""
    if x.dtype == torch.bfloat16:
        return (x,)
    parts, rest = [], x.float()
    for _ in range(_PARTS[x.dtype]):
        part = rest.bfloat16()
        parts.append(part)
        rest = rest - part
    return parts


def _gemm_of_terms(a, b, out, add, scale, terms):
    size = a.shape[1]
    step = size if terms is None else terms
    # One block at least, which writes the zeros of an empty sum.
    for i in range(0, max(size, 1), max(step, 1)):
        _gemm(a[:, i : i + step], b[i : i + step], out, add or i > 0, scale)


def _gemm(a, b, out, add, scale):
    if scale == 1.0:
        product(a, b, out, add)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=float(add), alpha=scale, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=float(add), alpha=scale, out=out)


def _cpu_product(a, b, out, add, scale):
    # Reads the setting for oneDNN alone: the setting for MKL and OpenBLAS has no effect on float32.
    if torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee"):
        return _gemm(a, b, out, add, scale)
    exact = a.double() @ b.double()
    torch.add(out, exact, alpha=scale, out=out) if add else torch.mul(exact, scale, out=out)


def write_float32_linear(x, weight, bias, out, scale=1.0):
    """``out = scale * (x @ weight.T + bias)`` in float32; bias may be None. Each operand has a dtype of its
    own."""
    if bias is not None:
        out.copy_(bias.float() * scale)
    x = x if x.is_cuda else x.float()
    whole = x.is_cuda and x.dtype == weight.dtype and _gemm_sums_in_float32(x.dtype)
    for classes in (slice(None),) if whole else weight_blocks(weight):
        float32_product(x, weight[classes].t(), out[:, classes], bias is not None, scale, _GPU_TERMS)
