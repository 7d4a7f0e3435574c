"""How tiled_mlp cuts its tokens into shards, and of how many shards it keeps the activations.

A pure function of sizes, dtype and budget, the same on every rank of a job. Ranks with different numbers of tokens may
get different plans, which is safe: nothing is communicated inside a shard.
docs/performance/tiled_mlp.md derives the numbers.
"""

import os
from typing import NamedTuple

import torch

# Adding a shard to the float32 sums of the weight gradients costs 179 / rows of the time of its products on an H200:
# 2 % here. docs/performance/tiled_mlp.md has the figures.
FULL_SPEED_ROWS = 8192
# What a tile of a GEMM covers. A shard of fewer rows would only be slower.
TILE_ROWS = 128


class Tiles(NamedTuple):
    """``shards`` of ``shard_rows`` rows, but for one that may have fewer. Of the last ``kept_rows`` rows, all or whole
    shards, gate and up are kept."""

    shard_rows: int
    shards: int
    kept_rows: int


def _ceil_div(a, b):
    return -(-a // b)


def _equal(rows, shards):
    """Rows of each of so many equal shards, in whole tiles where that leaves the number of shards as it is."""
    equal = _ceil_div(rows, shards)
    whole = _ceil_div(equal, TILE_ROWS) * TILE_ROWS
    return whole if _ceil_div(rows, whole) == shards and whole < rows else equal


def _budget(given):
    if given is not None or not os.environ.get("LIGER_MEMORY_BUDGET"):
        return given
    return torch.ops.liger.default_memory_budget()


def plan_tiles(rows, hidden, intermediate, element_size, num_shards=None, memory_budget=None, keep=True):
    """The :class:`Tiles` for x of ``rows`` tokens.

    ``memory_budget`` is for what the op holds at its peak beyond its inputs, its result and the gradients in their
    dtype: kept activations, the working memory of one shard, and what float32 sums of the weight gradients take more
    than the gradients. None is ``LIGER_MEMORY_BUDGET`` or, where that is not set, what shards of 8192 tokens need.
    With ``num_shards`` and no budget nothing is kept, and without ``keep`` never.
    """
    if rows == 0:
        return Tiles(0, 0, 0)
    row = (
        3 * intermediate * element_size
    )  # gate and up, whose gradients take their place, and the hidden gradient
    sums = 3 * hidden * intermediate * (4 - element_size) if element_size < 4 and keep else 0
    if num_shards is not None:
        shard_rows = _equal(rows, num_shards)
        if memory_budget is None:
            return Tiles(shard_rows, _ceil_div(rows, shard_rows), 0)
        budget = memory_budget
    else:
        budget = _budget(memory_budget)
        if budget is None:
            budget = sums + row * FULL_SPEED_ROWS
        if row * rows <= budget:
            # One shard needs no sum, and its kept activations no more than the working memory they turn into.
            return Tiles(rows, 1, rows if keep else 0)
        most = max((budget - sums) // (row * TILE_ROWS), 1) * TILE_ROWS
        shard_rows = _equal(rows, _ceil_div(rows, most))
    shards = _ceil_div(rows, shard_rows)
    if not keep:
        return Tiles(shard_rows, shards, 0)
    # Of a row that is kept gate and up, and once for the shard at work its hidden gradient. The first kept shard is the
    # working memory of the others when it is done.
    kept = (budget - (sums if shards > 1 else 0) - shard_rows * (row // 3)) // (shard_rows * (row - row // 3))
    return Tiles(shard_rows, shards, min(max(kept, 0) * shard_rows, rows))
