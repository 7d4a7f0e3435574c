# SPDX-License-Identifier: BSD-3-Clause
"""Tiles of 192 classes of the logits GEMM, one per warpgroup: where they end within a panel of 128 classes,
and the numbers of tiles per block."""

import pytest
from sm90_engine import DTYPES, MIB, ROWS, Shape, assert_same_bits, check, run

pytestmark = pytest.mark.gpu

TILE = 192
# Tiles are followed by: nothing, one vector, half a panel, a panel, a panel and a vector. An odd number of
# tiles ends within a panel.
BEYOND = [0, 8, 64, 128, 136]
PARTIAL = pytest.mark.parametrize("vocab", [TILE * tiles + more for tiles in (6, 7) for more in BEYOND])


@DTYPES
@pytest.mark.parametrize("hidden", [64, 768, 832], ids=lambda hidden: f"H={hidden}")
@PARTIAL
def test_last_tiles(sm90, vocab, hidden, dtype):
    shape = Shape(700, hidden, vocab)
    check(shape, *shape.layer(sm90, dtype=dtype))


@PARTIAL
def test_last_tiles_in_two_buffers_and_several_chunks(sm90, vocab):
    """The first chunk has rows in the memory of the weight gradient and beside it."""
    shape = Shape(1900, 768, vocab, MIB)
    rows, _, in_grad_weight, _ = shape.plan()
    assert len(rows) > 1 and 0 < in_grad_weight < rows[0]
    check(shape, *shape.layer(sm90))


@pytest.mark.parametrize("hidden", [64 * blocks for blocks in (1, 2, 4, 5, 6, 24)])
@pytest.mark.parametrize("vocab", [16 * TILE, 33 * TILE + 8])
def test_k_blocks(sm90, vocab, hidden):
    """Fewer than stages, as many, and more; the mainloop of a warpgroup skips the stages of the other one."""
    shape = Shape(1300, hidden, vocab)
    check(shape, *shape.layer(sm90))


@pytest.mark.parametrize("vocab", [37, 128, TILE, TILE + 1, 2 * TILE])
@pytest.mark.parametrize("hidden", [768, 1024])
def test_at_most_one_tile_per_block(sm90, vocab, hidden):
    """One of the warpgroups has no tile."""
    shape = Shape(300, hidden, vocab)
    check(shape, *shape.layer(sm90))


@pytest.mark.parametrize("tiles", [66, 67, 131, 132, 133, 199])
def test_numbers_of_tiles_around_those_of_clusters(sm90, tiles):
    """Blocks with an even and an odd number of tiles, the last one of either warpgroup."""
    shape = Shape(256, 768, TILE * tiles)
    check(shape, *shape.layer(sm90))


@DTYPES
@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("vocab", [TILE * 7, TILE * 10 + 72, TILE * 11 + 136])
def test_recomputed_tiles(sm90, vocab, share, dtype):
    """Targets more than 41 below the largest logit, in a few tiles of rows or in all."""
    shape = Shape(900, 768, vocab)
    x, weight, target = shape.layer(sm90, ignored=0.1, dtype=dtype)
    x[: round(share * shape.rows)] *= 60
    check(shape, x, weight, target, loss_tolerance=ROWS)


@pytest.mark.parametrize("hidden", [768, 1024])
def test_the_same_bits_twice(sm90, hidden):
    shape = Shape(1300, hidden, TILE * 21 + 8)
    layer = shape.layer(sm90)
    assert_same_bits(
        [[[output.loss, output.logprobs], grads] for output, grads in (run(shape, *layer) for _ in range(2))]
    )


@pytest.mark.parametrize("ignored", [0.4, 0.9, 1.0])
def test_tiles_of_rows_without_a_valid_row(sm90, ignored):
    """The mainloop of such a tile runs, its epilogue does not."""
    shape = Shape(1300, 896, TILE * 21 + 136)
    if ignored == 1.0:
        x, weight, target = shape.layer(sm90, ignored)
        _, grads = run(shape, x, weight, target, reduction="sum")
        assert not any(grad.any() for grad in grads)
        return
    check(shape, *shape.layer(sm90, ignored))
