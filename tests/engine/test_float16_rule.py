"""The float16 rule of the wgmma engine, emulated: errors of gradients, and which numbers are rounded to float16."""

import re
from pathlib import Path

import float16_rule
import pytest
import torch
from float16_rule import exact_gradients, gradients

ROWS, HIDDEN, CLASSES, CHUNK = 384, 128, 4096, 256
# The error of one rounding of random numbers to 11 bits, relative to their norm.
ONE_ROUNDING = 2.08e-4
LARGEST = 65504
SOURCE = Path(__file__).parents[2] / "csrc/linear_ce/sm90"


def layer(std=2.5, targets="random", confidence=0.0):
    """x and weight in float16 whose logits have this standard deviation, and targets: random, of a Zipf distribution,
    or the largest or smallest logits. ``confidence``: by how many nats the target is above the sum of the others."""
    x, weight = torch.randn(ROWS, HIDDEN), torch.randn(CLASSES, HIDDEN) * std / HIDDEN**0.5
    logits = x @ weight.T
    target = {
        "random": lambda: torch.randint(CLASSES, (ROWS,)),
        "zipf": lambda: torch.multinomial(1 / torch.arange(1, CLASSES + 1).double(), ROWS, replacement=True),
        "largest": lambda: logits.argmax(1),
        "smallest": lambda: logits.argmin(1),
    }[targets]()
    if confidence:
        rows = weight[target]
        away = logits.logsumexp(1) - logits.gather(1, target[:, None]).squeeze(1)
        x = x + ((away + confidence) / rows.square().sum(1))[:, None] * rows
    return x.half(), weight.half(), target


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def errors(x, weight, target, upstream=None):
    """(errors of both gradients, the emulation); the exact results are not those of the rounded gradients."""
    upstream = torch.ones(len(x), dtype=torch.float64) if upstream is None else upstream
    result = gradients(x, weight, target, upstream, CHUNK)
    grad_input, grad_weight, log_sum = exact_gradients(x, weight, target, upstream)
    torch.testing.assert_close(result.log_sum, log_sum, rtol=1e-12, atol=1e-12)
    assert result.largest < LARGEST
    return error(result.grad_input, grad_input), error(result.grad_weight, grad_weight), result


@pytest.mark.parametrize(
    "chosen, most_shifted",
    [
        ({"std": 0.5}, 0.0),
        ({"std": 1.0}, 0.0),
        ({}, 0.1),
        ({"std": 5.0}, 1.0),
        ({"std": 40.0}, 1.0),
        ({"targets": "zipf"}, 0.2),
        ({"targets": "largest"}, 0.0),
        ({"targets": "smallest"}, 0.1),
        ({"targets": "smallest", "std": 5.0}, 1.0),
    ],
    ids=str,
)
def test_one_and_a_half_roundings(chosen, most_shifted):
    of_input, of_weight, result = errors(*layer(**chosen))
    assert max(of_input, of_weight) < 1.6 * ONE_ROUNDING
    assert result.shifted <= most_shifted


@pytest.mark.parametrize("nats, most", [(1.0, 1.9), (3.0, 1.9), (5.0, 2.2), (7.0, 6.0)])
def test_confident_rows(nats, most):
    """The gradient of a target with a probability near 1 is a small difference. Its weight gradient had an error of
    0.24 for 0.999 while the target's exponential was multiplied by a rounded row."""
    of_input, of_weight, result = errors(*layer(1.0, "zipf", confidence=nats))
    assert max(of_input, of_weight) < most * ONE_ROUNDING
    assert result.shifted == 0


@pytest.mark.parametrize(
    "upstream", [1.0, 1 / 8192, 65536 / 8192, 1e-6, "signs", "powers"], ids=lambda u: str(u)
)
def test_upstream_gradients(upstream):
    """One rounding is larger where the exact gradient is below 2^-14; it is what remains."""
    x, weight, target = layer(targets="zipf")
    if upstream == "signs":
        rows = torch.randn(ROWS, dtype=torch.float64) / 100
    elif upstream == "powers":
        rows = 10 ** (6 * torch.rand(ROWS, dtype=torch.float64) - 5)
    else:
        rows = torch.full((ROWS,), float(upstream), dtype=torch.float64)
    expected = exact_gradients(x, weight, target, rows)[:2]
    actual = errors(x, weight, target, rows)
    for own, exact in zip(actual, expected, strict=False):
        assert own < error(exact.half(), exact) + ONE_ROUNDING


def test_scaled_rows_would_underflow_without_their_unit():
    x, weight, target = layer(targets="zipf")
    upstream = torch.full((ROWS,), 1 / 8192, dtype=torch.float64)
    z = x.double() @ weight.double().T
    scale = upstream / (z - float16_rule.references(z, target)).exp().sum(1) / 2.0**float16_rule.OFFSET
    rows = x.double() * scale[:, None]
    assert error(rows.half(), rows) > 10 * ONE_ROUNDING
    expected = exact_gradients(x, weight, target, upstream)[1]
    assert errors(x, weight, target, upstream)[1] < error(expected.half(), expected) + 0.6 * ONE_ROUNDING


def test_a_row_whose_sum_is_large_in_no_tile_is_shifted_for_its_one_hot_term():
    x, weight, _ = layer(0.5)
    x[:, 0], weight[:, 0] = 4.0, 0.75
    target = torch.full((ROWS,), 3)
    weight[float16_rule.sampled(CLASSES), 0] = weight[3, 0] = 0.0
    z = x.double() @ weight.double().T
    _, totals = float16_rule.row_sums(z, float16_rule.references(z, target))
    assert (totals < 2.0**float16_rule.LARGEST_SUM_EXPONENT).all()
    of_input, of_weight, result = errors(x, weight, target)
    # All rows but the first one of each chunk.
    assert result.shifted == (ROWS - 2) / ROWS
    assert max(of_input, of_weight) < 2 * ONE_ROUNDING


def test_the_constants_are_those_of_the_kernels():
    def constant(file, pattern):
        return int(re.search(pattern, (SOURCE / file).read_text(), re.DOTALL)[1])

    assert constant("element.cuh", r"kSmallRange<T> \? (\d+) : 0") == float16_rule.OFFSET
    assert constant("element.cuh", r"kLargestSumExponent = (\d+)") == float16_rule.LARGEST_SUM_EXPONENT
    assert constant("range_rows.cuh", r"kMost = (\d+)") == float16_rule.MOST_SHIFT
    threads = constant("epilogues.cuh", r"kRowThreads = (\d+)")
    assert threads // 32 * constant("range_rows.cuh", r"kPerWarp = (\d+)") == float16_rule.SAMPLES
    assert constant("tile.h", r"kTileN = (\d+)") == float16_rule.TILE
    assert constant("tile.h", r"kPanel = (\d+)") == float16_rule.PANEL
    assert 2.0 ** constant("exponentials.cuh", r"kMaxRowSum = 0x1p(\d+)f") == float16_rule.MAX_ROW_SUM


@pytest.mark.parametrize("chunks", [6, 24])
def test_sums_over_chunks(chunks):
    """Each chunk rounds the sum once more; the gradient of the input has no sum."""
    x, weight, target = layer()
    ones = torch.ones(ROWS, dtype=torch.float64)
    result = gradients(x, weight, target, ones, ROWS // chunks)
    grad_input, grad_weight, _ = exact_gradients(x, weight, target, ones)
    assert error(result.grad_input, grad_input) < 1.2 * ONE_ROUNDING
    assert ONE_ROUNDING < error(result.grad_weight, grad_weight) < (1 + chunks / 2) ** 0.5 * ONE_ROUNDING
