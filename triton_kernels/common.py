"""What the ops share: dtype checks, rows of strided tensors, tiles, launch sizes.

A row is the last dimension of a tensor. Kernels take tensors whose rows are dense and evenly spaced, as a pointer and
one row stride; everything else is copied before (inputs) or after (outputs).
"""

import functools

import torch
import triton
import triton.language as tl

from ..backend import triton_interpreted

# Elements of a tile: on a GPU 8 for each of 128 threads. The interpreter takes its time per tile, not per element.
_TILE = 16384 if triton_interpreted() else 1024
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_dtype(op, name, tensor):
    """Raises RuntimeError for a dtype that the kernels do not compute: in practice float64."""
    if tensor.dtype not in _DTYPES:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise RuntimeError(
            f"{op}: {name} has dtype {dtype}, expected float16, bfloat16 or float32 on the triton backend "
            "(LIGER_BACKEND=torch computes float64)"
        )


def require_same_shape(op, name, tensor, other_name, other):
    """For arguments that only autograd passes, and that would be read out of bounds if they were too small."""
    if tensor.shape != other.shape:
        raise RuntimeError(
            f"{op}: {name} has shape {tuple(tensor.shape)}, expected that of {other_name}, {tuple(other.shape)}"
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
    """Brings what a kernel wrote to where it belongs."""
    if written is not out:
        out.copy_(written)


def dense_vector(tensor):
    """A one-dimensional tensor with stride 1, or None for None."""
    return None if tensor is None else tensor.contiguous()


@functools.lru_cache(None)
def _multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


def multiprocessors(tensor):
    """Streaming multiprocessors of the device of a tensor; under the interpreter a number that leaves several rows to
    a program even in small tests."""
    return _multiprocessors(tensor.device) if tensor.is_cuda else 2


@functools.lru_cache(None)
def _shared_memory(device):
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def shared_memory(tensor):
    """Bytes of shared memory of a multiprocessor of the device of a tensor; on the CPU the least of those supported."""
    return _shared_memory(tensor.device) if tensor.is_cuda else 102400


def elementwise_tile(n_rows, n_cols):
    """(rows per tile, columns per tile, tiles) for kernels that treat every element alone."""
    block_cols = min(triton.next_power_of_2(n_cols), 1024)
    block_rows = _TILE // block_cols
    return block_rows, block_cols, triton.cdiv(n_rows, block_rows) * triton.cdiv(n_cols, block_cols)


@triton.jit
def tile_at(index, n_rows, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """(row indices as a column, column indices as a row, mask) of a tile; tiles are numbered along the rows."""
    tiles_per_row = tl.cdiv(n_cols, BLOCK_COLS)
    rows = (index // tiles_per_row).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = (index % tiles_per_row) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    return rows, cols, (rows < n_rows) & (cols < n_cols)


def warps_for(elements):
    """Warps of a program over a tile: 16 elements per thread, as two 128-bit loads of a 2-byte dtype."""
    return min(max(elements // 512, 4), 32)


# Launches go to the current device. This makes it that of a tensor, and does nothing for a CPU tensor.
on_device_of = torch.cuda.device_of
