# SPDX-License-Identifier: BSD-3-Clause
"""Grouped GEMMs: one product per group of consecutive rows.

``ends`` (groups,) int32 on the device of the rows: the end of every group; the first group starts at row 0,
and rows after the last end belong to no group. ``torch.nn.functional.grouped_mm`` does the work where it can.
For bfloat16 on compute capability 9.0 and 10.0 that is one kernel without a host synchronisation; for other
dtypes and devices torch reads ``ends`` on the host and runs one GEMM per group. What it refuses (float64,
strides that are no multiple of 16 bytes, 1024 groups and more) runs in the same way here. In a CUDA graph
capture the host can read nothing: then every matrix multiplies all rows, which is correct and slow.
"""

import torch

_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))
# The alignment of TMA, which torch also demands on a CPU.
_ALIGNMENT = 16
# One thread of a single block prepares each group.
_MAX_GROUPS = 1023


def multiply_groups(rows, matrices, ends):
    """``rows[group] @ matrices[e]`` for every group e. Rows after the last group have unspecified values.

    Args:
        rows: (S, K), contiguous.
        matrices: (groups, K, N), any strides.
        ends: (groups,) int32.

    Returns:
        (S, N), contiguous.
    """
    served = _is_served(rows, matrices, len(ends)) and _is_aligned(matrices.shape[-1], matrices)
    if _must_not_synchronise(rows, served):
        return multiply_all(rows, matrices, ends)
    if served:
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    out = rows.new_empty(rows.shape[0], matrices.shape[-1])
    for group, block in enumerate(_blocks(ends)):
        torch.mm(rows[block], matrices[group], out=out[block])
    return out


def multiply_group_columns(a, b, ends):
    """``a[group].T @ b[group]`` for every group: the gradient of the matrices of :func:`multiply_groups`.

    Args:
        a, b: (S, M) and (S, N), contiguous.
        ends: (groups,) int32.

    Returns:
        (groups, M, N), contiguous; zero for a group without rows.
    """
    # torch's kernel takes groups without rows only if the first operand is column-major and the second
    # row-major.
    served = _is_served(a.t(), b, len(ends))
    if _must_not_synchronise(a, served):
        return multiply_all_columns(a, b, ends)
    if served:
        return torch.nn.functional.grouped_mm(a.t(), b, offs=ends)
    out = a.new_empty(len(ends), a.shape[1], b.shape[1])
    for group, block in enumerate(_blocks(ends)):
        torch.mm(a[block].t(), b[block], out=out[group])
    return out


def sum_groups(rows, ends, factors=None):
    """The sum of the rows of every group, each row times its factor.

    A GEMM with the factors as one operand, because its groups need no host synchronisation and no atomics.
    Factors that are wider than the rows are split into two parts of the dtype of the rows.

    Args:
        rows: (S, N), contiguous.
        ends: (groups,) int32.
        factors: (S,) of any floating dtype, or None for ones.

    Returns:
        (groups, N), contiguous, in the dtype of rows.
    """
    parts = rows.new_zeros(rows.shape[0], _ALIGNMENT // min(rows.element_size(), 8))
    if factors is None:
        parts[:, 0] = 1
        return multiply_group_columns(parts, rows, ends)[:, 0].contiguous()
    high, low = split(factors, rows.dtype)
    parts[:, 0], parts[:, 1] = high, low
    sums = multiply_group_columns(parts, rows, ends)
    return sums[:, 0] + sums[:, 1]


def split(values, dtype):
    """(high, low) of a dtype: ``high + low`` is the value, to twice the precision of the dtype."""
    high = values.to(dtype)
    low = (values - high.to(values.dtype)).to(dtype)
    # Where high overflows, the difference would turn an infinity into NaN.
    return high, low.masked_fill_(high.isinf(), 0)


def _is_served(a, b, groups):
    return (
        a.dtype in _DTYPES
        and a.device.type in ("cpu", "cuda")
        and groups <= _MAX_GROUPS
        and _has_strides(a)
        and _has_strides(b)
    )


def _is_aligned(elements, tensor):
    return elements * tensor.element_size() % _ALIGNMENT == 0


def _has_strides(matrix):
    """True if rows or columns are contiguous, and every row or column, and every matrix, begins at 16
    bytes."""
    rows, columns = matrix.shape[-2:]
    row, column = matrix.stride()[-2:]
    row_major = column == 1 and row >= columns and _is_aligned(row, matrix)
    column_major = row == 1 and column >= rows and _is_aligned(column, matrix)
    return (
        min(matrix.shape) > 0
        and (row_major or column_major)
        and all(_is_aligned(stride, matrix) for stride in matrix.stride()[:-2])
        and matrix.data_ptr() % _ALIGNMENT == 0
    )


def _must_not_synchronise(rows, served):
    """True if the stream is captured and torch has no single kernel for these operands."""
    if not rows.is_cuda or not torch.cuda.is_current_stream_capturing():
        return False
    one_kernel = rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device)[0] in (9, 10)
    return not (served and one_kernel)


def multiply_all(rows, matrices, ends):
    """:func:`multiply_groups` without a read of ``ends`` on the host."""
    out = rows.new_zeros(rows.shape[0], matrices.shape[-1])
    for group, inside in enumerate(_masks(rows, ends)):
        out = torch.where(inside, torch.mm(rows, matrices[group]), out)
    return out


def multiply_all_columns(a, b, ends):
    """:func:`multiply_group_columns` without a read of ``ends`` on the host."""
    out = a.new_empty(len(ends), a.shape[1], b.shape[1])
    for group, inside in enumerate(_masks(a, ends)):
        # Both operands: zero times NaN in a row of another group would be NaN.
        torch.mm(a.masked_fill(~inside, 0).t(), b.masked_fill(~inside, 0), out=out[group])
    return out


def _masks(rows, ends):
    """For every group the mask of its rows, (S, 1)."""
    row = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    return [(row >= starts[group]) & (row < ends[group]) for group in range(len(ends))]


def _blocks(ends):
    """The rows of every group. Reads ``ends`` on the host."""
    start = 0
    for end in ends.tolist():
        yield slice(start, end)
        start = end
