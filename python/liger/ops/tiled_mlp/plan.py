# SPDX-License-Identifier: BSD-3-Clause
"""The plan of tiled_mlp: its shards of tokens, the tokens whose gate and up are saved, and the memory of each
shard.

Pure functions of sizes, dtype and budget. Ranks with different numbers of tokens may get different plans,
which is safe because shards do not communicate. docs/lab/tiled_mlp.md derives the numbers.
"""

import os
from typing import NamedTuple

import torch

# Adding a shard to the float32 sums of the weight gradients takes 179 / rows of the time of its GEMMs on an
# H200: 2 % with the largest shards, 4 % with the smallest that the default budget gives.
MAX_ROWS = 8192
DEFAULT_ROWS = 4096
# Rows of a GEMM tile. Shards with fewer rows would only be slower.
TILE = 128


class Problem(NamedTuple):
    """Sizes of one call: ``packed`` means that one weight holds gate and up."""

    rows: int
    hidden: int
    intermediate: int
    element_size: int
    packed: bool = False

    @property
    def row(self):
        """Bytes of a row of gate, of up, or of the hidden gradient."""
        return self.intermediate * self.element_size

    @property
    def x(self):
        """Bytes of x, of its gradient, or of the result."""
        return self.rows * self.hidden * self.element_size

    @property
    def weight(self):
        """Bytes of gate_weight, up_weight or down_weight."""
        return self.hidden * self.row

    @property
    def sums(self):
        """Bytes of the float32 sums of the weight gradients, less the bytes of the gradients."""
        return 3 * self.hidden * self.intermediate * max(4 - self.element_size, 0)


class Tiles(NamedTuple):
    """The shards of one call.

    Attributes:
        forward_rows: maximum number of rows of a shard in the forward.
        shard_rows: maximum number of rows of a shard in the backward.
        kept_rows: the forward keeps gate and up of so many rows, the first ones.
        spare_rows: 0, or the rows of a spare buffer for the hidden gradient. Then the backward uses the
            memory of the kept activations for its temporaries and for the gradient of x (see
            :func:`lay_out`).
    """

    forward_rows: int
    shard_rows: int
    kept_rows: int
    spare_rows: int = 0

    def has_one(self, rows):
        """True if a backward of so many rows is a single shard, which needs no sums of weight gradients."""
        return self.shard_rows >= rows and not self.spare_rows


class Step(NamedTuple):
    """One shard of the backward: rows ``start`` to ``stop``.

    Attributes:
        gate_up: offset of its gate and up in the memory of the kept activations, in elements.
        hidden: offset of its hidden gradient in the same memory; None: the spare buffer.
    """

    start: int
    stop: int
    gate_up: int
    hidden: int | None


