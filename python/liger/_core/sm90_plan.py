"""Plans of the wgmma engine of compute capability 9.0, with the fields of csrc/linear_ce/sm90/planner.h."""

import math
from typing import NamedTuple

import torch

# What the engine takes: hidden sizes that are divisible by kHiddenUnit of csrc/linear_ce/sm90/tile.h, and these dtypes.
HIDDEN_UNIT = 16
ENGINE_DTYPES = (torch.bfloat16, torch.float16)
# Classes per tile of the logits GEMM, each with a sum per row: kPingpongColumns there.
TILE_CLASSES = 192
# Rows of a tile of a gradient, and the columns that it can have: kTileM, kGradInputWidths and kGradWeightWidths there.
_TILE_ROWS = 128
GRAD_INPUT_WIDTHS = 256, 240, 224, 192, 320
GRAD_WEIGHT_WIDTHS = 256, 240, 224, 192


def tile_columns(hidden, widths):
    """Columns of the tiles of a gradient: tile_columns() there."""
    tiles = math.ceil(hidden / widths[0])
    enough = [width for width in widths if width <= widths[0] and tiles * width >= hidden]
    return next((width for width in widths if hidden % width == 0), min(enough))


def split_k_sum_bytes(rows, hidden):
    """Bytes of the float32 sums of serial split-K, in whole tiles: split_k_sums() there."""
    columns = tile_columns(hidden, GRAD_INPUT_WIDTHS)
    return 4 * math.ceil(rows / _TILE_ROWS) * _TILE_ROWS * math.ceil(hidden / columns) * columns


class PlannedChunk(NamedTuple):
    """A chunk of rows, and the split-K of its input gradient."""

    first: int
    rows: int
    k_splits: int


class LinearCePlan(NamedTuple):
    """The chunks of rows, and the layout of the weight gradient's memory and of the panel workspace.

    The exponentials of the first ``rows_in_grad_weight`` rows use the memory of the weight gradient, all others the
    panel workspace, of ``workspace_panel_bytes`` per panel of 128 classes. From the second chunk on a panel starts with
    ``scale_bytes`` of block scales. Both buffers are longer by ``panel_offset`` panels.
    """

    rows_in_grad_weight: int
    workspace_panel_bytes: int
    scale_bytes: int
    panel_offset: int
    chunks: tuple[PlannedChunk, ...]

    @classmethod
    def decode(cls, numbers):
        """The plan from a list of numbers as ``LinearCePlan::encode`` writes it."""
        header, rest = numbers[:4], iter(numbers[4:])
        return cls(*header, tuple(map(PlannedChunk._make, zip(rest, rest, rest, strict=True))))

    def encode(self):
        return [*self[:4], *(number for chunk in self.chunks for number in chunk)]


class LinearBackwardPlan(NamedTuple):
    """The plan of a loss whose dlogits is a matrix of its own; sizes in rows and bytes.

    ``slice_rows`` rows of a chunk have auxiliary logits at a time. ``first_*`` belong to the first chunk, which has at
    least ``chunk_rows`` rows.
    """

    first_rows: int
    first_k_splits: int
    chunk_rows: int
    slice_rows: int
    k_splits: int
    scale_bytes: int
    first_workspace_bytes: int
    workspace_bytes: int


def plan_chunks_sm90(*problem, **options):
    """:class:`LinearCePlan` of ``torch.ops.liger.plan_chunks_sm90``; without chunks if the engine cannot run the
    call."""
    first, rows, k_splits, *header = torch.ops.liger.plan_chunks_sm90(*problem, **options)
    return LinearCePlan(*header, tuple(map(PlannedChunk, first, rows, k_splits)))
