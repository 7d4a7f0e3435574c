# SPDX-License-Identifier: BSD-3-Clause
"""Plans of the wgmma engine of compute capability 9.0, with the fields of csrc/lm_head/sm90/planner.h."""

from typing import NamedTuple

import torch

from ..runtime import load  # noqa: F401  registers torch.ops.liger.plan_constants

# The dtypes that the engine takes.
ENGINE_DTYPES = (torch.bfloat16, torch.float16)


class EngineConstants(NamedTuple):
    """Constants of csrc/lm_head/sm90/sizes.h, csrc/lm_head/planner.h and csrc/experts/sm90/schedule.h.

    ``hidden_unit`` divides the hidden sizes that the engine takes, of at least ``min_rows`` rows and with a
    softcap of at most ``max_softcap``. From ``full_speed_rows`` rows on cuBLAS reaches its full speed. A tile
    has ``tile_rows`` rows, the tiles of a cluster have ``cluster_rows``; the logits GEMM has tiles of
    ``logits_tile`` classes, each with a sum per row, and writes panels of ``panel`` classes. ``kept_numbers``
    float32 numbers of a row are kept for the backward of log-probabilities; the ranks of a sharded vocabulary
    exchange ``rank_numbers`` of a row. The GEMMs of a mixture take at most ``max_experts`` experts, in tiles
    of ``expert_columns`` columns. ``grad_*_widths``: the columns that tiles of a gradient can have.
    """

    hidden_unit: int
    min_rows: int
    max_softcap: int
    full_speed_rows: int
    tile_rows: int
    cluster_rows: int
    logits_tile: int
    panel: int
    kept_numbers: int
    rank_numbers: int
    rank_numbers_with_metrics: int
    max_experts: int
    expert_columns: int
    grad_input_widths: tuple[int, ...]
    grad_weight_widths: tuple[int, ...]

    @classmethod
    def read(cls):
        given = dict(field.split("=") for field in torch.ops.liger.plan_constants())
        numbers = {name: tuple(map(int, value.split(","))) for name, value in given.items()}
        return cls(**{name: n if name.endswith("_widths") else n[0] for name, n in numbers.items()})


ENGINE = EngineConstants.read()


def round_up(size, multiple):
    return -(-size // multiple) * multiple


class PlannedChunk(NamedTuple):
    """A chunk of rows, and the split-K of its input gradient."""

    first: int
    rows: int
    k_splits: int


class LinearCePlan(NamedTuple):
    """The chunks of rows, and the layout of the weight gradient's memory and of the panel workspace.

    The exponentials of the first ``rows_in_grad_weight`` rows use the memory of the weight gradient, all
    others the panel workspace, of ``workspace_panel_bytes`` per panel of 128 classes. From the second chunk
    on a panel starts with ``scale_bytes`` of block scales. Both buffers are longer by ``panel_offset``
    panels.
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

    ``slice_rows`` rows of a chunk have auxiliary logits at a time. ``first_*`` belong to the first chunk,
    which has at least ``chunk_rows`` rows.
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
    """:class:`LinearCePlan` of ``torch.ops.liger.plan_chunks_sm90``; without chunks if the engine cannot run
    the call."""
    first, rows, k_splits, *header = torch.ops.liger.plan_chunks_sm90(*problem, **options)
    return LinearCePlan(*header, tuple(map(PlannedChunk, first, rows, k_splits)))
