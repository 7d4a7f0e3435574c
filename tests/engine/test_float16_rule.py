# SPDX-License-Identifier: BSD-3-Clause
"""The float16 rule of the wgmma engine, emulated: errors of gradients, and which numbers are rounded to
float16."""

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
SOURCE = Path(__file__).parents[2] / "csrc/lm_head/sm90"


def layer(std=2.5, targets="random", confidence=0.0):
    """x and weight in float16 whose logits have this standard deviation, and targets: random, of a Zipf
    distribution, or the largest or smallest logits. ``confidence``: by how many nats the target is above the
    sum of the others."""
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


def errors(x, weight, target, upstream=None, chunk_rows=CHUNK, temperature=1.0, of_entropy=None):
    """(errors of both gradients, the emulation); the exact results do not use the rounded gradients."""
    upstream = torch.ones(len(x), dtype=torch.float64) if upstream is None else upstream
    result = gradients(x, weight, target, upstream, chunk_rows, temperature, of_entropy)
    grad_input, grad_weight, log_sum = exact_gradients(x, weight, target, upstream, temperature, of_entropy)
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
    """The gradient of a target with a probability near 1 is a small difference. Its weight gradient had an
    error of 0.24 for 0.999 while the target's exponential was multiplied by a rounded row."""
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
    assert constant("rows/float16_range.cuh", r"kMaxShift = (\d+)") == float16_rule.MAX_SHIFT
    threads = constant("epilogues/common.cuh", r"kRowThreads = (\d+)")
    assert threads // 32 * constant("rows/float16_range.cuh", r"kPerWarp = (\d+)") == float16_rule.SAMPLES
    assert constant("sizes.h", r"kPingpongColumns = (\d+)") == float16_rule.TILE
    assert constant("sizes.h", r"kTileN = (\d+)") == float16_rule.SCALE_COLUMNS
    assert (
        2.0 ** constant("epilogues/exponentials.cuh", r"kMaxRowSum = 0x1p(\d+)f") == float16_rule.MAX_ROW_SUM
    )
    assert 2.0 ** constant("logprobs/kept_rows.cuh", r"kError = 0x1p(-\d+)f") == float16_rule.BOUND_ERROR


@pytest.mark.parametrize("chunks", [6, 24])
def test_sums_over_chunks(chunks):
    """Each chunk rounds the sum once more; the gradient of the input has no sum."""
    x, weight, target = layer()
    ones = torch.ones(ROWS, dtype=torch.float64)
    result = gradients(x, weight, target, ones, ROWS // chunks)
    grad_input, grad_weight, _ = exact_gradients(x, weight, target, ones)
    assert error(result.grad_input, grad_input) < 1.2 * ONE_ROUNDING
    assert ONE_ROUNDING < error(result.grad_weight, grad_weight) < (1 + chunks / 2) ** 0.5 * ONE_ROUNDING


# --- log-probabilities whose gradients arrive after the forward, and entropies ------------------------------

# All rows in one chunk, as exponentials are kept; or computed again, in two.
KEPT = pytest.mark.parametrize("chunk_rows", [ROWS, CHUNK], ids=["kept", "again"])
# Upstream gradients of log-probabilities and of entropies, times normal numbers.
UPSTREAM = pytest.mark.parametrize("logprobs, entropy", [(1.0, 1.0), (1.0, 0.01), (0.0, 1.0)])


def normal(factor):
    return factor * torch.randn(ROWS, dtype=torch.float64)


@KEPT
@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 2.0])
def test_temperatures(temperature, chunk_rows):
    """A temperature is another standard deviation of the logits."""
    *of_gradients, result = errors(*layer(targets="zipf"), normal(1.0), chunk_rows, temperature)
    assert max(of_gradients) < 1.8 * ONE_ROUNDING
    assert result.shifted < (0.8 if temperature < 1 else 0.2)