def _ceil_div(a, b):
    return -(-a // b)


def _equal_shard(rows, most):
    """Rows per shard for the minimum number of equal shards of at most ``most`` rows: whole tiles if that
    needs no more shards."""
    shards = _ceil_div(rows, most)
    equal = _ceil_div(rows, shards)
    whole = _ceil_div(equal, TILE) * TILE
    return whole if _ceil_div(rows, whole) == shards and whole < rows else equal


def _budget(given, default):
    if given is not None:
        return given
    return torch.ops.liger.default_memory_budget() if os.environ.get("LIGER_MEMORY_BUDGET") else default


def plan_tiles(problem, num_shards=None, memory_budget=None, keep=True):
    """The :class:`Tiles` of a :class:`Problem`.

    Args:
        problem: sizes of the call.
        num_shards: number of shards, or None. Without a budget no activations are kept then.
        memory_budget: bytes at the peak of the backward beyond inputs, result and gradients: activations and
            ``problem.sums``. None: ``LIGER_MEMORY_BUDGET`` or, if that is unset, the sums and the activations
            of 4096 tokens.
        keep: whether there is a backward.
    """
    rows, row = problem.rows, problem.row
    if rows == 0:
        return Tiles(0, 0, 0)
    most = MAX_ROWS if num_shards is None else _equal_shard(rows, _ceil_div(rows, num_shards))
    if num_shards is not None and memory_budget is None:
        joined = keep and _one_shard_fits(problem, _bytes_of_shards(problem, Tiles(most, most, 0)))
        return Tiles(most, rows if joined else most, 0)
    sums = problem.sums if keep else 0
    budget = _budget(memory_budget, sums + 3 * row * DEFAULT_ROWS)
    if num_shards is None and (_one_shard_fits(problem, budget) if keep else 3 * row * rows <= budget):
        return Tiles(rows, rows, rows if keep else 0)
    working = max((budget - sums) // (3 * row * TILE), 1) * (3 * row * TILE)
    fitting = min(working // (3 * row), most)
    if not keep or problem.intermediate < problem.hidden:
        equal = _equal_shard(rows, fitting)
        shards = Tiles(equal, equal, 0)
    else:
        # The gradient of x overwrites the kept activations. Beyond it: the spare buffer, and at least twice
        # as much. The product of a forward shard is no larger than the spare buffer, so the peak is in the
        # backward.
        kept = _ceil_div(problem.x + working - fitting * row, 2 * row)
        shards = Tiles(fitting, most, min(kept, rows), fitting)
    if keep and _one_shard_fits(problem, _bytes_of_shards(problem, shards)):
        return Tiles(rows if num_shards is None else most, rows, rows)
    return shards


def forward_step(problem, tiles):
    """Rows of a forward shard. Fewer than planned if gate, up and the product of a shard would need more
    memory than the gradients of the backward."""
    if tiles.kept_rows < problem.rows or tiles.spare_rows:
        return tiles.forward_rows
    most = (problem.x + 2 * problem.weight) // max(problem.row, 1)
    return tiles.forward_rows if most >= tiles.forward_rows else _equal_shard(problem.rows, most)


def block_columns(problem):
    """Columns of the hidden gradient that exist at a time in a backward of one shard.

    Each block of columns is a GEMM over the whole hidden size, and its columns of the gradient of down_weight
    are a sum over all tokens, so blocks add neither work nor error. A block is no larger than the gradients
    of x and of gate_weight, which are allocated after it; that is at least H columns.
    """
    rows, hidden, intermediate = problem[:3]
    room = hidden + hidden * intermediate * (2 if problem.packed else 1) // max(rows, 1)
    if room >= intermediate:
        return intermediate
    columns = _ceil_div(intermediate, _ceil_div(intermediate, room))
    return _rounded(columns, room) if columns > TILE else columns


def _one_shard_fits(problem, allowed):
    """True if a backward of one shard, which needs no sums, allocates at most ``allowed`` bytes beyond its
    results.

    Two comparisons instead of one with the maximum: with a dynamic number of tokens a maximum would add
    another guard to compiled code.
    """
    activations = problem.row * problem.rows  # gate, or up
    # Gate is freed before the gradient of up_weight is allocated, unless gate and up are one tensor.
    both = 2 * activations if problem.packed else 2 * activations - problem.weight
    return both <= allowed and activations <= allowed


def _bytes_of_shards(problem, tiles):
    """A lower bound of the bytes that a backward of several shards allocates beyond its results."""
    # After the last shard the first gradient exists together with its float32 sum.
    row, rounding = problem.row, problem.weight if problem.sums else 0
    if tiles.spare_rows:
        shared = 2 * row * tiles.kept_rows - problem.x
        return problem.sums + shared + max(row * tiles.spare_rows, rounding)
    second = min(tiles.shard_rows, problem.rows - tiles.shard_rows)
    return problem.sums + max(row * (2 * tiles.shard_rows + second), rounding)


def lay_out(rows, hidden, intermediate, tiles):
    """The list of :class:`Step` of a backward in the memory of the kept activations, for ``tiles`` with spare
    rows.

    At the end the gradient of x is at the beginning of that memory, which has
    ``kept_rows * 2 * intermediate`` elements. Rows are processed in order, so gradients never overwrite
    activations that are still needed:

    - kept row r is at offset r * 2I, and its gradient goes to offset r * H. The hidden gradient uses the gap
      between the written gradients and the next activations, or the spare buffer;
    - after the kept rows the end of the memory is free: gate and up of a shard are recomputed there. Shards
      become smaller as the gradient grows towards them.
    """
    memory = tiles.kept_rows * 2 * intermediate
    steps: list[Step] = []
    done = 0
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
            count = _ceil_div(left, 2)  # two equal shards at the end, not a full one and a tiny one
        if count < left and count > TILE:
            count = _rounded(count, min(max(in_spare, in_memory), tiles.shard_rows))
        count = min(count, left)
        gate_up = done * 2 * intermediate if done < tiles.kept_rows else memory - count * 2 * intermediate
        hidden_offset = None
        if count > in_spare:
            hidden_offset = written if done < tiles.kept_rows else gate_up - count * intermediate
        steps.append(Step(done, done + count, gate_up, hidden_offset))
        done += count
    return steps


def _rounded(count, most):
    """``count`` rounded to whole tiles: up if the result is at most ``most``, else down."""
    up = _ceil_div(count, TILE) * TILE
    return up if up <= most else up - TILE
