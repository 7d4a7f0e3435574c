# SPDX-License-Identifier: BSD-3-Clause
"""Tiles and grids of the row norms, and the sum of the partials of their parameter gradients.

Forward grid: one program per tile of whole rows. Backward grid: persistent programs; each accumulates the
parameter gradients of its rows in float32 in its own partial, and :func:`sum_partials` adds the partials in a
fixed order. No atomics, so results are bitwise reproducible.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .common import shared_memory_per_sm, sm_count, warps_for

# Tile sizes are limited by registers: one tile in the forward, about four float32 tiles in the backward.
_FORWARD_BYTES = 65536
_BACKWARD_ELEMENTS = 16384
# Shared memory per program that is not available to tiles, in bytes: 1024 reserved by CUDA, and scratch of
# reductions.
_RESERVED_SMEM = 1536
_TILE = 2048


@triton.jit
def load_float(rows_ptr, cols, mask):
    return tl.load(rows_ptr + cols[None, :], mask=mask, other=0.0).to(tl.float32)


# The helpers below follow the casting modes of rms_norm and rms_norm_gated.


@triton.jit
def load_weight(weight_ptr, cols, n_cols, offset):
    return tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :] + offset


@triton.jit
def round_xhat(xhat, dtype: tl.constexpr, CASTING: tl.constexpr):
    return xhat if CASTING == "gemma" else xhat.to(dtype).to(tl.float32)


@triton.jit
def inverse_rms(square_sum, n_cols, eps, dtype: tl.constexpr, CASTING: tl.constexpr):
    rstd = tl.rsqrt(square_sum / n_cols + eps)
    return rstd.to(dtype).to(tl.float32) if CASTING == "none" else rstd


@triton.jit
def add_weight_gradient(partial_row, g, xhat, cols, n_cols, dtype: tl.constexpr, CASTING: tl.constexpr):
    """Adds the gradient of the weight of a tile to the partial of this program, which was initialised to
    zero.

    The threads need a barrier before the next sum over the same columns.
    """
    grad_weight = tl.load(partial_row + cols, mask=cols < n_cols, other=0.0)
    grad_weight += tl.sum(g * round_xhat(xhat, dtype, CASTING), 0)
    tl.store(partial_row + cols, grad_weight, mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_partials"])
def sum_partials_kernel(
    partial_ptr, out_ptr, other_ptr, n_partials, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """partial (n_partials, gradients, n_cols). Grid: (blocks of columns, gradients)."""
    gradient = tl.program_id(1)
    if other_ptr is not None:  # noqa: SIM102
        if gradient == 1:  # nested: other_ptr is a constexpr None if there is one gradient
            out_ptr = other_ptr
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in range(0, n_partials, BLOCK_ROWS):
        rows = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        mask = (rows < n_partials)[:, None] & (cols < n_cols)[None, :]
        total += load_float(
            partial_ptr + (rows[:, None] * tl.num_programs(1) + gradient) * n_cols, cols, mask
        )
    tl.store(out_ptr + cols, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=cols < n_cols)


def sum_partials(partial, grads):
    """Sums (programs, gradients, H) over the programs into the one or two given gradients of one dtype."""
    programs, _, n_cols = partial.shape
    sum_partials_kernel[(triton.cdiv(n_cols, 32), len(grads))](
        partial, grads[0], grads[1] if len(grads) > 1 else None, programs, n_cols, 256, 32, num_warps=8
    )


def parameter_grads(x, weight, bias, need_weight, need_bias):
    """(grad_weight, grad_bias, a list of those that are needed), uninitialised."""

    def of(parameter, need):
        return (x if parameter is None else parameter).new_empty(parameter.shape[0] if need else 0)

    grads = of(weight, need_weight), of(bias, need_bias)
    return *grads, [grad for grad, need in zip(grads, (need_weight, need_bias), strict=True) if need]


def _tile(n_cols, largest):
    """(BLOCK_ROWS, BLOCK_COLS, WHOLE_ROW): a tile has several short rows, one row, or a part of a row."""
    block = min(triton.next_power_of_2(n_cols), largest)
    return max(1, _TILE // block), block, n_cols <= block


def _backward_plan(elements, whole, bytes_per_element, shared):
    """(num_warps, programs per SM, num_stages).

    As many programs as fit by registers, about 120 per thread, so that all are resident (persistent). Two
    tiles are prefetched if shared memory holds them; three, and one, were measured to be slower than two and
    none.

    Args:
        elements: of a tile.
        whole: whether a tile has whole rows.
        bytes_per_element: of all inputs together.
        shared: bytes of shared memory per SM.
    """
    warps = warps_for(elements)
    programs_per_sm = max(16 // warps, 1)
    prefetch = whole and 2 * elements * bytes_per_element <= shared // programs_per_sm - _RESERVED_SMEM
    return warps, programs_per_sm, 3 if prefetch else 1


def forward_tile(n_cols, x):
    """(BLOCK_ROWS, BLOCK_COLS, WHOLE_ROW) of the forward."""
    return _tile(n_cols, _FORWARD_BYTES // x.element_size())


@dataclass(frozen=True)
class BackwardPlan:
    tile: tuple[int, int, bool]  # BLOCK_ROWS, BLOCK_COLS, WHOLE_ROW
    warps: int
    stages: int
    programs: int

    def partials(self, gradients, x):
        """Partials (programs, gradients, n_cols); zeros if rows have several tiles, which accumulate in
        memory."""
        allocate = torch.empty if self.tile[2] else torch.zeros
        return allocate(self.programs, gradients, x.shape[-1], dtype=torch.float32, device=x.device)


def backward_plan(n_rows, x, inputs, n_cols=None, groups=1):
    """The :class:`BackwardPlan` for ``inputs`` input tensors of the size of x; for one of ``groups`` groups
    of ``n_cols`` columns, which share the SMs."""
    block_rows, block_cols, whole = _tile(n_cols or x.shape[-1], _BACKWARD_ELEMENTS)
    # Two rows per tile amortise the cost of an iteration, as far as 16 warps have registers for them.
    block_rows = max(block_rows, min(2, 8192 // block_cols))
    warps, programs_per_sm, stages = _backward_plan(
        block_rows * block_cols, whole, inputs * x.element_size(), shared_memory_per_sm(x)
    )
    programs = min(max(programs_per_sm * sm_count(x) // groups, 1), triton.cdiv(n_rows, block_rows))
    return BackwardPlan((block_rows, block_cols, whole), warps, stages, programs)