@pytest.mark.covering(2)
@KEPT
@UPSTREAM
@pytest.mark.parametrize(
    "chosen",
    [
        {"std": 0.5},
        {"std": 1.0},
        {},
        {"std": 5.0},
        {"std": 40.0},
        {"targets": "zipf"},
        {"targets": "largest"},
        {"targets": "smallest", "std": 5.0},
    ],
    ids=str,
)
def test_gradients_of_entropies(chosen, logprobs, entropy, chunk_rows):
    """Three roundings: of the exponentials, whose logarithm has that error too, of the second matrix, and of
    the scaled rows. Entropies near their maximum have a gradient that is a small difference, so its error is
    larger."""
    x, weight, target = layer(**chosen)
    *of_gradients, result = errors(
        x, weight, target, normal(logprobs), chunk_rows, of_entropy=normal(entropy)
    )
    assert max(of_gradients) < (3.5 if logprobs == 0 else 2.0) * ONE_ROUNDING
    assert result.largest < 2.0**15


@pytest.mark.covering(1)
@KEPT
@UPSTREAM
@pytest.mark.parametrize("nats", [1.0, 3.0, 5.0, 7.0])
def test_gradients_of_entropies_of_confident_rows(nats, logprobs, entropy, chunk_rows):
    """Up to a probability of 0.998, where both gradients are small differences."""
    x, weight, target = layer(1.0, "zipf", confidence=nats)
    *of_gradients, result = errors(
        x, weight, target, normal(logprobs), chunk_rows, of_entropy=normal(entropy)
    )
    assert max(of_gradients) < 2.2 * ONE_ROUNDING
    assert result.largest < 2.0**15 and result.shifted == 0


@pytest.mark.parametrize("nats", [0.0, 7.0], ids=["random targets", "confident"])
@pytest.mark.parametrize("factor", [1 / 8192, 65536 / 8192, 1e-5])
def test_upstream_gradients_of_entropies(factor, nats):
    """One rounding of the exact gradient is what remains, as without entropies."""
    x, weight, target = layer(1.0, "zipf", confidence=nats)
    upstream = normal(factor), normal(factor)
    expected = exact_gradients(x, weight, target, upstream[0], 1.0, upstream[1])[:2]
    actual = errors(x, weight, target, upstream[0], ROWS, 1.0, upstream[1])
    for own, exact in zip(actual, expected, strict=False):
        assert own < error(exact.half(), exact) + 1.2 * ONE_ROUNDING


def test_the_second_matrix_would_leave_the_range_without_its_power_of_two():
    x, weight, target = layer(5.0)
    upstream = normal(1.0), normal(1.0)
    without = gradients(x, weight, target, upstream[0], ROWS, 1.0, upstream[1], with_unit=False)
    assert without.largest > LARGEST
    assert errors(x, weight, target, upstream[0], ROWS, 1.0, upstream[1])[-1].largest < 2.0**15
    # Nor would small elements remain, of a confident row with a small upstream gradient.
    x, weight, target = layer(1.0, "zipf", confidence=7.0)
    upstream = normal(1e-3), normal(1e-3)
    expected = exact_gradients(x, weight, target, upstream[0], 1.0, upstream[1])[1]
    without = gradients(x, weight, target, upstream[0], ROWS, 1.0, upstream[1], with_unit=False)
    with_unit = errors(x, weight, target, upstream[0], ROWS, 1.0, upstream[1])[1]
    assert error(without.grad_weight, expected) > 2 * with_unit


def test_the_bound_of_the_second_matrix():
    """It is one for every probability beside the target, and at most 2^8 times the largest, but for
    BOUND_ERROR."""
    target = torch.rand(2000, dtype=torch.float64)
    rest = torch.rand(2000, 64, dtype=torch.float64) ** 8
    p = torch.cat([target[:, None], rest / rest.sum(1, keepdim=True) * (1 - target)[:, None]], 1)
    log = p.clamp_min(1e-300).log()
    entropy = -(p * log).sum(1)
    for u, w in ((1.0, 1.0), (1.0, -1.0), (0.0, 1.0), (1.0, 0.0), (-1.0, 0.01)):
        u, w = torch.full_like(target, u), torch.full_like(target, w)
        elements = (u[:, None] * p + w[:, None] * p * (log + entropy[:, None])).abs()[:, 1:].amax(1)
        bound = float16_rule.largest_beside_target(u, w, target.log(), entropy)
        assert (elements <= bound).all() and (bound < 2**8 * elements + 8 * float16_rule.BOUND_ERROR).all()
