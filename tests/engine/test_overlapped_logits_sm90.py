"""Tiles of 192 classes, as the logits GEMM of a build with LIGER_EXPERIMENTAL has them: where they end within a panel
of 128 classes, and mainloops that are too short for an epilogue. Without the option the sizes are only unusual."""

import pytest
import torch
from sm90_engine import MIB, ROWS, Shape, assert_observed, assert_same_bits, check, run
from torch.nn.functional import linear

pytestmark = pytest.mark.gpu

TILE = 192
# Tiles are followed by: nothing, one vector, half a panel, a panel, a panel and a vector. An odd number of tiles ends
# within a panel.
BEYOND = [0, 8, 64, 128, 136]
PARTIAL = pytest.mark.parametrize("vocab", [TILE * tiles + more for tiles in (6, 7) for more in BEYOND])


@pytest.mark.parametrize("hidden", [512, 640], ids=lambda hidden: f"H={hidden}")
@PARTIAL
def test_last_tiles(sm90, vocab, hidden):
    shape = Shape(700, hidden, vocab)
    check(shape, *shape.layer(sm90))


@PARTIAL
def test_last_tiles_in_two_buffers_and_several_chunks(sm90, vocab):
    """The first chunk has rows in the memory of the weight gradient and beside it."""
    shape = Shape(1900, 320, vocab, MIB)
    rows, _, in_grad_weight, _ = shape.plan()
    assert len(rows) > 1 and 0 < in_grad_weight < rows[0]
    check(shape, *shape.layer(sm90))


@pytest.mark.parametrize("hidden", [64 * blocks for blocks in (1, 2, 3, 5, 6, 7, 11, 13)])
@pytest.mark.parametrize("vocab", [16 * TILE, 33 * TILE + 8])
def test_few_k_blocks(sm90, vocab, hidden):
    """Up to 12 k-blocks have pieces of the epilogue before; with fewer it runs between two mainloops."""
    shape = Shape(1300, hidden, vocab)
    check(shape, *shape.layer(sm90))


@pytest.mark.parametrize("vocab", [37, 128, TILE, TILE + 1, 2 * TILE])
@pytest.mark.parametrize("hidden", [256, 640])
def test_at_most_one_tile_per_block(sm90, vocab, hidden):
    """The epilogue of every tile runs after the last mainloop."""
    shape = Shape(300, hidden, vocab)
    check(shape, *shape.layer(sm90))


@pytest.mark.parametrize("tiles", [66, 67, 131, 132, 133, 199])
def test_numbers_of_tiles_around_those_of_clusters(sm90, tiles):
    """Blocks with an even and an odd number of tiles, of which the last one is in either set of accumulators."""
    shape = Shape(256, 448, TILE * tiles)
    check(shape, *shape.layer(sm90))


@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("vocab", [TILE * 7, TILE * 10 + 72, TILE * 11 + 136])
def test_recomputed_tiles(sm90, vocab, share):
    """Targets more than 41 below the largest logit, in a few tiles of rows or in all."""
    shape = Shape(900, 512, vocab)
    x, weight, target = shape.layer(sm90, ignored=0.1)
    x[: round(share * shape.rows)] *= 60
    check(shape, x, weight, target, loss_tolerance=ROWS)


@PARTIAL
def test_metrics(sm90, vocab):
    shape = Shape(600, 384, vocab)
    x, weight, target = shape.layer(sm90)
    # The largest logit of some rows is that of the last class; another row has equal logits.
    x[::7] = weight[-1] * 3
    x[3] = 0
    output, _ = run(shape, x, weight, target, return_entropy=True, return_predicted_tokens=True)
    assert_observed(x, weight, target, output.entropy, output.predicted_tokens)
    if target[3] != -100:
        assert output.predicted_tokens[3] == 0
    logits = linear(x.double(), weight.double())
    assert (logits[::7].argmax(-1) == vocab - 1).any()


@pytest.mark.parametrize("vocab", [250, *(TILE * 7 + more for more in BEYOND)])
@pytest.mark.parametrize("softcap", [None, 15.0])
def test_bias_and_softcap(sm90, vocab, softcap):
    """The last tile of 250 classes ends behind the vector of the bias, which is padded to 256."""
    shape = Shape(500, 448, vocab)
    x, weight, target = shape.layer(sm90)
    bias = torch.randn(vocab, device=sm90).to(x.dtype)
    check(shape, x, weight, target, bias=bias, **({} if softcap is None else {"softcap": softcap}))


@pytest.mark.parametrize("hidden", [320, 640])
def test_the_same_bits_twice(sm90, hidden):
    shape = Shape(1300, hidden, TILE * 21 + 8)
    layer = shape.layer(sm90)
    assert_same_bits(
        [[[output.loss, output.logprobs], grads] for output, grads in (run(shape, *layer) for _ in range(2))]
    )


@pytest.mark.parametrize("ignored", [0.4, 0.9, 1.0])
def test_tiles_of_rows_without_a_valid_row(sm90, ignored):
    """The mainloop of such a tile runs, its epilogue does not; nor does it delay that of the tile before."""
    shape = Shape(1300, 512, TILE * 21 + 136)
    if ignored == 1.0:
        x, weight, target = shape.layer(sm90, ignored)
        _, grads = run(shape, x, weight, target, reduction="sum")
        assert not any(grad.any() for grad in grads)
        return
    check(shape, *shape.layer(sm90, ignored))
