"""How tiled_mlp cuts its tokens into shards, of how many tokens it keeps the activations, and what lies where.

Pure functions of sizes, dtype and budget, the same on every rank of a job. Ranks with different numbers of tokens may
get different plans, which is safe: nothing is communicated inside a shard.
docs/performance/tiled_mlp.md derives the numbers.
"""

import os
from typing import NamedTuple

import torch

# Adding a shard to the float32 sums of the weight gradients takes 179 / rows of the time of its products on an H200:
# 2 % at the most that a shard gets, 4 % at the least that there is memory for by default.
MOST_ROWS = 8192
LEAST_ROWS = 4096
# What a tile of a GEMM covers. A shard of fewer rows would only be slower.
TILE_ROWS = 128


class Tiles(NamedTuple):
    """Shards have at most ``shard_rows`` rows. Of the first ``kept_rows`` rows gate and up are kept.

    ``spare_rows`` > 0: the backward works in the memory of what was kept, where the gradient of x will be too, and in a
    spare buffer of so many rows of the hidden gradient (see :func:`lay_out`).
    """

    shard_rows: int
    kept_rows: int
    spare_rows: int = 0


class Step(NamedTuple):
    """One shard of the backward: rows ``start`` to ``stop``, and where in the memory of what was kept, in elements, its
    gate and up are and its hidden gradient goes (None: in the spare buffer)."""

    start: int
    stop: int
    gate_up: int
    hidden: int | None


def _ceil_div(a, b):
    return -(-a // b)


def _equal(rows, most):
    """Rows of each of equal shards of at most ``most`` rows, in whole tiles where that needs no more shards."""
    shards = _ceil_div(rows, most)
    equal = _ceil_div(rows, shards)
    whole = _ceil_div(equal, TILE_ROWS) * TILE_ROWS
    return whole if _ceil_div(rows, whole) == shards and whole < rows else equal


def _budget(given, default):
    if given is not None:
        return given
    return torch.ops.liger.default_memory_budget() if os.environ.get("LIGER_MEMORY_BUDGET") else default


def plan_tiles(rows, hidden, intermediate, element_size, num_shards=None, memory_budget=None, keep=True):
    """The :class:`Tiles` for x of ``rows`` tokens.

    ``memory_budget`` is for what the op holds at its peak beyond its inputs, its result and the gradients in their
    dtype: activations, and what float32 sums of the weight gradients take more than the gradients. None is
    ``LIGER_MEMORY_BUDGET`` or, where that is not set, those sums and the activations of 4096 tokens. With
    ``num_shards`` and no budget nothing is kept, and without ``keep`` never.
    """
    if rows == 0:
        return Tiles(0, 0)
    most = MOST_ROWS if num_shards is None else _equal(rows, _ceil_div(rows, num_shards))
    if num_shards is not None and memory_budget is None:
        return Tiles(most, 0)
    row = intermediate * element_size  # of gate, of up, or of the hidden gradient
    sums = 3 * hidden * intermediate * (4 - element_size) if element_size < 4 and keep else 0
    budget = _budget(memory_budget, sums + 3 * row * LEAST_ROWS)
    if num_shards is None and _one_shard(rows, hidden, intermediate, element_size, keep) <= budget:
        return Tiles(rows, rows if keep else 0)
    working = max((budget - sums) // (3 * row * TILE_ROWS), 1) * (3 * row * TILE_ROWS)
    fitting = min(working // (3 * row), most)
    if not keep or intermediate < hidden:
        return Tiles(_equal(rows, fitting), 0)
    # The gradient of x takes the place of what was kept. Beyond it: the spare buffer, and twice as much or more.
    kept = _ceil_div(rows * hidden * element_size + working - fitting * row, 2 * row)
    return Tiles(most, min(kept, rows), fitting)


def _one_shard(rows, hidden, intermediate, element_size, keep):
    """Bytes that one shard needs beyond results and gradients. It keeps everything, and needs no sums."""
    row = intermediate * element_size
    if not keep:
        return 3 * row * rows
    # While the hidden gradient exists, those of x, gate_weight and up_weight do not yet.
    missing = rows * hidden * element_size + 2 * hidden * row
    return max(2 * row * rows, 3 * row * rows - missing)


def lay_out(rows, hidden, intermediate, tiles):
    """The :class:`Step` list of a backward in the memory of what was kept, for ``tiles`` with spare rows.

    That memory, ``kept_rows * 2 * intermediate`` elements, ends up with the gradient of x at its beginning. Rows are
    done in order, so that written gradients never reach activations that are still needed:

    - of kept rows, row r lies at r * 2I and its gradient goes to r * H. The hidden gradient takes the gap between the
      gradients written and the next activations, or the spare buffer;
    - later the end of the memory is free: gate and up of a shard are computed there, and shards become smaller as the
      gradient grows towards them.
    """
    memory = tiles.kept_rows * 2 * intermediate
    steps, done = [], 0
    while done < rows:
        written = done * hidden
        if done < tiles.kept_rows:
            left = tiles.kept_rows - done
            in_spare = tiles.spare_rows
            in_memory = (done * 2 * intermediate - written) // intermediate
        else:
            left = rows - done
            free = memory - written
            # The gradient of the shard must not reach its own gate and up.
            in_spare = min(tiles.spare_rows, free // (2 * intermediate + hidden))
            in_memory = free // (3 * intermediate)
        count = min(max(in_spare, in_memory), tiles.shard_rows)
        if count < left < 2 * count:
            count = _ceil_div(left, 2)  # two equal ones at the end, not a full and a tiny one
        if count < left and count > TILE_ROWS:
            count = _rounded(count, min(max(in_spare, in_memory), tiles.shard_rows))
        count = min(count, left)
        gate_up = done * 2 * intermediate if done < tiles.kept_rows else memory - count * 2 * intermediate
        hidden_place = None
        if count > in_spare:
            hidden_place = written if done < tiles.kept_rows else gate_up - count * intermediate
        steps.append(Step(done, done + count, gate_up, hidden_place))
        done += count
    return steps


def _rounded(count, most):
    """Whole tiles: up if that is at most ``most``, else down."""
    up = _ceil_div(count, TILE_ROWS) * TILE_ROWS
    return up if up <= most else up - TILE_ROWS
