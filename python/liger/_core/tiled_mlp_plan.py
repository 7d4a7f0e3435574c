"""The plan of tiled_mlp: its shards of tokens, the tokens whose activations are saved, and the memory of each shard.

Pure functions of sizes, dtype and budget, the same on every rank of a job. Ranks with different numbers of tokens may
get different plans. That is safe, because no shard communicates. docs/performance/tiled_mlp.md derives the numbers.
"""

import os
from typing import NamedTuple

import torch

# Adding a shard to the float32 sums of the weight gradients takes 179 / rows of the time of its products on an H200:
# 2 % at the most that a shard gets, 4 % at the least that there is memory for by default.
MOST_ROWS = 8192
LEAST_ROWS = 4096
# What a tile of a GEMM covers. A shard of fewer rows would only be slower.
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
        """Bytes that float32 sums of the weight gradients take more than the gradients."""
        return 3 * self.hidden * self.intermediate * max(4 - self.element_size, 0)


class Tiles(NamedTuple):
    """Shards have at most ``forward_rows`` rows in the forward and ``shard_rows`` in the backward.

    Of the first ``kept_rows`` rows gate and up are kept. ``spare_rows`` > 0: the backward works in the memory of what
    was kept, where the gradient of x will be too, and in a spare buffer of so many rows of the hidden gradient (see
    :func:`lay_out`).
    """

    forward_rows: int
    shard_rows: int
    kept_rows: int
    spare_rows: int = 0

    def has_one(self, rows):
        """Whether a backward of so many rows is one shard, and no weight gradient a sum."""
        return self.shard_rows >= rows and not self.spare_rows


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
    whole = _ceil_div(equal, TILE) * TILE
    return whole if _ceil_div(rows, whole) == shards and whole < rows else equal


def _budget(given, default):
    if given is not None:
        return given
    return torch.ops.liger.default_memory_budget() if os.environ.get("LIGER_MEMORY_BUDGET") else default


def plan_tiles(problem, num_shards=None, memory_budget=None, keep=True):
    """The :class:`Tiles` of a :class:`Problem`.

    ``memory_budget`` is for what the op holds at its peak beyond its inputs, its result and the gradients in their
    dtype: activations, and what float32 sums of the weight gradients take more than the gradients. None is
    ``LIGER_MEMORY_BUDGET`` or, where that is not set, those sums and the activations of 4096 tokens. With
    ``num_shards`` and no budget nothing is kept. Without ``keep`` there is no backward.
    """
    rows, row = problem.rows, problem.row
    if rows == 0:
        return Tiles(0, 0, 0)
    most = MOST_ROWS if num_shards is None else _equal(rows, _ceil_div(rows, num_shards))
    if num_shards is not None and memory_budget is None:
        joined = keep and _one_shard_fits(problem, _held_by_shards(problem, Tiles(most, most, 0)))
        return Tiles(most, rows if joined else most, 0)
    sums = problem.sums if keep else 0
    budget = _budget(memory_budget, sums + 3 * row * LEAST_ROWS)
    if num_shards is None and (_one_shard_fits(problem, budget) if keep else 3 * row * rows <= budget):
        return Tiles(rows, rows, rows if keep else 0)
    working = max((budget - sums) // (3 * row * TILE), 1) * (3 * row * TILE)
    fitting = min(working // (3 * row), most)
    if not keep or problem.intermediate < problem.hidden:
        equal = _equal(rows, fitting)
        shards = Tiles(equal, equal, 0)
    else:
        # The gradient of x takes the place of what was kept. Beyond it: the spare buffer, and twice as much or more.
        # The product of a shard in the forward is no larger than the spare buffer, so that this is not the peak.
        kept = _ceil_div(problem.x + working - fitting * row, 2 * row)
        shards = Tiles(fitting, most, min(kept, rows), fitting)
    if keep and _one_shard_fits(problem, _held_by_shards(problem, shards)):
        return Tiles(rows if num_shards is None else most, rows, rows)
    return shards


def forward_step(problem, tiles):
    """Rows of a shard of the forward: fewer than planned where its product, beside all of gate and up, would make a
    higher peak than the gradients of the backward."""
    if tiles.kept_rows < problem.rows or tiles.spare_rows:
        return tiles.forward_rows
    most = (problem.x + 2 * problem.weight) // max(problem.row, 1)
    return tiles.forward_rows if most >= tiles.forward_rows else _equal(problem.rows, most)


def block_columns(problem):
    """Columns of the hidden gradient that exist at a time in a backward of one shard.

    A block of columns is a whole product over the hidden size, and its part of the gradient of down_weight a whole sum
    over tokens, so that blocks cost neither work nor exactness. A block is no larger than what takes its place beside
    gate and up: the gradients of x and of gate_weight. That is never less than H columns.
    """
    rows, hidden, intermediate = problem[:3]
    room = hidden + hidden * intermediate * (2 if problem.packed else 1) // max(rows, 1)
    if room >= intermediate:
        return intermediate
    columns = _ceil_div(intermediate, _ceil_div(intermediate, room))
    return _rounded(columns, room) if columns > TILE else columns


def _one_shard_fits(problem, allowed):
    """Whether a backward of one shard holds no more bytes beyond results and gradients. It needs no sums.

    Two comparisons, not one with the larger: compiled code with a dynamic number of tokens is then not told more about
    it than it must know.
    """
    activations = problem.row * problem.rows  # gate, or up
    # Gate goes before there is a gradient of up_weight, unless both are one tensor.
    both = 2 * activations if problem.packed else 2 * activations - problem.weight
    return both <= allowed and activations <= allowed


def _held_by_shards(problem, tiles):
    """The same of several shards, or less."""
    # When the shards are done, the first gradient exists beside its float32 sum.
    row, rounding = problem.row, problem.weight if problem.sums else 0
    if tiles.spare_rows:
        shared = 2 * row * tiles.kept_rows - problem.x
        return problem.sums + shared + max(row * tiles.spare_rows, rounding)
    second = min(tiles.shard_rows, problem.rows - tiles.shard_rows)
    return problem.sums + max(row * (2 * tiles.shard_rows + second), rounding)


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
        if count < left and count > TILE:
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
    up = _ceil_div(count, TILE) * TILE
    return up if up <= most else up - TILE
