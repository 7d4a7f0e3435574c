# SPDX-License-Identifier: BSD-3-Clause
"""RMSNorm and fused residual addition. ``liger/ops/rms_norm.py`` has the formulas and casting modes.

Forward grid: one program per tile of whole rows, which it reads once; two passes if a row is larger than a
tile. Backward grid: persistent programs. Each accumulates grad_weight in float32 in its own partial, and a
second kernel adds the partials in a fixed order: no atomics, bitwise reproducible. xhat is never
materialised.
"""

import torch
import triton
import triton.language as tl

from .common import dense_vector, on_device_of, output_rows, require_dtype, rows_of, warps_for, write_back
from .norm_rows import (
    add_weight_gradient,
    backward_plan,
    forward_tile,
    inverse_rms,
    load_float,
    load_weight,
    round_xhat,
    sum_partials,
)

# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _load_sum(x_rows, residual_rows, cols, mask):
    x = load_float(x_rows, cols, mask)
    if residual_rows is not None:
        # The sum is an output in the dtype of x, and its rounded value is normalised.
        x = (x + load_float(residual_rows, cols, mask)).to(x_rows.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _store_normalised(y_rows, x, rstd, weight_ptr, cols, n_cols, offset, mask, CASTING: tl.constexpr):
    dtype: tl.constexpr = y_rows.dtype.element_ty
    y = round_xhat(x * rstd[:, None], dtype, CASTING)
    if weight_ptr is not None:
        y *= load_weight(weight_ptr, cols, n_cols, offset)
    tl.store(y_rows + cols[None, :], y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def forward_kernel(
    x_ptr, x_stride, residual_ptr, residual_stride, weight_ptr, y_ptr, y_stride, new_residual_ptr, new_residual_stride,
    rstd_ptr, n_rows, n_cols, eps, offset,
    CASTING: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = (rows < n_rows)[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_rows = x_ptr + rows[:, None] * x_stride
    y_rows = y_ptr + rows[:, None] * y_stride
    residual_rows = None
    if residual_ptr is not None:
        residual_rows = residual_ptr + rows[:, None] * residual_stride
        new_rows = new_residual_ptr + rows[:, None] * new_residual_stride

    if WHOLE_ROW:
        cols = tl.arange(0, BLOCK_COLS)
        mask = row_mask & (cols < n_cols)[None, :]
        x = _load_sum(x_rows, residual_rows, cols, mask)
        if residual_ptr is not None:
            tl.store(new_rows + cols[None, :], x.to(dtype), mask=mask)
        rstd = inverse_rms(tl.sum(x * x, 1), n_cols, eps, dtype, CASTING)
        _store_normalised(y_rows, x, rstd, weight_ptr, cols, n_cols, offset, mask, CASTING)
    else:
        squares = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            mask = row_mask & (cols < n_cols)[None, :]
            x = _load_sum(x_rows, residual_rows, cols, mask)
            if residual_ptr is not None:
                tl.store(new_rows + cols[None, :], x.to(dtype), mask=mask)
            squares += x * x
        rstd = inverse_rms(tl.sum(squares, 1), n_cols, eps, dtype, CASTING)
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            mask = row_mask & (cols < n_cols)[None, :]
            x = _load_sum(x_rows, residual_rows, cols, mask)
            _store_normalised(y_rows, x, rstd, weight_ptr, cols, n_cols, offset, mask, CASTING)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


@triton.jit
def _store_grad_x(grad_x_rows, g, xhat, rstd, mean, grad_residual_rows, cols, mask):
    grad_x = rstd * (g - xhat * mean)
    if grad_residual_rows is not None:
        grad_x += load_float(grad_residual_rows, cols, mask)
    tl.store(grad_x_rows + cols[None, :], grad_x.to(grad_x_rows.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def backward_kernel(
    grad_y_ptr, grad_y_stride, x_ptr, x_stride, weight_ptr, rstd_ptr, grad_residual_ptr, grad_residual_stride,
    grad_x_ptr, grad_x_stride, partial_ptr, n_rows, n_cols, offset,
    CASTING: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, WHOLE_ROW: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent programs over tiles of rows. STAGES: software pipelining, the number of prefetched tiles +
    1."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    if partial_ptr is not None:
        partial_row = partial_ptr + program.to(tl.int64) * n_cols
    if WHOLE_ROW:
        all_cols = tl.arange(0, BLOCK_COLS)
        grad_weight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        if weight_ptr is not None:
            weight = load_weight(weight_ptr, all_cols, n_cols, offset)

    for tile in tl.range(program, tl.cdiv(n_rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = (rows < n_rows)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        grad_y_rows = grad_y_ptr + rows[:, None] * grad_y_stride
        x_rows = x_ptr + rows[:, None] * x_stride
        grad_residual_rows = None
        if grad_residual_ptr is not None:
            grad_residual_rows = grad_residual_ptr + rows[:, None] * grad_residual_stride
        if grad_x_ptr is not None:
            grad_x_rows = grad_x_ptr + rows[:, None] * grad_x_stride

        if WHOLE_ROW:
            mask = row_mask & (all_cols < n_cols)[None, :]
            g = load_float(grad_y_rows, all_cols, mask)
            xhat = load_float(x_rows, all_cols, mask) * rstd
            if partial_ptr is not None:
                grad_weight += g * round_xhat(xhat, dtype, CASTING)
            if grad_x_ptr is not None:
                if weight_ptr is not None:
                    g *= weight
                mean = (tl.sum(g * xhat, 1) / n_cols)[:, None]
                _store_grad_x(grad_x_rows, g, xhat, rstd, mean, grad_residual_rows, all_cols, mask)
        else:
            dot_sums = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
            if grad_x_ptr is not None:
                for start in range(0, n_cols, BLOCK_COLS):
                    cols = start + tl.arange(0, BLOCK_COLS)
                    mask = row_mask & (cols < n_cols)[None, :]
                    g = load_float(grad_y_rows, cols, mask)
                    if weight_ptr is not None:
                        g *= load_weight(weight_ptr, cols, n_cols, offset)
                    dot_sums += g * (load_float(x_rows, cols, mask) * rstd)
            mean = (tl.sum(dot_sums, 1) / n_cols)[:, None]
            for start in range(0, n_cols, BLOCK_COLS):
                cols = start + tl.arange(0, BLOCK_COLS)
                mask = row_mask & (cols < n_cols)[None, :]
                g = load_float(grad_y_rows, cols, mask)
                xhat = load_float(x_rows, cols, mask) * rstd
                if partial_ptr is not None:
                    add_weight_gradient(partial_row, g, xhat, cols, n_cols, dtype, CASTING)
                if grad_x_ptr is not None:
                    if weight_ptr is not None:
                        g *= load_weight(weight_ptr, cols, n_cols, offset)
                    _store_grad_x(grad_x_rows, g, xhat, rstd, mean, grad_residual_rows, cols, mask)
            # In the next iteration another thread may load these elements of the partial.
            tl.debug_barrier()

    if WHOLE_ROW and partial_ptr is not None:
        tl.store(partial_row + all_cols, tl.sum(grad_weight, 0), mask=all_cols < n_cols)


# --- launchers ----------------------------------------------------------------------------------------------


def _forward(op, x, residual, weight, eps, offset, casting_mode):
    require_dtype(op, "x", x)
    y, n_cols = torch.empty_like(x), x.shape[-1]
    new_residual = None if residual is None else torch.empty_like(x)
    n_rows = x.shape[:-1].numel()
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return y, new_residual, rstd.fill_(float("nan"))
    x, x_stride = rows_of(x)
    residual, residual_stride = (None, 0) if residual is None else rows_of(residual)
    y_rows, y_stride = output_rows(y)
    new_rows, new_stride = (None, 0) if new_residual is None else output_rows(new_residual)
    block_rows, block_cols, whole = forward_tile(n_cols, x)
    with on_device_of(x):
        forward_kernel[(triton.cdiv(n_rows, block_rows),)](
            x, x_stride, residual, residual_stride, dense_vector(weight), y_rows, y_stride, new_rows, new_stride,
            rstd, n_rows, n_cols, eps, offset, casting_mode, block_rows, block_cols, whole,
            num_warps=warps_for(block_rows * block_cols),
            # A compiler may fuse either square of a sum of two. A norm of a stored sum has the bits of
            # fused_add_rms_norm, another kernel.
            enable_fp_fusion=False,
        )  # fmt: skip
    write_back(y, y_rows)
    if new_residual is not None:
        write_back(new_residual, new_rows)
    return y, new_residual, rstd


def _backward(
    op, grad_y, grad_residual, x, weight, rstd, offset, casting_mode, need_grad_x, need_grad_weight
):
    require_dtype(op, "x", x)
    n_cols = x.shape[-1]
    grad_x = torch.empty_like(x) if need_grad_x else x.new_empty(0)
    need_grad_weight = need_grad_weight and weight is not None
    if x.numel() == 0 or not (need_grad_x or need_grad_weight):
        like = x if weight is None else weight
        return grad_x, like.new_zeros(n_cols if need_grad_weight else 0)
    n_rows = x.numel() // n_cols
    x, x_stride = rows_of(x)
    grad_y, grad_y_stride = rows_of(grad_y)
    rstd = rstd.contiguous()
    grad_residual, grad_residual_stride = (None, 0) if grad_residual is None else rows_of(grad_residual)
    grad_x_rows, grad_x_stride = output_rows(grad_x) if need_grad_x else (None, 0)
    plan = backward_plan(n_rows, x, inputs=2 if grad_residual is None else 3)
    grad_weight = (x if weight is None else weight).new_empty(n_cols if need_grad_weight else 0)
    partial = None
    if need_grad_weight:
        partial = plan.partials(1, x)
    with on_device_of(x):
        backward_kernel[(plan.programs,)](
            grad_y, grad_y_stride, x, x_stride, dense_vector(weight), rstd, grad_residual, grad_residual_stride,
            grad_x_rows, grad_x_stride, partial, n_rows, n_cols, offset, casting_mode, *plan.tile, plan.stages,
            num_warps=plan.warps,
        )  # fmt: skip
        if need_grad_weight:
            sum_partials(partial, [grad_weight])
    if need_grad_x:
        write_back(grad_x, grad_x_rows)
    return grad_x, grad_weight


def rms_norm(x, weight, eps=1e-6, offset=0.0, casting_mode="llama"):
    y, _, rstd = _forward("rms_norm", x, None, weight, eps, offset, casting_mode)
    return y, rstd


def rms_norm_backward(grad_y, x, weight, rstd, offset, casting_mode, need_grad_x, need_grad_weight):
    return _backward(
        "rms_norm_backward", grad_y, None, x, weight, rstd, offset, casting_mode, need_grad_x, need_grad_weight
    )  # fmt: skip


def fused_add_rms_norm(x, residual, weight, eps=1e-6, offset=0.0, casting_mode="llama"):
    return _forward("fused_add_rms_norm", x, residual, weight, eps, offset, casting_mode)


def fused_add_rms_norm_backward(
    grad_y, grad_new_residual, new_residual, weight, rstd, offset, casting_mode, need_grad_x, need_grad_weight
):
    return _backward(
        "fused_add_rms_norm_backward", grad_y, grad_new_residual, new_residual, weight, rstd, offset, casting_mode,
        need_grad_x, need_grad_weight,
    )  # fmt: skip
