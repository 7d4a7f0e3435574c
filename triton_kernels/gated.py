# SPDX-License-Identifier: BSD-3-Clause
"""Gated products, ``activation(gate) * up``, forward and backward, with gate and up separate or packed in one
tensor.

Elementwise kernels in float32, one program per tile. The packed form passes views of the two halves of each
row to the same kernels. The backward recomputes the activation; no intermediate of the forward is saved.
"""

import torch
import triton
import triton.language as tl

from .common import elementwise_tile, on_device_of, output_rows, require_dtype, rows_of, tile_at, write_back

# --- activations and their derivatives ----------------------------------------------------------------------


@triton.jit
def normal_tail(x):
    """(cdf(-abs(x)) of the standard normal distribution, exp(-x^2 / 2)), as in
    csrc/activation/activations.cuh."""
    exponential = tl.exp2(x * x * -0.72134752044448170)
    t = 1.0 / (1.0 + 0.36 * tl.abs(x))
    total = -0.180753289 + 0.0473450943 * t
    total = 0.18229955 + total * t
    total = 0.0256226914 + total * t
    total = 0.140057747 + total * t
    total = 0.141710631 + total * t
    total = 0.143717437 + total * t
    return total * t * exponential, exponential


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """(value, derivative). EXACT: to float32 accuracy; otherwise with an error far below one 16-bit
    rounding."""
    if ACTIVATION == "gelu":
        if EXACT:
            cdf = 0.5 + 0.5 * tl.math.erf(x * 0.70710678118654752)
            exponential = tl.exp(-0.5 * x * x)
        else:
            tail, exponential = normal_tail(x)
            cdf = tl.where(x < 0, tail, 1.0 - tail)
        value, slope = x * cdf, cdf + x * (0.39894228040143268 * exponential)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z), which does not cancel; 1.5957... is 2 * sqrt(2 / pi). The
        # derivative of the sigmoid is computed without 1 - sigmoid, whose cancellation error the factor x^3
        # would amplify.
        square = x * x
        twice_z = x * (1.5957691216057308 + 0.07135481627260025 * square)
        exponential = tl.exp(-tl.abs(twice_z))
        reciprocal = 1.0 / (1.0 + exponential)
        sigmoid = tl.where(twice_z < 0, exponential, 1.0) * reciprocal
        value = x * sigmoid
        slope = (
            x * (exponential * reciprocal * reciprocal) * (1.5957691216057308 + 0.21406444881780073 * square)
        )
        slope += sigmoid
    else:
        tl.static_assert(ACTIVATION == "silu")
        sigmoid = tl.sigmoid(x)
        value = x * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid)
    return value, slope


# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_rows"])
def forward_kernel(
    gate_ptr, gate_stride, up_ptr, up_stride, out_ptr, out_stride, n_rows, n_cols,
    ACTIVATION: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    rows, cols, mask = tile_at(tl.program_id(0), n_rows, n_cols, BLOCK_ROWS, BLOCK_COLS)
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + rows * up_stride + cols, mask=mask).to(tl.float32)
    value, _ = activated(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
    tl.store(out_ptr + rows * out_stride + cols, (value * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def backward_kernel(
    grad_out_ptr, grad_out_stride, gate_ptr, gate_stride, up_ptr, up_stride,
    grad_gate_ptr, grad_gate_stride, grad_up_ptr, grad_up_stride, product_ptr, product_stride, n_rows, n_cols,
    ACTIVATION: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    rows, cols, mask = tile_at(tl.program_id(0), n_rows, n_cols, BLOCK_ROWS, BLOCK_COLS)
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    grad_out = tl.load(grad_out_ptr + rows * grad_out_stride + cols, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + rows * up_stride + cols, mask=mask).to(tl.float32)
    value, slope = activated(gate, ACTIVATION, dtype == tl.float32)
    # The gradients may overwrite gate and up: each element is loaded above by the thread that stores it.
    tl.store(grad_gate_ptr + rows * grad_gate_stride + cols, (grad_out * up * slope).to(dtype), mask=mask)
    tl.store(grad_up_ptr + rows * grad_up_stride + cols, (grad_out * value).to(dtype), mask=mask)
    if product_ptr is not None:
        tl.store(product_ptr + rows * product_stride + cols, (value * up).to(dtype), mask=mask)


# --- launchers ----------------------------------------------------------------------------------------------


def _halves(packed):
    half = packed.shape[-1] // 2
    return packed[..., :half], packed[..., half:]


def _forward(gate, up, out, activation):
    if out.numel() == 0:
        return out
    n_cols = gate.shape[-1]
    n_rows = gate.numel() // n_cols
    gate, gate_stride = rows_of(gate)
    up, up_stride = rows_of(up)
    out_rows, out_stride = output_rows(out)
    block_rows, block_cols, tiles = elementwise_tile(n_rows, n_cols)
    with on_device_of(gate):
        forward_kernel[(tiles,)](
            gate, gate_stride, up, up_stride, out_rows, out_stride, n_rows, n_cols,
            activation, block_rows, block_cols,
        )  # fmt: skip
    write_back(out, out_rows)
    return out


def _backward(op, grad_out, gate, up, grad_gate, grad_up, product, activation):
    if gate.numel() == 0:
        return
    n_cols = gate.shape[-1]
    n_rows = gate.numel() // n_cols
    in_place = grad_gate is gate
    grad_out, grad_out_stride = rows_of(grad_out)
    gate, gate_stride = rows_of(gate)
    up, up_stride = rows_of(up)
    grad_gate_rows, grad_gate_stride = (gate, gate_stride) if in_place else output_rows(grad_gate)
    grad_up_rows, grad_up_stride = (up, up_stride) if in_place else output_rows(grad_up)
    product_rows, product_stride = (None, 0) if product is None else output_rows(product)
    block_rows, block_cols, tiles = elementwise_tile(n_rows, n_cols)
    with on_device_of(gate):
        backward_kernel[(tiles,)](
            grad_out, grad_out_stride, gate, gate_stride, up, up_stride, grad_gate_rows, grad_gate_stride,
            grad_up_rows, grad_up_stride, product_rows, product_stride, n_rows, n_cols,
            activation, block_rows, block_cols,
        )  # fmt: skip
    write_back(grad_gate, grad_gate_rows)
    write_back(grad_up, grad_up_rows)
    if product is not None:
        write_back(product, product_rows)


def _packed_product(gate_up):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


# --- the ops of a family, for one activation ----------------------------------------------------------------


def product(op, gate, up, activation):
    require_dtype(op, "gate", gate)
    return _forward(gate, up, torch.empty_like(gate), activation)


def backward(op, grad_out, gate, up, emit_product, activation):
    require_dtype(op, "gate", gate)
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    product = torch.empty_like(gate) if emit_product else None
    _backward(op, grad_out, gate, up, grad_gate, grad_up, product, activation)
    return grad_gate, grad_up, gate.new_empty(0) if product is None else product


def backward_(op, grad_out, gate, up, activation):
    require_dtype(op, "gate", gate)
    _backward(op, grad_out, gate, up, gate, up, None, activation)


def backward_product_(op, grad_out, gate, up, activation):
    require_dtype(op, "gate", gate)
    _backward(op, grad_out, gate, up, gate, up, grad_out, activation)


def packed_product(op, gate_up, activation):
    require_dtype(op, "gate_up", gate_up)
    return _forward(*_halves(gate_up), _packed_product(gate_up), activation)


def packed_backward(op, grad_out, gate_up, emit_product, activation):
    require_dtype(op, "gate_up", gate_up)
    grad_gate_up = torch.empty_like(gate_up)
    product = _packed_product(gate_up) if emit_product else None
    _backward(op, grad_out, *_halves(gate_up), *_halves(grad_gate_up), product, activation)
    return grad_gate_up, gate_up.new_empty(0) if product is None else product


def packed_backward_(op, grad_out, gate_up, activation):
    require_dtype(op, "gate_up", gate_up)
    gate, up = _halves(gate_up)
    _backward(op, grad_out, gate, up, gate, up, None, activation)
