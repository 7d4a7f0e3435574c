# SPDX-License-Identifier: BSD-3-Clause
"""Iteration over a tensor in blocks of rows, which bounds the size of float32 temporaries."""

import torch

# Elements of a float32 temporary: 512 KiB per thread fit the caches of a CPU, 128 MiB occupy a GPU.
_CPU_BLOCK = 1 << 17
_GPU_BLOCK = 1 << 25


def row_blocks(x, start=0, stop=None):
    """Slices that cover rows ``start`` to ``stop`` of x, each with a bounded number of elements or one
    row."""
    stop = x.shape[0] if stop is None else stop
    row = x[:1].numel()
    elements = _CPU_BLOCK * torch.get_num_threads() if x.device.type == "cpu" else _GPU_BLOCK
    step = max(1, elements // max(1, row))
    return (slice(begin, min(begin + step, stop)) for begin in range(start, stop, step))
