# SPDX-License-Identifier: BSD-3-Clause
"""The gated activation of grouped_experts: gate and up in one tensor, halves or interleaved, clamped or not.

Beside the activation the backward multiplies by the routing weight of each row, and sums the product of each
row times its gradient, which is the gradient of that weight. One program per row: every element is loaded by
the thread that overwrites it.
"""

import torch
import triton
import triton.language as tl

from .common import on_device_of
from .gated import activated


@triton.jit
def _gate(gate, up, alpha, limit, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, EXACT: tl.constexpr):
    """(value of gate, its derivative, value of up, derivative of that). Comparisons keep NaN, unlike
    minimum."""
    gate_slope, up_slope = 1.0, 1.0
    if CLAMPED:
        gate_slope = tl.where(gate > limit, 0.0, 1.0)
        up_slope = tl.where(tl.abs(up) > limit, 0.0, 1.0)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if ACTIVATION == "gpt_oss":
        sigmoid = tl.sigmoid(alpha * gate)
        value = gate * sigmoid
        slope = sigmoid + alpha * value * (1.0 - sigmoid)
        up += 1.0
    else:
        value, slope = activated(gate, ACTIVATION, EXACT)
    return value, slope * gate_slope, up, up_slope


@triton.jit(do_not_specialize=["alpha", "limit"])
def expert_product_kernel(
    gate_up_ptr, out_ptr, n_cols, alpha, limit, column_stride, up_offset,
    ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        source = gate_up_ptr + row * (2 * n_cols) + cols * column_stride
        gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + up_offset, mask=mask, other=0.0).to(tl.float32)
        value, _, up, _ = _gate(gate, up, alpha, limit, ACTIVATION, CLAMPED, dtype == tl.float32)
        tl.store(out_ptr + row * n_cols + cols, (value * up).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["alpha", "limit"])
def expert_backward_kernel(
    grad_ptr, gate_up_ptr, weight_ptr, sum_ptr, n_cols, alpha, limit, column_stride, up_offset,
    ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + row).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        source = gate_up_ptr + row * (2 * n_cols) + cols * column_stride
        gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + up_offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        value, slope, up, up_slope = _gate(gate, up, alpha, limit, ACTIVATION, CLAMPED, dtype == tl.float32)
        product, weighted = value * up, weight * grad
        total += tl.where(mask, product * grad, 0.0)
        tl.store(source, (weighted * up * slope).to(dtype), mask=mask)
        tl.store(source + up_offset, (weighted * value * up_slope).to(dtype), mask=mask)
        tl.store(grad_ptr + row * n_cols + cols, (weight * product).to(dtype), mask=mask)
    tl.store(sum_ptr + row, tl.sum(total, 0))


def _arguments(gate, intermediate):
    """(alpha, limit, stride between columns of gate, offset of up, activation, whether it clamps, block of
    columns)"""
    clamped = gate.limit is not None
    # At least an element per thread: copies in other threads might be read after they are overwritten.
    block = min(triton.next_power_of_2(max(intermediate, 128)), 1024)
    strides = (2, 1) if gate.is_interleaved else (1, intermediate)
    return gate.alpha, gate.limit if clamped else 0.0, *strides, gate.activation, clamped, block


def product(gate_up, gate):
    """(rows, I): the product of a contiguous (rows, 2I); ``gate`` has the options."""
    rows, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, intermediate)
    with on_device_of(gate_up):
        expert_product_kernel[(rows,)](gate_up, out, intermediate, *_arguments(gate, intermediate))
    return out


def backward_(grad, gate_up, weights, gate):
    """Overwrites gate_up with its gradient times the weight of the row, and ``grad``, the gradient of the
    product, with the product times that weight. Returns the sums over I of product times gradient, (rows,)
    float32."""
    rows, intermediate = grad.shape
    sums = torch.empty(rows, dtype=torch.float32, device=grad.device)
    with on_device_of(grad):
        expert_backward_kernel[(rows,)](
            grad, gate_up, weights, sums, intermediate, *_arguments(gate, intermediate)
        )
    return sums
