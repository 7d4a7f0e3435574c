# SPDX-License-Identifier: BSD-3-Clause
"""RMSNorm with a gate. ``liger/ops/rms_norm_gated.py`` has the formulas and casting modes.

Grids as in ``rms_norm.py``, for each group of columns: program ``i`` works on group ``i % groups``, whose
columns it treats like a tensor of its own. The statistics have shape (rows, groups).
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
def _activate(gate, dtype: tl.constexpr, CASTING: tl.constexpr, SIGMOID: tl.constexpr):
    """(a, its derivative)."""
    s = 1.0 / (1.0 + tl.exp(-gate))
    if SIGMOID:
        a, derivative = s, s * (1.0 - s)
    else:
        a = gate * s
        derivative = s + a * (1.0 - s)
    return (a.to(dtype).to(tl.float32) if CASTING == "none" else a), derivative


@triton.jit
def _norm_input(x, a, dtype: tl.constexpr, CASTING: tl.constexpr, GATE_LAST: tl.constexpr):
    if GATE_LAST:
        return x
    return (x * a).to(dtype).to(tl.float32) if CASTING == "none" else x * a


@triton.jit
def _scaled(xhat, weight_ptr, cols, n_cols, offset, dtype: tl.constexpr, CASTING: tl.constexpr):
    n = round_xhat(xhat, dtype, CASTING)
    if weight_ptr is not None:
        n *= load_weight(weight_ptr, cols, n_cols, offset)
        rounded: tl.constexpr = CASTING != "gemma" and weight_ptr.dtype.element_ty == dtype
        if rounded:
            n = n.to(dtype).to(tl.float32)
    return n


@triton.jit
def _load_input(
    x_rows, gate_rows, cols, mask, CASTING: tl.constexpr, GATE_LAST: tl.constexpr, SIGMOID: tl.constexpr
):
    """(input of the norm, a)"""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    a, _ = _activate(load_float(gate_rows, cols, mask), dtype, CASTING, SIGMOID)
    return _norm_input(load_float(x_rows, cols, mask), a, dtype, CASTING, GATE_LAST), a


@triton.jit
def _store_output(
    y_rows, h, a, rstd, weight_ptr, cols, n_cols, offset, mask, CASTING: tl.constexpr, GATE_LAST: tl.constexpr
):
    dtype: tl.constexpr = y_rows.dtype.element_ty
    y = _scaled(h * rstd[:, None], weight_ptr, cols, n_cols, offset, dtype, CASTING)
    if GATE_LAST:
        y *= a
    tl.store(y_rows + cols[None, :], y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def gated_forward_kernel(
    x_ptr, x_stride, gate_ptr, gate_stride, weight_ptr, y_ptr, y_stride, rstd_ptr, n_rows, n_cols, n_groups, eps,
    offset, CASTING: tl.constexpr, GATE_LAST: tl.constexpr, SIGMOID: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    """n_cols: columns of a group."""
    program = tl.program_id(0)
    group = program % n_groups
    rows = (program // n_groups).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = (rows < n_rows)[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first = group.to(tl.int64) * n_cols
    x_rows = x_ptr + first + rows[:, None] * x_stride
    gate_rows = gate_ptr + first + rows[:, None] * gate_stride
    y_rows = y_ptr + first + rows[:, None] * y_stride
    if weight_ptr is not None:
        weight_ptr += first

    if WHOLE_ROW:
        cols = tl.arange(0, BLOCK_COLS)
        mask = row_mask & (cols < n_cols)[None, :]
        h, a = _load_input(x_rows, gate_rows, cols, mask, CASTING, GATE_LAST, SIGMOID)
        rstd = inverse_rms(tl.sum(h * h, 1), n_cols, eps, dtype, CASTING)
        _store_output(y_rows, h, a, rstd, weight_ptr, cols, n_cols, offset, mask, CASTING, GATE_LAST)
    else:
        squares = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            mask = row_mask & (cols < n_cols)[None, :]
            h, _ = _load_input(x_rows, gate_rows, cols, mask, CASTING, GATE_LAST, SIGMOID)
            squares += h * h
        rstd = inverse_rms(tl.sum(squares, 1), n_cols, eps, dtype, CASTING)
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            mask = row_mask & (cols < n_cols)[None, :]
            h, a = _load_input(x_rows, gate_rows, cols, mask, CASTING, GATE_LAST, SIGMOID)
            _store_output(y_rows, h, a, rstd, weight_ptr, cols, n_cols, offset, mask, CASTING, GATE_LAST)
    tl.store(rstd_ptr + rows * n_groups + group, rstd, mask=rows < n_rows)


@triton.jit
def _store(rows_ptr, value, cols, mask):
    if rows_ptr is not None:
        tl.store(rows_ptr + cols[None, :], value.to(rows_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_gradients(
    grad_y_rows, x_rows, gate_rows, rstd, cols, mask,
    CASTING: tl.constexpr, GATE_LAST: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """(upstream gradient, the same of n * w, x, xhat, a, derivative of a)"""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    grad_y, x = load_float(grad_y_rows, cols, mask), load_float(x_rows, cols, mask)
    a, derivative = _activate(load_float(gate_rows, cols, mask), dtype, CASTING, SIGMOID)
    xhat = _norm_input(x, a, dtype, CASTING, GATE_LAST) * rstd
    return grad_y, (grad_y * a if GATE_LAST else grad_y), x, xhat, a, derivative


@triton.jit
def _store_gradients(
    grad_x_rows, grad_gate_rows, grad_y, g, x, xhat, a, derivative, rstd, mean, weight_ptr, cols, n_cols, offset, mask,
    dtype: tl.constexpr, CASTING: tl.constexpr, GATE_LAST: tl.constexpr,
):  # fmt: skip
    """g: the gradient of xhat; mean: of g * xhat."""
    grad_h = rstd * (g - xhat * mean)
    if GATE_LAST:
        _store(grad_x_rows, grad_h, cols, mask)
        if grad_gate_rows is not None:
            scaled = _scaled(xhat, weight_ptr, cols, n_cols, offset, dtype, CASTING)
            _store(grad_gate_rows, grad_y * scaled * derivative, cols, mask)
    else:
        _store(grad_x_rows, grad_h * a, cols, mask)
        _store(grad_gate_rows, grad_h * x * derivative, cols, mask)


@triton.jit(do_not_specialize=["n_rows"])
def gated_backward_kernel(
    grad_y_ptr, grad_y_stride, x_ptr, x_stride, gate_ptr, gate_stride, weight_ptr, rstd_ptr, grad_x_ptr, grad_x_stride,
    grad_gate_ptr, grad_gate_stride, partial_ptr, n_rows, n_cols, n_groups, offset,
    CASTING: tl.constexpr, GATE_LAST: tl.constexpr, SIGMOID: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, WHOLE_ROW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent programs over tiles of rows of one group. STAGES: software pipelining, the number of
    prefetched tiles + 1."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    group = tl.program_id(0) % n_groups
    program = tl.program_id(0) // n_groups
    programs = tl.num_programs(0) // n_groups
    first = group.to(tl.int64) * n_cols
    if weight_ptr is not None:
        weight_ptr += first
    if partial_ptr is not None:
        partial_row = partial_ptr + program.to(tl.int64) * n_groups * n_cols + first
    if WHOLE_ROW:
        all_cols = tl.arange(0, BLOCK_COLS)
        grad_weight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)

    for tile in tl.range(program, tl.cdiv(n_rows, BLOCK_ROWS), programs, num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = (rows < n_rows)[:, None]
        rstd = tl.load(rstd_ptr + rows * n_groups + group, mask=rows < n_rows, other=0.0)[:, None]
        grad_y_rows = grad_y_ptr + first + rows[:, None] * grad_y_stride
        x_rows = x_ptr + first + rows[:, None] * x_stride
        gate_rows = gate_ptr + first + rows[:, None] * gate_stride
        grad_x_rows = None
        grad_gate_rows = None
        if grad_x_ptr is not None:
            grad_x_rows = grad_x_ptr + first + rows[:, None] * grad_x_stride
        if grad_gate_ptr is not None:
            grad_gate_rows = grad_gate_ptr + first + rows[:, None] * grad_gate_stride

        if WHOLE_ROW:
            mask = row_mask & (all_cols < n_cols)[None, :]
            grad_y, g, x, xhat, a, derivative = _load_gradients(
                grad_y_rows, x_rows, gate_rows, rstd, all_cols, mask, CASTING, GATE_LAST, SIGMOID
            )
            if partial_ptr is not None:
                grad_weight += g * round_xhat(xhat, dtype, CASTING)
            if weight_ptr is not None:
                g *= load_weight(weight_ptr, all_cols, n_cols, offset)
            mean = (tl.sum(g * xhat, 1) / n_cols)[:, None]
            _store_gradients(
                grad_x_rows, grad_gate_rows, grad_y, g, x, xhat, a, derivative, rstd, mean, weight_ptr, all_cols,
                n_cols, offset, mask, dtype, CASTING, GATE_LAST,
            )  # fmt: skip
        else:
            dot_sums = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
            for start in range(0, n_cols, BLOCK_COLS):
                cols = start + tl.arange(0, BLOCK_COLS)
                mask = row_mask & (cols < n_cols)[None, :]
                _, g, _, xhat, _, _ = _load_gradients(
                    grad_y_rows, x_rows, gate_rows, rstd, cols, mask, CASTING, GATE_LAST, SIGMOID
                )
                if weight_ptr is not None:
                    g *= load_weight(weight_ptr, cols, n_cols, offset)
                dot_sums += g * xhat
            mean = (tl.sum(dot_sums, 1) / n_cols)[:, None]
            for start in range(0, n_cols, BLOCK_COLS):
                cols = start + tl.arange(0, BLOCK_COLS)
                mask = row_mask & (cols < n_cols)[None, :]
                grad_y, g, x, xhat, a, derivative = _load_gradients(
                    grad_y_rows, x_rows, gate_rows, rstd, cols, mask, CASTING, GATE_LAST, SIGMOID
                )
                if partial_ptr is not None:
                    add_weight_gradient(partial_row, g, xhat, cols, n_cols, dtype, CASTING)
                if weight_ptr is not None:
                    g *= load_weight(weight_ptr, cols, n_cols, offset)
                _store_gradients(
                    grad_x_rows, grad_gate_rows, grad_y, g, x, xhat, a, derivative, rstd, mean, weight_ptr, cols,
                    n_cols, offset, mask, dtype, CASTING, GATE_LAST,
                )  # fmt: skip
            # In the next iteration another thread may load these elements of the partial.
            tl.debug_barrier()

    if WHOLE_ROW and partial_ptr is not None:
        tl.store(partial_row + all_cols, tl.sum(grad_weight, 0), mask=all_cols < n_cols)


# --- launchers ----------------------------------------------------------------------------------------------


def _groups(x, group_size):
    """(columns of a group, groups per row)."""
    n_cols = x.shape[-1] if group_size is None else group_size
    return n_cols, 1 if group_size is None else x.shape[-1] // group_size


def rms_norm_gated(
    x, gate, weight, eps=1e-6, offset=0.0, casting_mode="llama", group_size=None, norm_before_gate=True,
    activation="silu",
):  # fmt: skip
    op = "rms_norm_gated"
    require_dtype(op, "x", x)
    y, (n_cols, groups) = torch.empty_like(x), _groups(x, group_size)
    n_rows = x.shape[:-1].numel()
    shape = x.shape[:-1] if group_size is None else (*x.shape[:-1], groups)
    rstd = torch.empty(shape, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return y, rstd.fill_(float("nan"))
    y_rows, y_stride = output_rows(y)
    block_rows, block_cols, whole = forward_tile(n_cols, x)
    with on_device_of(x):
        gated_forward_kernel[(triton.cdiv(n_rows, block_rows) * groups,)](
            *rows_of(x), *rows_of(gate), dense_vector(weight), y_rows, y_stride, rstd, n_rows, n_cols, groups, eps,
            offset, casting_mode, norm_before_gate, activation == "sigmoid", block_rows, block_cols, whole,
            num_warps=warps_for(block_rows * block_cols),
        )  # fmt: skip
    write_back(y, y_rows)
    return y, rstd


def rms_norm_gated_backward(
    grad_y, x, gate, weight, rstd, offset, casting_mode, group_size, norm_before_gate, activation,
    need_grad_x, need_grad_gate, need_grad_weight,
):  # fmt: skip
    op = "rms_norm_gated_backward"
    require_dtype(op, "x", x)
    n_cols, groups = _groups(x, group_size)
    grad_x = torch.empty_like(x) if need_grad_x else x.new_empty(0)
    grad_gate = torch.empty_like(gate) if need_grad_gate else gate.new_empty(0)
    need_grad_weight = need_grad_weight and weight is not None
    like = x if weight is None else weight
    if x.numel() == 0 or not (need_grad_x or need_grad_gate or need_grad_weight):
        return grad_x, grad_gate, like.new_zeros(x.shape[-1] if need_grad_weight else 0)
    n_rows = x.numel() // x.shape[-1]
    rstd = rstd.contiguous()
    grad_x_rows, grad_x_stride = output_rows(grad_x) if need_grad_x else (None, 0)
    grad_gate_rows, grad_gate_stride = output_rows(grad_gate) if need_grad_gate else (None, 0)
    # The programs of all groups together are resident. Three inputs are read before and after the reduction
    # of the row, for which the pipeline has up to ten buffers of a tile: as many as for five inputs.
    plan = backward_plan(n_rows, x, inputs=5, n_cols=n_cols, groups=groups)
    grad_weight = like.new_empty(x.shape[-1] if need_grad_weight else 0)
    partial = plan.partials(1, x) if need_grad_weight else None
    with on_device_of(x):
        gated_backward_kernel[(plan.programs * groups,)](
            *rows_of(grad_y), *rows_of(x), *rows_of(gate), dense_vector(weight), rstd, grad_x_rows, grad_x_stride,
            grad_gate_rows, grad_gate_stride, partial, n_rows, n_cols, groups, offset, casting_mode, norm_before_gate,
            activation == "sigmoid", *plan.tile, plan.stages, num_warps=plan.warps,
        )  # fmt: skip
        if need_grad_weight:
            sum_partials(partial, [grad_weight])
    if need_grad_x:
        write_back(grad_x, grad_x_rows)
    if need_grad_gate:
        write_back(grad_gate, grad_gate_rows)
    return grad_x, grad_gate, grad_weight
