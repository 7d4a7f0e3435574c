# SPDX-License-Identifier: BSD-3-Clause
"""Squared ReLU, ``relu(x)^2``, and its gradient: an elementwise kernel, one program per tile."""

import torch
import triton
import triton.language as tl

from .common import elementwise_tile, on_device_of, output_rows, require_dtype, rows_of, tile_at, write_back

# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_rows"])
def relu_squared_kernel(
    x_ptr, x_stride, grad_y_ptr, grad_y_stride, out_ptr, out_stride, n_rows, n_cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """relu(x)^2; with ``grad_y_ptr`` its gradient, 2 * relu(x) * grad_y."""
    rows, cols, mask = tile_at(tl.program_id(0), n_rows, n_cols, BLOCK_ROWS, BLOCK_COLS)
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask).to(tl.float32)
    factor = x
    if grad_y_ptr is not None:
        factor = 2.0 * tl.load(grad_y_ptr + rows * grad_y_stride + cols, mask=mask).to(tl.float32)
    # The comparison is false for NaN, so NaN propagates as in torch.relu.
    out = tl.where(x <= 0.0, 0.0, x * factor)
    tl.store(out_ptr + rows * out_stride + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


# --- launchers ----------------------------------------------------------------------------------------------


def _launch(op, x, grad_y=None):
    require_dtype(op, "x", x)
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    x, x_stride = rows_of(x)
    grad_y, grad_y_stride = (None, 0) if grad_y is None else rows_of(grad_y)
    out_rows, out_stride = output_rows(out)
    block_rows, block_cols, tiles = elementwise_tile(n_rows, n_cols)
    with on_device_of(x):
        relu_squared_kernel[(tiles,)](
            x, x_stride, grad_y, grad_y_stride, out_rows, out_stride, n_rows, n_cols, block_rows, block_cols
        )
    write_back(out, out_rows)
    return out


def relu_squared(x):
    return _launch("relu_squared", x)


def relu_squared_backward(grad_y, x):
    return _launch("relu_squared_backward", x, grad_y)
