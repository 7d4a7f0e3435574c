# SPDX-License-Identifier: BSD-3-Clause
"""The valid rows of a batch, those whose target is not ignored: their index, a gather, and the inverse
scatter.

Valid row j is row ``index[j] >= j`` of the batch. Their number reaches the host by an asynchronous copy,
which overlaps with other work of the device. Grids: one program builds the index; the scatter has one program
per strip of columns.
"""

import torch
import triton
import triton.language as tl

from .._core.runtime.environment import triton_interpreted
from .common import on_device_of

# The time of the interpreter is per tile, not per element.
_EXPAND_ROWS = 1024 if triton_interpreted() else 256
_EXPAND_COLUMNS = 32


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def index_kernel(target_ptr, index_ptr, position_ptr, counts_ptr, n_rows, ignore_index, BLOCK: tl.constexpr):
    """One program. counts: (number of valid rows, number of rows before the first ignored one)."""
    valid_rows = 0
    leading_rows = n_rows
    for start in range(0, n_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mask = rows < n_rows
        target = tl.load(target_ptr + rows, mask=mask, other=0)
        valid = mask & (target != ignore_index)
        flag = valid.to(tl.int32)
        position = valid_rows + tl.cumsum(flag, 0) - flag
        tl.store(index_ptr + position, rows, mask=valid)
        tl.store(position_ptr + rows, tl.where(valid, position, -1), mask=mask)
        leading_rows = tl.minimum(leading_rows, tl.min(tl.where(mask & (flag == 0), rows, n_rows), 0))
        valid_rows += tl.sum(flag, 0)
    tl.store(counts_ptr, valid_rows)
    tl.store(counts_ptr + 1, leading_rows)


@triton.jit(do_not_specialize=["n_rows"])
def expand_rows_kernel(x_ptr, position_ptr, n_rows, n_cols, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Scatters valid rows in place. A program handles a strip of columns from the last row to the first.

    The source of a row is never below it, so no later iteration reads a row that this one writes. Within an
    iteration the barrier separates loads from stores.
    """
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    col_mask = cols < n_cols
    for start in range(0, n_rows, ROWS):
        rows = (n_rows - 1 - start - tl.arange(0, ROWS)).to(tl.int64)
        position = tl.load(position_ptr + rows, mask=rows >= 0, other=-1).to(tl.int64)[:, None]
        values = tl.load(x_ptr + position * n_cols + cols, mask=(position >= 0) & col_mask, other=0.0)
        tl.debug_barrier()
        tl.store(x_ptr + rows[:, None] * n_cols + cols, values, mask=(rows[:, None] >= 0) & col_mask)


class ValidRows:
    """The valid rows of a batch. Call :meth:`wait` before reading ``count``, ``leading_rows`` and ``index``.

    Attributes:
        rows: number of rows of the batch.
        position: (rows,) int32, the position of each row among the valid ones, -1 for ignored rows.
        count: number of valid rows.
        leading_rows: number of rows before the first ignored one.
        index: (count,) int32, the rows of the batch.
    """

    def __init__(self, target, ignore_index):
        self.rows = target.shape[0]
        # Zeros: rows may be gathered before the host knows the count, so the entries past it must be valid
        # indices.
        self._all_index = target.new_zeros(self.rows, dtype=torch.int32)
        self.position = torch.empty_like(self._all_index)
        counts = target.new_empty(2, dtype=torch.int32)
        with on_device_of(target):
            index_kernel[(1,)](
                target, self._all_index, self.position, counts, self.rows, ignore_index, 4096, num_warps=8
            )
            self._event = None
            self._counts = counts
            if target.is_cuda:
                self._counts = torch.empty(2, dtype=torch.int32, pin_memory=True)
                self._counts.copy_(counts, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()

    def wait(self):
        """Waits for the copy of the counts to the host."""
        if self._event is not None:
            self._event.synchronize()
        self.count, self.leading_rows = self._counts.tolist()
        self.index = self._all_index[: self.count]

    def gather(self, x, first, count, out=None):
        """``count`` valid rows of x from valid row ``first`` on; past the last valid row, row 0 of x."""
        index = self._all_index[first : first + count]
        return torch.index_select(x, 0, index) if out is None else torch.index_select(x, 0, index, out=out)

    def expand_(self, x):
        """Moves the valid rows from the start of x (contiguous) to their rows of the batch; other rows become
        0."""
        columns = x.shape[1]
        if x.numel() > 0:
            with on_device_of(x):
                expand_rows_kernel[(triton.cdiv(columns, _EXPAND_COLUMNS),)](
                    x, self.position, self.rows, columns, _EXPAND_ROWS, _EXPAND_COLUMNS, num_warps=8
                )
