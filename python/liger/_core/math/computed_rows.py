# SPDX-License-Identifier: BSD-3-Clause
"""The rows of a batch that an lm_head computes: all, or all that are not ignored.

Both kinds have one interface, so :func:`computed_rows` alone asks which it is. ``at`` selects the rows of a
chunk in a tensor of all rows: a slice of all, or an index of valid rows. ``tensor[at]`` is a view of the one
and a copy of the other, and so the two differ in where a gradient of the hidden states is written.
"""

import torch


def row_chunks(rows, step, first=None):
    """Slices of ``step`` rows; the first slice has ``first`` rows if that is given."""
    begin, length = 0, first or step
    while begin < rows:
        end = min(begin + max(length, 1), rows)
        yield slice(begin, end)
        begin, length = end, step


def ignored_rows(target, ignore_index):
    """Mask of the targets that are ``ignore_index``, compared in 64 bits as in all kernels.

    torch compares in the dtype of the target, where a number beyond int32 is the value of another class.
    """
    if target.dtype == torch.int32 and not -(2**31) <= ignore_index < 2**31:
        return torch.zeros_like(target, dtype=torch.bool)
    return target == ignore_index


class AllRows:
    """All rows are computed. ``any_ignored``: False if it is known that no row is ignored."""

    index: torch.Tensor | None = None  # of the computed rows; None: all

    def __init__(self, target, ignore_index, any_ignored=True):
        self.count = target.shape[0]
        self._target, self._ignore_index, self._any_ignored = target, ignore_index, any_ignored

    def at(self, chunk):
        """The index of a slice of the computed rows in a tensor of all rows."""
        return chunk

    def chunks(self, rows, memory):
        """Yields (index of its rows, its part of the memory for logits) for each chunk of ``rows`` rows."""
        for chunk in row_chunks(self.count, rows):
            yield self.at(chunk), memory[: chunk.stop - chunk.start]

    def of(self, x, at):
        """The rows of a chunk of x."""
        return x[at]

    def ignored(self, at):
        """(rows of the chunk,) mask of ignored rows; None: no row is ignored."""
        return ignored_rows(self._target[at], self._ignore_index) if self._any_ignored else None

    def clear(self, gradient):
        """Writes zeros to the rows of a gradient that are not computed."""

    def memory(self, gradient, at, x):
        """Memory for the gradient of the rows x of a chunk."""
        return gradient[at]

    def from_memory(self, gradient, at, memory):
        """Moves what was written to :meth:`memory` to its rows of the gradient."""

    def write(self, gradient, at, values):
        """Rounds values to the rows of a gradient."""
        gradient[at] = values


class ValidRows(AllRows):
    """Only the rows with these indices are computed. None of them is ignored."""

    def __init__(self, index):
        self.count, self.index = index.numel(), index

    def at(self, chunk):
        return self.index[chunk]

    def ignored(self, at):
        return None

    def clear(self, gradient):
        gradient.zero_()

    def memory(self, gradient, at, x):
        return x  # a copy, which its gradient may overwrite

    def from_memory(self, gradient, at, memory):
        gradient.index_copy_(0, at, memory)

    def write(self, gradient, at, values):
        gradient.index_copy_(0, at, values.to(gradient.dtype))


def computed_rows(target, ignore_index, skip):
    """:class:`AllRows`, or with ``skip`` :class:`ValidRows` if some row is ignored.

    With ``skip`` the host waits for the device to count the rows, except under CUDA graph capture, where all
    rows are computed. The caller therefore first launches and allocates what does not depend on the number.
    """
    if skip and not (target.is_cuda and torch.cuda.is_current_stream_capturing()):
        index = (~ignored_rows(target, ignore_index)).nonzero().squeeze(1)
        if index.numel() < target.shape[0]:
            return ValidRows(index)
        return AllRows(target, ignore_index, any_ignored=False)
    return AllRows(target, ignore_index)
