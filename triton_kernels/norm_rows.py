"""How norms spread rows over programs, and how the gradients of their parameters are summed.

A program of a forward normalises a tile of whole rows. In a backward a fixed number of programs share the rows; each
sums the gradients of the parameters in float32 in rows of its own, and :func:`sum_partials` adds up those rows in a
fixed order: no atomics, same bits every time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .common import multiprocessors, shared_memory, warps_for

# A forward tile lives in registers once; the backward keeps about four float32 tiles at a time.
_FORWARD_BYTES = 65536
_BACKWARD_ELEMENTS = 16384
# Shared memory of a program that no tile can have: 1024 bytes of the system, and what reductions take.
_NOT_FOR_TILES = 1536
_TILE = 2048


@triton.jit
def load_float(rows_ptr, cols, mask):
    return tl.load(rows_ptr + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n_partials"])
def sum_partials_kernel(
    partial_ptr, out_ptr, other_ptr, n_partials, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """partial (n_partials, gradients, n_cols); the second dimension of the grid is that of the gradients."""
    gradient = tl.program_id(1)
    if other_ptr is not None:  # noqa: SIM102
        if gradient == 1:  # an if of its own: there may be no such pointer
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
    """(gradient of the weight, gradient of the bias, those of the two that are needed), to be written."""

    def of(parameter, need):
        return (x if parameter is None else parameter).new_empty(parameter.shape[0] if need else 0)

    grads = of(weight, need_weight), of(bias, need_bias)
    return *grads, [grad for grad, need in zip(grads, (need_weight, need_bias), strict=True) if need]


def _tile(n_cols, largest):
    """(rows, columns, whole row) of a tile: several short rows share a program."""
    block = min(triton.next_power_of_2(n_cols), largest)
    return max(1, _TILE // block), block, n_cols <= block


def _backward_plan(elements, whole, bytes_per_element, shared):
    """(warps, programs per multiprocessor, stages) for tiles of so many elements and input bytes, with so many bytes of
    shared memory on a multiprocessor.

    As many programs as fit by their registers, about 120 to a thread, so that all run from start to end; and two tiles
    loaded ahead where the shared memory holds them. A third one made it slower, and one alone was slower than none.
    """
    warps = warps_for(elements)
    at_once = max(16 // warps, 1)
    two_ahead = whole and 2 * elements * bytes_per_element <= shared // at_once - _NOT_FOR_TILES
    return warps, at_once, 3 if two_ahead else 1


def forward_tile(n_cols, x):
    """(rows, columns, whole row) of a tile of the forward."""
    return _tile(n_cols, _FORWARD_BYTES // x.element_size())


@dataclass(frozen=True)
class BackwardPlan:
    tile: tuple  # rows, columns, whole row
    warps: int
    stages: int
    programs: int

    def partials(self, gradients, x):
        """Memory for the parts of so many gradients. Programs that walk over a row add to theirs."""
        allocate = torch.empty if self.tile[2] else torch.zeros
        return allocate(self.programs, gradients, x.shape[-1], dtype=torch.float32, device=x.device)


def backward_plan(n_rows, x, inputs):
    """For ``inputs`` tensors of the size of x that are read."""
    block_rows, block_cols, whole = _tile(x.shape[-1], _BACKWARD_ELEMENTS)
    # Two rows share what a step costs, as far as 16 warps have registers for them.
    block_rows = max(block_rows, min(2, 8192 // block_cols))
    warps, at_once, stages = _backward_plan(
        block_rows * block_cols, whole, inputs * x.element_size(), shared_memory(x)
    )
    programs = min(at_once * multiprocessors(x), triton.cdiv(n_rows, block_rows))
    return BackwardPlan((block_rows, block_cols, whole), warps, stages, programs)
