# SPDX-License-Identifier: BSD-3-Clause
"""LayerNorm. ``liger/ops/layer_norm.py`` has the formulas, ``norm_rows.py`` the tiles and grids.

A row that fits a tile is read once. A longer row is read three times: for the mean, the variance and the
result. The variance is a sum of squared deviations; E[x^2] - E[x]^2 would cancel. xhat is never materialised.
"""

import torch
import triton
import triton.language as tl

from .common import (
    dense_vector,
    on_device_of,
    output_rows,
    require_dtype,
    rows_of,
    sm_count,
    warps_for,
    write_back,
)
from .norm_rows import backward_plan, forward_tile, load_float, parameter_grads, sum_partials

# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _load_parameter(ptr, cols, n_cols):
    return tl.load(ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store_normalised(y_rows, x, mean, rstd, weight_ptr, bias_ptr, cols, n_cols, mask):
    y = (x - mean[:, None]) * rstd[:, None]
    if weight_ptr is not None:
        y *= _load_parameter(weight_ptr, cols, n_cols)
    if bias_ptr is not None:
        y += _load_parameter(bias_ptr, cols, n_cols)
    tl.store(y_rows + cols[None, :], y.to(y_rows.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def forward_kernel(
    x_ptr, x_stride, weight_ptr, bias_ptr, y_ptr, y_stride, mean_ptr, rstd_ptr, n_rows, n_cols, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = (rows < n_rows)[:, None]
    x_rows = x_ptr + rows[:, None] * x_stride
    y_rows = y_ptr + rows[:, None] * y_stride

    if WHOLE_ROW:
        cols = tl.arange(0, BLOCK_COLS)
        mask = row_mask & (cols < n_cols)[None, :]
        x = load_float(x_rows, cols, mask)
        mean = tl.sum(x, 1) / n_cols
        deviation = tl.where(mask, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(deviation * deviation, 1) / n_cols + eps)
        _store_normalised(y_rows, x, mean, rstd, weight_ptr, bias_ptr, cols, n_cols, mask)
    else:
        sums = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            sums += load_float(x_rows, cols, row_mask & (cols < n_cols)[None, :])
        mean = tl.sum(sums, 1) / n_cols
        squares = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            mask = row_mask & (cols < n_cols)[None, :]
            deviation = tl.where(mask, load_float(x_rows, cols, mask) - mean[:, None], 0.0)
            squares += deviation * deviation
        rstd = tl.rsqrt(tl.sum(squares, 1) / n_cols + eps)
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            mask = row_mask & (cols < n_cols)[None, :]
            x = load_float(x_rows, cols, mask)
            _store_normalised(y_rows, x, mean, rstd, weight_ptr, bias_ptr, cols, n_cols, mask)
    tl.store(mean_ptr + rows, mean, mask=rows < n_rows)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


@triton.jit(do_not_specialize=["n_rows"])
def backward_kernel(
    grad_y_ptr, grad_y_stride, x_ptr, x_stride, weight_ptr, mean_ptr, rstd_ptr, grad_x_ptr, grad_x_stride,
    partial_ptr, n_rows, n_cols,
    NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, WHOLE_ROW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent programs over tiles of rows.

    partial (programs, gradients, n_cols): sums of grad_weight and grad_bias, if they are needed; only with
    WHOLE_ROW. STAGES: software pipelining, the number of prefetched tiles + 1.
    """
    program = tl.program_id(0)
    if partial_ptr is not None:
        weight_partial = partial_ptr + program.to(tl.int64) * (NEED_WEIGHT + NEED_BIAS) * n_cols
        bias_partial = weight_partial
        if NEED_WEIGHT:
            bias_partial += n_cols
    if WHOLE_ROW:
        all_cols = tl.arange(0, BLOCK_COLS)
        grad_weight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        grad_bias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        if weight_ptr is not None:
            weight = _load_parameter(weight_ptr, all_cols, n_cols)

    for tile in tl.range(program, tl.cdiv(n_rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = (rows < n_rows)[:, None]
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        grad_y_rows = grad_y_ptr + rows[:, None] * grad_y_stride
        x_rows = x_ptr + rows[:, None] * x_stride
        if grad_x_ptr is not None:
            grad_x_rows = grad_x_ptr + rows[:, None] * grad_x_stride

        if WHOLE_ROW:
            # Masked elements need no further mask: g is 0, and so are its products.
            mask = row_mask & (all_cols < n_cols)[None, :]
            g = load_float(grad_y_rows, all_cols, mask)
            xhat = (load_float(x_rows, all_cols, mask) - mean) * rstd
            if NEED_WEIGHT:
                grad_weight += g * xhat
            if NEED_BIAS:
                grad_bias += g
            if grad_x_ptr is not None:
                if weight_ptr is not None:
                    g *= weight
                a = (tl.sum(g, 1) / n_cols)[:, None]
                c = (tl.sum(g * xhat, 1) / n_cols)[:, None]
                grad_x = rstd * (g - a - xhat * c)
                tl.store(grad_x_rows + all_cols[None, :], grad_x.to(grad_x_rows.dtype.element_ty), mask=mask)
        else:
            grad_sums = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
            dot_sums = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
            for start in range(0, n_cols, BLOCK_COLS):
                cols = start + tl.arange(0, BLOCK_COLS)
                mask = row_mask & (cols < n_cols)[None, :]
                g = load_float(grad_y_rows, cols, mask)
                if weight_ptr is not None:
                    g *= _load_parameter(weight_ptr, cols, n_cols)
                grad_sums += g
                dot_sums += g * ((load_float(x_rows, cols, mask) - mean) * rstd)
            a = (tl.sum(grad_sums, 1) / n_cols)[:, None]
            c = (tl.sum(dot_sums, 1) / n_cols)[:, None]
            for start in range(0, n_cols, BLOCK_COLS):
                cols = start + tl.arange(0, BLOCK_COLS)
                mask = row_mask & (cols < n_cols)[None, :]
                g = load_float(grad_y_rows, cols, mask)
                xhat = (load_float(x_rows, cols, mask) - mean) * rstd
                if weight_ptr is not None:
                    g *= _load_parameter(weight_ptr, cols, n_cols)
                grad_x = rstd * (g - a - xhat * c)
                tl.store(grad_x_rows + cols[None, :], grad_x.to(grad_x_rows.dtype.element_ty), mask=mask)

    if WHOLE_ROW:
        if NEED_WEIGHT:
            tl.store(weight_partial + all_cols, tl.sum(grad_weight, 0), mask=all_cols < n_cols)
        if NEED_BIAS:
            tl.store(bias_partial + all_cols, tl.sum(grad_bias, 0), mask=all_cols < n_cols)


@triton.jit(do_not_specialize=["n_rows"])
def parameter_grads_kernel(
    grad_y_ptr, grad_y_stride, x_ptr, x_stride, mean_ptr, rstd_ptr, partial_ptr, n_rows, n_cols,
    NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The partials for long rows. Grid: (blocks of columns, partials); a program has every num_programs(1)-th
    tile."""
    partial_index = tl.program_id(1)
    weight_partial = partial_ptr + partial_index.to(tl.int64) * (NEED_WEIGHT + NEED_BIAS) * n_cols
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    grad_weight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    grad_bias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for tile in range(partial_index, tl.cdiv(n_rows, BLOCK_ROWS), tl.num_programs(1)):
        rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        g = load_float(grad_y_ptr + rows[:, None] * grad_y_stride, cols, mask)
        if NEED_WEIGHT:
            mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
            rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
            grad_weight += g * ((load_float(x_ptr + rows[:, None] * x_stride, cols, mask) - mean) * rstd)
        if NEED_BIAS:
            grad_bias += g
    if NEED_WEIGHT:
        tl.store(weight_partial + cols, tl.sum(grad_weight, 0), mask=cols < n_cols)
    if NEED_BIAS:
        tl.store(weight_partial + NEED_WEIGHT * n_cols + cols, tl.sum(grad_bias, 0), mask=cols < n_cols)


# --- launchers ----------------------------------------------------------------------------------------------


# Longest row for which backward_kernel also sums the parameter gradients. Longer rows leave no registers for
# the sums and use parameter_grads_kernel.
_MAX_FUSED_COLS = 8192
# Rows and columns of a tile of parameter_grads_kernel.
_PARAMETER_TILE = (8, 256)


def _registers(x):
    """Launch option of the forward: 32 registers per thread, so that an SM holds two programs of 1024
    threads."""
    return {"maxnreg": 32} if x.element_size() == 2 and torch.version.hip is None else {}


def layer_norm(x, weight=None, bias=None, eps=1e-5):
    require_dtype("layer_norm", "x", x)
    y, n_cols, n_rows = torch.empty_like(x), x.shape[-1], x.shape[:-1].numel()
    mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    if x.numel() == 0:
        return y, mean.fill_(float("nan")), rstd.fill_(float("nan"))
    x, x_stride = rows_of(x)
    y_rows, y_stride = output_rows(y)
    block_rows, block_cols, whole = forward_tile(n_cols, x)
    with on_device_of(x):
        forward_kernel[(triton.cdiv(n_rows, block_rows),)](
            x, x_stride, dense_vector(weight), dense_vector(bias), y_rows, y_stride, mean, rstd, n_rows, n_cols, eps,
            block_rows, block_cols, whole, num_warps=warps_for(block_rows * block_cols),
            **_registers(x),
        )  # fmt: skip
    write_back(y, y_rows)
    return y, mean, rstd


def layer_norm_backward(grad_y, x, weight, bias, mean, rstd, need_grad_x, need_grad_weight, need_grad_bias):
    op = "layer_norm_backward"
    require_dtype(op, "x", x)
    need_grad_weight = need_grad_weight and weight is not None
    need_grad_bias = need_grad_bias and bias is not None
    grad_x = torch.empty_like(x) if need_grad_x else x.new_empty(0)
    grad_weight, grad_bias, needed_grads = parameter_grads(x, weight, bias, need_grad_weight, need_grad_bias)
    if x.numel() == 0 or not (need_grad_x or needed_grads):
        return grad_x, grad_weight.zero_(), grad_bias.zero_()
    n_cols, n_rows = x.shape[-1], x.shape[:-1].numel()
    x, x_stride = rows_of(x)
    grad_y, grad_y_stride = rows_of(grad_y)
    grad_x_rows, grad_x_stride = output_rows(grad_x) if need_grad_x else (None, 0)
    plan = backward_plan(n_rows, x, inputs=2)
    mean, rstd = mean.contiguous(), rstd.contiguous()
    fused = n_cols <= _MAX_FUSED_COLS
    partial = None
    with on_device_of(x):
        if needed_grads and fused:
            partial = plan.partials(len(needed_grads), x)
        elif needed_grads:
            tile_rows, tile_cols = _PARAMETER_TILE
            columns = triton.cdiv(n_cols, tile_cols)
            n_partials = min(triton.cdiv(n_rows, tile_rows), triton.cdiv(8 * sm_count(x), columns))
            partial = x.new_empty(n_partials, len(needed_grads), n_cols, dtype=torch.float32)
            parameter_grads_kernel[(columns, n_partials)](
                grad_y, grad_y_stride, x, x_stride, mean, rstd, partial, n_rows, n_cols, need_grad_weight,
                need_grad_bias, tile_rows, tile_cols, num_warps=4,
            )  # fmt: skip
        if need_grad_x or fused:
            backward_kernel[(plan.programs,)](
                grad_y, grad_y_stride, x, x_stride, dense_vector(weight), mean, rstd, grad_x_rows, grad_x_stride,
                partial if fused else None, n_rows, n_cols, need_grad_weight and fused,
                need_grad_bias and fused, *plan.tile, plan.stages, num_warps=plan.warps,
            )  # fmt: skip
        if needed_grads:
            sum_partials(partial, needed_grads)
    if need_grad_x:
        write_back(grad_x, grad_x_rows)
    return grad_x, grad_weight, grad_bias
