# SPDX-License-Identifier: BSD-3-Clause
"""How losses that make the gradient of logits by themselves are cut for the engine of compute capability
9.0."""

import random

import pytest
import torch

MIB, TILE = 1 << 20, 128


def plan(
    rows,
    hidden,
    vocab,
    needs=(True, True),
    aux_rows=4,
    budget=512 * MIB,
    clusters=66,
    aux_in_grad_weight=False,
):
    """(rows of the first chunk, its parts of the classes, rows of others, rows of a part, parts, bytes of
    units)"""
    return torch.ops.liger.plan_linear_backward_sm90(
        rows, hidden, vocab, *needs, aux_rows, budget, clusters, 1, aux_in_grad_weight
    )


def problems(count):
    draw = random.Random(0)
    for _ in range(count):
        needs = draw.choice([(True, True), (True, False), (False, True)])
        vocab = TILE * draw.choice([1, 2, 9, 250, 1002, draw.randint(1, 1200)])
        yield (
            draw.choice([256, 257, 1000, 8192, draw.randint(256, 40000)]), 256 * draw.randint(1, 24), vocab, needs,
            draw.choice([0, 2, 4, 6]), int(2 ** draw.uniform(22, 31)), draw.choice([39, 57, 66]),
        )  # fmt: skip


def test_memory_and_sizes():
    taken = grown = 0
    for rows, hidden, vocab, needs, aux_rows, budget, clusters in problems(400):
        even = plan(rows, hidden, vocab, needs, aux_rows, budget, clusters)
        first, first_parts, chunk, part, parts, units = even
        assert (first, first_parts) == (chunk, parts)
        if chunk == 0:
            # Not even the fewest rows of a part fit.
            assert (
                budget
                < (1 + aux_rows) * 2 * vocab * (256 + TILE) + 16 * max(vocab, rows) + vocab * hidden // 256
            )
            continue
        taken += 1
        assert 0 < part <= chunk <= rows
        assert chunk == rows or chunk % TILE == 0
        assert part == chunk or (part % TILE == 0 and part >= min(256, chunk))
        sums = 4 * chunk * hidden if parts > 1 else 0
        # The sums of split-K lie where the auxiliary logits were.
        assert chunk * 2 * vocab + max(aux_rows * part * 2 * vocab, sums) + units <= budget
        assert units == (vocab * hidden // 256 if needs[1] and chunk < rows else 0)
        assert parts == 1 or needs[0]
        # A longer first chunk has the budget for itself, and the others stay as they are.
        longer, longer_parts, *others, units = plan(
            rows, hidden, vocab, needs, aux_rows, budget, clusters, aux_in_grad_weight=True
        )
        assert longer == chunk or (needs[1] and aux_rows > 0 and chunk < longer <= rows)
        assert longer == chunk or hidden // aux_rows >= 256
        assert others == [chunk, part, parts]
        sums = 4 * longer * hidden if longer_parts > 1 else 0
        assert longer == chunk or longer * 2 * vocab + sums + units <= budget
        assert longer == rows or longer % TILE == 0
        grown += longer > chunk
    assert taken > 200 and grown > 10


def test_all_rows_at_once_need_no_sum():
    first, _, chunk, part, _, units = plan(1000, 1024, 12800, aux_rows=0)
    assert (first, chunk, part, units) == (1000, 1000, 1000, 0)


@pytest.mark.parametrize(
    "problem",
    [
        (8192, 4000, 128256),
        (8192, 4096, 128255),
        (255, 4096, 128256),
        (8192, 4096, 128256, (True, True), 4, 64 * MIB),
    ],
)
def test_what_it_leaves_to_the_generic_engine(problem):
    assert plan(*problem) == (0,) * 6


def test_distillation_at_the_default_budget():
    """Rows of a chunk fill the device in the product of the input gradient, or are summed in parts."""
    first, _, chunk, part, parts, _ = plan(8192, 4096, 128256, aux_in_grad_weight=True)
    assert first > chunk
    assert chunk >= 1024 and part >= 256
    tiles = -(-chunk // 256) * (4096 // 256) * parts
    assert tiles / (-(-tiles // 66) * 66) > 0.9


@pytest.mark.parametrize(
    "change, what", [({"clusters": 0}, "clusters is 0"), ({"aux_rows": -1}, "aux_rows is -1")]
)
def test_bad_input(change, what):
    with pytest.raises(RuntimeError, match=f"plan_linear_backward_sm90: {what}, expected at least"):
        plan(8192, 4096, 128256, **change)
