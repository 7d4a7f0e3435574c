"""Rows whose target is ignored are left out: the list of the others, and rows moved by it.

Row j of the compacted rows is row ``index[j] >= j`` of the batch. The host learns their number by a copy that runs
while the device has other work.
"""

import torch
import triton
import triton.language as tl

from ..backend import triton_interpreted
from .common import on_device_of

# The interpreter takes its time per tile, not per element.
_EXPAND_ROWS = 1024 if triton_interpreted() else 256
_EXPAND_COLUMNS = 32


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def list_rows_kernel(
    target_ptr, index_ptr, position_ptr, numbers_ptr, n_rows, ignore_index, BLOCK: tl.constexpr
):
    """One program. numbers: the valid rows, and the rows before the first ignored one."""
    valid_rows = 0
    leading_rows = n_rows
    for start in range(0, n_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mask = rows < n_rows
        target = tl.load(target_ptr + rows, mask=mask, other=0)
        valid = mask & (target != ignore_index)
        one = valid.to(tl.int32)
        at = valid_rows + tl.cumsum(one, 0) - one
        tl.store(index_ptr + at, rows, mask=valid)
        tl.store(position_ptr + rows, tl.where(valid, at, -1), mask=mask)
        leading_rows = tl.minimum(leading_rows, tl.min(tl.where(mask & (one == 0), rows, n_rows), 0))
        valid_rows += tl.sum(one, 0)
    tl.store(numbers_ptr, valid_rows)
    tl.store(numbers_ptr + 1, leading_rows)


@triton.jit(do_not_specialize=["n_rows"])
def expand_rows_kernel(x_ptr, position_ptr, n_rows, n_cols, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A strip of columns, from the last row to the first. A row comes from a lower one or from itself, so what a round
    writes is read by no later round; within a round all reads come first."""
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = cols < n_cols
    for start in range(0, n_rows, ROWS):
        rows = (n_rows - 1 - start - tl.arange(0, ROWS)).to(tl.int64)
        position = tl.load(position_ptr + rows, mask=rows >= 0, other=-1).to(tl.int64)[:, None]
        values = tl.load(x_ptr + position * n_cols + cols, mask=(position >= 0) & inside, other=0.0)
        tl.debug_barrier()
        tl.store(x_ptr + rows[:, None] * n_cols + cols, values, mask=(rows[:, None] >= 0) & inside)


class Compaction:
    """The valid rows of a batch; :meth:`wait` before ``valid_rows``, ``leading_rows`` and ``index`` are used."""

    def __init__(self, target, ignore_index):
        self.rows = target.shape[0]
        # Zeros, because rows are gathered before it is known where the list ends.
        self._all_index = target.new_zeros(self.rows, dtype=torch.int32)
        self.position = torch.empty_like(self._all_index)
        numbers = target.new_empty(2, dtype=torch.int32)
        with on_device_of(target):
            list_rows_kernel[(1,)](
                target, self._all_index, self.position, numbers, self.rows, ignore_index, 4096, num_warps=8
            )
            self._done = None
            self._numbers = numbers
            if target.is_cuda:
                self._numbers = torch.empty(2, dtype=torch.int32, pin_memory=True)
                self._numbers.copy_(numbers, non_blocking=True)
                self._done = torch.cuda.Event()
                self._done.record()

    def wait(self):
        if self._done is not None:
            self._done.synchronize()
        self.valid_rows, self.leading_rows = self._numbers.tolist()
        self.index = self._all_index[: self.valid_rows]

    def gather(self, x, first, count, out=None):
        """The compacted rows from ``first`` on; any row of x beyond the valid ones."""
        index = self._all_index[first : first + count]
        return torch.index_select(x, 0, index) if out is None else torch.index_select(x, 0, index, out=out)

    def expand_(self, x):
        """The compacted rows at the start of x (contiguous) move to where they belong; ignored ones become zeros."""
        columns = x.shape[1]
        if x.numel() > 0:
            with on_device_of(x):
                expand_rows_kernel[(triton.cdiv(columns, _EXPAND_COLUMNS),)](
                    x, self.position, self.rows, columns, _EXPAND_ROWS, _EXPAND_COLUMNS, num_warps=8
                )
