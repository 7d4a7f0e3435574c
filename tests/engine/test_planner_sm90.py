# SPDX-License-Identifier: BSD-3-Clause
"""How the engine of compute capability 9.0 cuts its rows: properties of the plans of many problems."""

import random

import pytest
import torch
from sm90_engine import BESIDE, HIDDEN_SIZES, PARTS_OF_CHUNKS, SHAPES, SUMS, SUMS_BF16

from liger._core.head.sm90_plan import ENGINE

GRAD_INPUT_WIDTHS, GRAD_WEIGHT_WIDTHS = ENGINE.grad_input_widths, ENGINE.grad_weight_widths
HIDDEN_UNIT = ENGINE.hidden_unit
MIB = 1 << 20
TILE = PANEL = 128  # rows; columns


def ceil_div(a, b):
    return -(-a // b)


def plan_sm90(*problem):
    """Chunks as (first, rows, k_splits), then rows_in_grad_weight, workspace_panel_bytes, scale_bytes,
    panel_offset."""
    first, rows, k_splits, *rest = torch.ops.liger.plan_chunks_sm90(*problem)
    return list(zip(first, rows, k_splits, strict=True)), *rest


def random_problems_sm90(count):
    """Rows, hidden, vocab, need_grad_input, need_grad_weight, exact, budget, clusters: of shapes that are
    taken."""
    draw = random.Random(0)
    for _ in range(count):
        rows = draw.choice([256, 257, 300, 1000, 8192, 16384, draw.randint(256, 40000)])
        partial = draw.random() < 0.4
        hidden = HIDDEN_UNIT * draw.randint(1, 6144 // HIDDEN_UNIT) if partial else 256 * draw.randint(1, 24)
        vocab = PANEL * draw.choice([1, 2, 3, 9, 33, 250, 1002, draw.randint(1, 1200)])
        if partial:
            vocab = max(vocab - draw.randint(0, PANEL), 1)
        needs = [draw.random() < 0.7 for _ in range(3)]
        budget = int(2 ** draw.uniform(16, 31))
        yield rows, hidden, vocab, *needs, budget, draw.choice([39, 57, 66])


SM90 = [(problem, plan_sm90(*problem)) for problem in random_problems_sm90(3000)]
TAKEN = [(problem, plan) for problem, plan in SM90 if plan[0]]


def test_the_largest_budget_of_64_bits():
    for rows in (256, 384, 8192):
        problem = rows, 4096, 128256, True, True, True
        assert plan_sm90(*problem, 2**63 - 1, 66) == plan_sm90(*problem, 2**50, 66)


def test_shapes_are_what_they_are_named():
    def kinds(shape):
        rows, k_splits, in_grad_weight, scale_bytes = shape.plan()
        return len(rows) > 1, in_grad_weight < rows[0], scale_bytes > 0, max(k_splits) > 1

    expected = {
        "in the weight gradient": (False, False, False, True),
        "beside it": (False, True, False, True),
        "sums": (True, True, True, True),
        "sums, larger": (True, True, True, True),
        "sums, whole waves": (True, False, True, False),
        "sums, more panels": (True, True, True, True),
        "bf16 allowed": (True, True, True, True),
        "parts": (False, False, False, True),
        "parts of chunks": (True, True, True, True),
        "fewest rows": (False, False, False, True),
        "one row more": (False, True, False, True),
        "some rows more": (False, True, False, True),
        "one panel": (False, True, False, True),
        "partial, in the weight gradient": (False, False, False, True),
        "partial, beside it": (False, True, False, True),
        "partial, sums": (True, True, True, True),
        "partial, sums, larger": (True, True, True, True),
        "partial, sums, whole waves": (True, True, True, False),
        "partial, sums, 224 columns": (True, True, True, True),
        "sums, 240 columns": (True, True, True, True),
        "partial, sums, 240 columns": (True, True, True, True),
        "sums, 192 columns": (True, True, True, True),
        "sums, 320 columns": (True, True, True, True),
        "parts, 320 columns": (False, False, False, True),
        "partial, parts, 320 columns": (False, False, False, True),
        "partial, 240 columns": (False, True, False, True),
        "partial, bf16 allowed": (True, True, True, True),
        "partial, parts": (False, True, False, True),
        "partial, few columns": (True, True, True, True),
        "partial, few classes": (False, True, False, False),
    }
    assert {name: kinds(shape) for name, shape in SHAPES.items() if name not in HIDDEN_SIZES} == expected
    # Each of them with a hidden size that is no multiple of 64, too.
    assert all({True, False} == set(kind) for kind in zip(*map(kinds, HIDDEN_SIZES.values()), strict=True))
    for shape in (BESIDE, SUMS, SHAPES["one panel"]):
        assert shape.vocab // 128 % 2, "the last pair of panels has one"
    for shape in (SUMS, SUMS_BF16, PARTS_OF_CHUNKS):
        assert shape.plan()[0][-1] % 128, "the last chunk ends within a tile"


def tile_columns(hidden, widths):
    """The first width that divides the hidden size; else the narrowest one with as few tiles as the first
    width has."""
    tiles = ceil_div(hidden, widths[0])
    enough = [width for width in widths if width <= widths[0] and tiles * width >= hidden]
    return next((width for width in widths if hidden % width == 0), min(enough))


def columns_by_width(hidden_sizes, widths):
    """The widths of tiles that divide one of the sizes, and those with a narrow last tile."""
    whole, narrow_last = set(), set()
    for hidden in hidden_sizes:
        width = tile_columns(hidden, widths)
        (narrow_last if hidden % width else whole).add(width)
    return whole, narrow_last


def test_shapes_have_sums_in_tiles_of_every_width():
    """Kernels of the weight gradient differ by the width of their tiles: none may be without a test."""
    several = [shape.hidden for shape in SHAPES.values() if len(shape.plan()[0]) > 1]
    whole, narrow_last = columns_by_width(several, GRAD_WEIGHT_WIDTHS)
    assert whole == set(GRAD_WEIGHT_WIDTHS) and narrow_last == {192, 224, 240, 256}


def test_shapes_have_split_k_in_tiles_of_every_width():
    """Nor may one of the input gradient, whose splits add to sums in whole tiles."""
    split = [shape.hidden for shape in SHAPES.values() if max(shape.plan()[1]) > 1]
    whole, narrow_last = columns_by_width(split, GRAD_INPUT_WIDTHS)
    assert whole | narrow_last == set(GRAD_INPUT_WIDTHS)


@pytest.mark.parametrize(
    ("hidden", "of_input", "of_weight"),
    [
        (640, 320, 224),
        (1152, 192, 192),
        (576, 192, 192),
        (2880, 240, 240),
        (896, 224, 224),
        (2560, 256, 256),
        (960, 240, 240),
        (3200, 320, 256),
        (1040, 224, 224),
        (16, 192, 192),
        (240, 240, 240),
        (304, 192, 192),
    ],
)
def test_tiles_divide_the_hidden_size_where_a_width_does(hidden, of_input, of_weight):
    assert tile_columns(hidden, GRAD_INPUT_WIDTHS) == of_input
    assert tile_columns(hidden, GRAD_WEIGHT_WIDTHS) == of_weight
    # Vectors of the hidden size are padded to tiles of 256 columns, and read by whole tiles.
    for width in (of_input, of_weight):
        assert ceil_div(hidden, width) * width <= ceil_div(hidden, 256) * 256


@pytest.mark.parametrize("hidden", [16, 304, 576, 640, 656, 960, 2880, 3200, 4096])
@pytest.mark.parametrize("rows", [1, 128, 1000])
def test_split_k_sums_are_whole_tiles(rows, hidden):
    columns = tile_columns(hidden, GRAD_INPUT_WIDTHS)
    tiles = ceil_div(rows, TILE) * ceil_div(hidden, columns)
    assert torch.ops.liger.plan_split_k_sums_sm90(rows, hidden, 2) == tiles * TILE * columns
    assert torch.ops.liger.plan_split_k_sums_sm90(rows, hidden, 1) == 0


def test_sm90_problems_are_of_every_kind():
    """One chunk, chunks whose weight gradients are summed, exactly or not, or not at all."""
    several = [problem for problem, (chunks, *_) in TAKEN if len(chunks) > 1]
    assert min(len(TAKEN) - len(several), sum(problem[4] and problem[5] for problem in several)) > 200
    assert sum(problem[4] and not problem[5] for problem in several) > 20
    assert sum(not problem[4] for problem in several) > 200
    assert {k_splits for _, plan in TAKEN for _, _, k_splits in plan[0]} >= set(range(1, 8))


def test_sm90_chunks_tile_the_rows():
    for problem, (chunks, *_) in TAKEN:
        at = 0
        for first, rows, _ in chunks:
            assert first == at and rows > 0, problem
            at += rows
        assert at == problem[0], problem
        assert all(rows % TILE == 0 for _, rows, _ in chunks[:-1]), problem
        later = [rows for _, rows, _ in chunks[1:]]
        assert all(rows == later[0] for rows in later[:-1]) and max(later, default=0) == sum(later[:1]), (
            problem
        )


def test_sm90_exponentials_have_room_where_the_plan_puts_them():
    for problem, (chunks, in_grad_weight, panel_bytes, scale_bytes, panel_offset) in TAKEN:
        _, hidden, _, _, need_grad_weight, *_ = problem
        # A panel of the weight gradient, 128 of its rows, holds 128 columns of as many rows as the hidden
        # size. Rows beyond them begin with a tile.
        fitting = hidden // TILE * TILE
        assert in_grad_weight == (min(fitting, chunks[0][1]) if need_grad_weight else 0), problem
        assert panel_offset > 0 if in_grad_weight else panel_offset == 0, problem
        beside = chunks[0][1] - in_grad_weight
        if beside:
            assert in_grad_weight % TILE == 0, "what lies beside begins with a tile"
        # Block scales of the first chunk overwrite exponentials that were read before only behind an offset.
        scales_beside = 0 if in_grad_weight else scale_bytes
        assert scales_beside + ceil_div(beside, TILE) * TILE * PANEL * 2 <= panel_bytes, problem
        for _, rows, _ in chunks[1:]:
            assert scale_bytes + rows * PANEL * 2 <= panel_bytes, problem
        scales = TILE * ceil_div(hidden, tile_columns(hidden, GRAD_WEIGHT_WIDTHS))
        assert scale_bytes == (scales if need_grad_weight and len(chunks) > 1 else 0), problem


def test_sm90_stays_in_the_budget():
    """Exponentials, or one tile of rows of them. With the sums of split-K no more than a sixteenth beyond
    it."""
    splits = 0
    for problem, (chunks, in_grad_weight, *_) in TAKEN:
        _, hidden, vocab, *_, budget, _ = problem
        for first, rows, k_splits in chunks:
            beside = rows - in_grad_weight if first == 0 else rows
            exponentials = beside * ceil_div(vocab, PANEL) * PANEL * 2
            assert exponentials <= budget or beside <= TILE, problem
            assert 1 <= k_splits <= min(24, ceil_div(vocab, 64)), problem
            if k_splits > 1:
                splits += 1
                assert exponentials + 4 * rows * hidden <= budget + budget // 16, problem
    assert splits > 200


def test_sm90_last_chunk_may_be_short():
    """Where whole waves of the others are worth more than equal chunks."""
    chunks, *_ = plan_sm90(8192, 2560, 151936, True, True, True, 512 * MIB, 66)
    rows = [count for _, count, _ in chunks]
    assert len(rows) > 2 and rows[-1] < rows[-2] == rows[1]
    short = sum(len(c) > 2 and c[-1][1] + TILE < c[-2][1] for _, (c, *_) in TAKEN)
    assert short > 50


def test_sm90_whole_budget_holds_exponentials():
    """Sums, scales and shifts are beside it: 1024 rows of 262144 classes are 512 MiB."""
    chunks, *_ = plan_sm90(8192, 640, 262144, True, True, True, 512 * MIB, 66)
    assert max(rows for _, rows, _ in chunks[1:]) == 1024


def test_sm90_parts_are_for_the_input_gradient():
    for problem, (chunks, *_) in TAKEN:
        if not problem[3]:
            assert all(k_splits == 1 for _, _, k_splits in chunks), problem


def test_sm90_leaves_to_the_generic_engine_only_what_it_says():
    for problem, (chunks, *rest) in SM90:
        if not chunks:
            assert rest == [0, 0, 0, 0] and problem[4] and not problem[5], problem
    for problem, (chunks, *_) in TAKEN:
        if problem[4] and not problem[5] and len(chunks) > 1:
            assert chunks[1][1] >= 1024, "with small chunks and a sum of bf16 the generic engine is faster"
    fits = (4096, 1024, 32000, True, True, True, 512 * MIB)
    assert plan_sm90(*fits)[0]

    def takes(position, size):
        return bool(plan_sm90(*fits[:position], size, *fits[position + 1 :])[0])

    assert not any(takes(0, rows) for rows in (0, 1, 255))
    assert not any(takes(1, hidden) for hidden in (0, 8, 1000, 1100))
    assert all(takes(1, hidden) for hidden in (16, 80, 640, 896, 1040, 1152, 2880, 2896))
    assert not takes(2, 0) and all(takes(2, vocab) for vocab in (1, 64, 32003, 50257))


def test_sm90_all_rows_at_once_with_a_large_budget():
    for problem, _ in SM90[:500]:
        chunks, in_grad_weight, panel_bytes, scale_bytes, _ = plan_sm90(*problem[:6], 1 << 40)
        assert len(chunks) == 1 and scale_bytes == 0, problem
        assert panel_bytes == ceil_div(problem[0] - in_grad_weight, TILE) * TILE * PANEL * 2, problem


def test_sm90_budget_comes_from_the_environment(monkeypatch):
    problem = (16384, 1024, 32000, True, True, True)
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "64M")
    assert plan_sm90(*problem) == plan_sm90(*problem, 64 * MIB) != plan_sm90(*problem, 512 * MIB)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({0: -1}, "must not be negative, got rows=-1 hidden=256 vocab=1024"),
        ({6: 0}, "memory_budget: expected a positive number of bytes, got 0"),
        ({7: 0}, "clusters is 0, expected at least 1"),
    ],
)
def test_sm90_bad_arguments(changed, words):
    problem = [300, 256, 1024, True, True, True, MIB, 66]
    for position, value in changed.items():
        problem[position] = value
    with pytest.raises(RuntimeError, match=words):
        plan_sm90(*problem)
