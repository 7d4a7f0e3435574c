# SPDX-License-Identifier: BSD-3-Clause
"""Helpers of all Triton twins: dtype checks, row strides, tiles, launch sizes.

A row is the last dimension of a tensor. A kernel takes a pointer and one row stride, so the rows must be
dense and evenly spaced. Other inputs are copied before the launch, other outputs after it.
"""

import functools

import torch
import triton
import triton.language as tl

from .._core.runtime.environment import triton_interpreted

# Elements of an elementwise tile: 8 per thread with 4 warps. The time of the interpreter is per tile, not per
# element.
_TILE = 16384 if triton_interpreted() else 1024
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_dtype(op, name, tensor):
    """Raises RuntimeError for a dtype that the kernels do not support, such as float64."""
    if tensor.dtype not in _DTYPES:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise RuntimeError(
            f"{op}: {name} has dtype {dtype}, expected float16, bfloat16 or float32 on the triton backend "
            "(LIGER_BACKEND=torch computes float64)"
        )


def require_same_shape(op, name, tensor, other_name, other):
    """Checks arguments that only autograd passes: a kernel would read smaller ones out of bounds."""
    if tensor.shape != other.shape:
        raise RuntimeError(
            f"{op}: {name} has shape {tuple(tensor.shape)}, expected the shape of {other_name}, {tuple(other.shape)}"
        )


def row_stride(x):
    """Elements from one row of x to the next, or None if the rows are not dense or not evenly spaced."""
    if x.is_contiguous():
        return x.shape[-1]
    *sizes, columns = x.shape
    *strides, column_stride = x.stride()
    if column_stride != 1 and columns != 1:
        return None
    row = expected = None
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if row is None:
            row = stride
        elif stride != expected:
            return None
        expected = stride * size
    return columns if row is None else row


def rows_of(x):
    """(tensor, row stride) with the values of x: x itself where its rows allow it, else a contiguous copy.

    A kernel that writes into the result must be followed by :func:`write_back`.
    """
    stride = row_stride(x)
    return (x.contiguous(), x.shape[-1]) if stride is None else (x, stride)


def output_rows(out):
    """(tensor, row stride) to write the rows of ``out`` into, followed by :func:`write_back`."""
    stride = row_stride(out)
    return (out.new_empty(out.shape), out.shape[-1]) if stride is None else (out, stride)


def write_back(out, written):
    """Copies the output of a kernel to ``out``, unless the kernel wrote to it directly."""
    if written is not out:
        out.copy_(written)


def dense_vector(tensor):
    """A one-dimensional tensor with stride 1, or None for None."""
    return None if tensor is None else tensor.contiguous()


@functools.lru_cache(None)
def _sm_count(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


def sm_count(tensor):
    """Number of SMs of the device of a tensor. 2 under the interpreter, so that programs of small tests get
    several rows."""
    return _sm_count(tensor.device) if tensor.is_cuda else 2


@functools.lru_cache(None)
def _shared_memory_per_sm(device):
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def shared_memory_per_sm(tensor):
    """Bytes of shared memory per SM of the device of a tensor; for CPU tensors the smallest of all supported
    GPUs."""
    return _shared_memory_per_sm(tensor.device) if tensor.is_cuda else 102400


def elementwise_tile(n_rows, n_cols):
    """(BLOCK_ROWS, BLOCK_COLS, number of tiles) of an elementwise kernel."""
    block_cols = min(triton.next_power_of_2(n_cols), 1024)
    block_rows = _TILE // block_cols
    return block_rows, block_cols, triton.cdiv(n_rows, block_rows) * triton.cdiv(n_cols, block_cols)


@triton.jit
def tile_at(index, n_rows, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """(row offsets [BLOCK_ROWS, 1], column offsets [1, BLOCK_COLS], mask) of a tile; tiles are in row-major
    order."""
    tiles_per_row = tl.cdiv(n_cols, BLOCK_COLS)
    rows = (index // tiles_per_row).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = (index % tiles_per_row) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    return rows, cols, (rows < n_rows) & (cols < n_cols)


def warps_for(elements):
    """num_warps for a tile: 16 elements per thread, two 128-bit loads of a 2-byte dtype."""
    return min(max(elements // 512, 4), 32)


# Triton launches on the current device. This context manager makes the device of a tensor current; it has no
# effect for CPU tensors.
on_device_of = torch.cuda.device_of
