# SPDX-License-Identifier: BSD-3-Clause
"""Multiplication by a device scalar in float32, rounded once: an elementwise kernel with persistent
programs."""

import torch
import triton
import triton.language as tl

from .common import (
    elementwise_tile,
    on_device_of,
    output_rows,
    require_dtype,
    rows_of,
    sm_count,
    tile_at,
    write_back,
)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def rescale_kernel(
    x_ptr, x_stride, out_ptr, out_stride, factor_ptr, n_rows, n_cols, n_tiles,
    IN_PLACE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    factor = tl.load(factor_ptr).to(tl.float32)
    if IN_PLACE:
        # A loss that is differentiated directly has the factor 1, which only the device knows: no work to do.
        n_tiles = tl.where(factor == 1.0, 0, n_tiles)
    for index in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        rows, cols, mask = tile_at(index, n_rows, n_cols, BLOCK_ROWS, BLOCK_COLS)
        x = tl.load(x_ptr + rows * x_stride + cols, mask=mask).to(tl.float32)
        tl.store(out_ptr + rows * out_stride + cols, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


def _rescale(op, x, out, factor):
    require_dtype(op, "x", x)
    if factor.numel() != 1:
        raise RuntimeError(f"rescale: factor has shape {tuple(factor.shape)}, expected one element")
    if x.numel() == 0:
        return
    in_place = out is x
    if x.dim() == 0:
        x, out = x.view(1), out.view(1)
    x_rows, x_stride = rows_of(x)
    out_rows, out_stride = (x_rows, x_stride) if in_place else output_rows(out)
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    block_rows, block_cols, n_tiles = elementwise_tile(n_rows, n_cols)
    # Persistent programs, so that the launch is cheap if the factor is 1.
    programs = min(n_tiles, 16 * sm_count(x))
    with on_device_of(x):
        rescale_kernel[(programs,)](
            x_rows, x_stride, out_rows, out_stride, factor, n_rows, n_cols, n_tiles, in_place, block_rows, block_cols
        )  # fmt: skip
    write_back(out, out_rows)


def rescale(x, factor):
    out = torch.empty_like(x)
    _rescale("rescale", x, out, factor)
    return out


def rescale_(x, factor):
    _rescale("rescale_", x, x, factor)
