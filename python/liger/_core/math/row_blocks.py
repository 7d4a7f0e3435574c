# SPDX-License-Identifier: BSD-3-Clause
"""Iteration over a tensor in blocks of rows, which bounds the size of float32 temporaries."""

import torch

# Elements of a float32 temporary: 512 KiB per thread fit the caches of a CPU, 128 MiB occupy a GPU.
_CPU_BLOCK = 1 << 17
_GPU_BLOCK = 1 << 25


def row_blocks(x):
    """Slices that cover the rows of x, each with a bounded number of elements or one row."""
    rows, row = x.shape[0], x[:1].numel()
    elements = _CPU_BLOCK * torch.get_num_threads() if x.device.type == "cpu" else _GPU_BLOCK
    step = max(1, elements // max(1, row))
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))
