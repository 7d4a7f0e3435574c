# SPDX-License-Identifier: BSD-3-Clause
"""The weighted sum of the experts of each token in grouped_experts.

One program per token and block of columns: it reads the rows of the token's choices once, sums them in
float32 in the order of the choices, and writes each result once, so the sum needs no atomics and is
deterministic.
"""

import torch
import triton
import triton.language as tl

from .common import on_device_of

# 16 bytes per thread and load with 4 warps in half types.
_BLOCK = 1024
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


# pad depends on the number of tokens.
@triton.jit(do_not_specialize=["pad"])
def expert_sum_kernel(
    rows_ptr, inverse_ptr, weights_ptr, out_ptr, n_cols, pad,
    CHOICES: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * CHOICES
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(inverse_ptr + slot + choice).to(tl.int64)
        # Neither the row of a sentinel nor its weight may have an effect: both may be NaN.
        valid = row != pad
        present = cols < tl.where(valid, n_cols, 0)
        value = tl.load(rows_ptr + row * n_cols + cols, mask=present, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value *= tl.load(weights_ptr + slot + choice, mask=valid, other=0.0).to(tl.float32)
        total += value
    tl.store(out_ptr + slot // CHOICES * n_cols + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


def takes(weights):
    """True if the routing weights have a dtype of the kernel; None is no weights."""
    return weights is None or weights.dtype in _DTYPES


def expert_sum(rows, inverse, weights):
    """(T, N), the dtype of rows: the sum over K of ``weights * rows[inverse]``, rounded once.

    Args:
        rows: (S + 1, N), contiguous; the last row, the pad, has no effect.
        inverse: (T, K) int64.
        weights: (T, K), or None for weights of 1.
    """
    tokens, choices = inverse.shape
    columns = rows.shape[1]
    out = rows.new_empty(tokens, columns)
    block = min(triton.next_power_of_2(max(columns, 16)), _BLOCK)
    grid = tokens, triton.cdiv(columns, block)
    with on_device_of(rows):
        expert_sum_kernel[grid](
            rows, inverse.contiguous(), rows if weights is None else weights.contiguous(), out, columns,
            rows.shape[0] - 1, choices, weights is not None, block,
        )  # fmt: skip
    return out
