# SPDX-License-Identifier: BSD-3-Clause
"""Softmax over rows, and its gradient ``y * (grad_y - sum(grad_y * y))``.

Grid: one program per tile of whole rows, which it reads once. If a row is larger than a tile, a program makes
two passes over it: the first for maximum and sum (online softmax: Milakov and Gimelshein, arXiv 1805.02867)
or for the dot product. exp(x) of a row is never stored.
"""

import torch
import triton
import triton.language as tl

from .common import on_device_of, output_rows, require_dtype, rows_of, warps_for, write_back

# Elements: the longest row (times the number of inputs) that a program keeps in registers, a tile of a longer
# row, and a tile of several short rows.
_REGISTER_ROW = 32768
_TILE = 4096
_SHORT_ROWS_TILE = 1024

# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _load(rows_ptr, cols, mask, other):
    return tl.load(rows_ptr + cols[None, :], mask=mask, other=other).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def forward_kernel(
    x_ptr, x_stride, y_ptr, y_stride, n_rows, n_cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = (rows < n_rows)[:, None]
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    x_rows, y_rows = x_ptr + rows[:, None] * x_stride, y_ptr + rows[:, None] * y_stride
    if WHOLE_ROW:
        cols = tl.arange(0, BLOCK_COLS)
        mask = row_mask & (cols < n_cols)[None, :]
        x = _load(x_rows, cols, mask, -float("inf"))
        y = tl.exp(x - tl.max(x, 1)[:, None])
        tl.store(y_rows + cols[None, :], (y / tl.sum(y, 1)[:, None]).to(dtype), mask=mask)
    else:
        row_max = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            x = _load(x_rows, cols, row_mask & (cols < n_cols)[None, :], -float("inf"))
            new_max = tl.maximum(row_max, tl.max(x, 1))
            # If all elements so far are -inf, x - new_max would be NaN; with 0 as reference the sum is 0.
            reference = tl.where(new_max == -float("inf"), 0.0, new_max)
            row_sum = row_sum * tl.exp(row_max - reference) + tl.sum(tl.exp(x - reference[:, None]), 1)
            row_max = new_max
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            mask = row_mask & (cols < n_cols)[None, :]
            y = tl.exp(_load(x_rows, cols, mask, -float("inf")) - row_max[:, None]) / row_sum[:, None]
            tl.store(y_rows + cols[None, :], y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def backward_kernel(
    grad_y_ptr, grad_y_stride, y_ptr, y_stride, grad_x_ptr, grad_x_stride, n_rows, n_cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = (rows < n_rows)[:, None]
    dtype: tl.constexpr = grad_x_ptr.dtype.element_ty
    y_rows, grad_x_rows = y_ptr + rows[:, None] * y_stride, grad_x_ptr + rows[:, None] * grad_x_stride
    grad_y_rows = grad_y_ptr + rows[:, None] * grad_y_stride
    if WHOLE_ROW:
        cols = tl.arange(0, BLOCK_COLS)
        mask = row_mask & (cols < n_cols)[None, :]
        y, grad_y = _load(y_rows, cols, mask, 0.0), _load(grad_y_rows, cols, mask, 0.0)
        grad_x = y * (grad_y - tl.sum(y * grad_y, 1)[:, None])
        tl.store(grad_x_rows + cols[None, :], grad_x.to(dtype), mask=mask)
    else:
        products = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            mask = row_mask & (cols < n_cols)[None, :]
            products += _load(y_rows, cols, mask, 0.0) * _load(grad_y_rows, cols, mask, 0.0)
        dot = tl.sum(products, 1)[:, None]
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            mask = row_mask & (cols < n_cols)[None, :]
            grad_x = _load(y_rows, cols, mask, 0.0) * (_load(grad_y_rows, cols, mask, 0.0) - dot)
            tl.store(grad_x_rows + cols[None, :], grad_x.to(dtype), mask=mask)


# --- launchers ----------------------------------------------------------------------------------------------


def _tile(n_rows, n_cols, tensors):
    """(BLOCK_ROWS, BLOCK_COLS, WHOLE_ROW, number of tiles, num_warps)"""
    columns = triton.next_power_of_2(n_cols)
    whole = columns * tensors <= _REGISTER_ROW
    block_cols = columns if whole else _TILE
    block_rows = max(_SHORT_ROWS_TILE // block_cols, 1)
    return block_rows, block_cols, whole, triton.cdiv(n_rows, block_rows), warps_for(block_rows * block_cols)


def softmax(x):
    require_dtype("softmax", "x", x)
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    x, x_stride = rows_of(x)
    y_rows, y_stride = output_rows(y)
    block_rows, block_cols, whole, tiles, warps = _tile(n_rows, n_cols, 1)
    with on_device_of(x):
        forward_kernel[(tiles,)](
            x, x_stride, y_rows, y_stride, n_rows, n_cols, block_rows, block_cols, whole, num_warps=warps
        )
    write_back(y, y_rows)
    return y


def softmax_backward(grad_y, y):
    require_dtype("softmax_backward", "y", y)
    grad_x = torch.empty_like(y)
    if y.numel() == 0:
        return grad_x
    n_cols = y.shape[-1]
    n_rows = y.numel() // n_cols
    grad_y, grad_y_stride = rows_of(grad_y)
    y, y_stride = rows_of(y)
    grad_x_rows, grad_x_stride = output_rows(grad_x)
    block_rows, block_cols, whole, tiles, warps = _tile(n_rows, n_cols, 2)
    with on_device_of(y):
        backward_kernel[(tiles,)](
            grad_y, grad_y_stride, y, y_stride, grad_x_rows, grad_x_stride, n_rows, n_cols,
            block_rows, block_cols, whole, num_warps=warps,
        )  # fmt: skip
    write_back(grad_x, grad_x_rows)
    return grad_x
