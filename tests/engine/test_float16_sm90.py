# SPDX-License-Identifier: BSD-3-Clause
"""float16 on the engine of compute capability 9.0: its range rules, against float64 and against the generic
engine."""

import pytest
import torch
from float16_rule import LARGEST_SUM_EXPONENT, MAX_ROW_SUM, references, row_sums, sampled
from sm90_engine import (
    BESIDE,
    FLOAT16,
    OBSERVED,
    PARTIAL_SUMS,
    PARTS_OF_CHUNKS,
    ROWS,
    SHAPES,
    SUMS,
    SUMS_BF16,
    assert_observed,
    check,
    chosen_terms,
    exact,
    gradient_tolerance,
    run,
)
from torch.nn.functional import linear

pytestmark = pytest.mark.gpu

KINDS = pytest.mark.parametrize(
    "shape",
    [BESIDE, SUMS, SUMS_BF16.of(FLOAT16), PARTIAL_SUMS],
    ids=["one chunk", "sums", "float16 allowed", "partial tiles"],
)
SOME_TERMS = [
    "bias", "softcap", "smoothing", "bias and softcap", "bias, smoothing, weights", "bias, softcap, weights",
]  # fmt: skip


def layer(shape, device, ignored=0.25, scale=1.0):
    return shape.layer(device, ignored, scale, dtype=FLOAT16)


# --- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME_TERMS)
@pytest.mark.parametrize("shape", [BESIDE, SUMS, PARTIAL_SUMS, PARTS_OF_CHUNKS], ids=lambda s: str(s.rows))
def test_terms(sm90, shape, name):
    check(shape, *layer(shape, sm90), **chosen_terms(name, shape, sm90, FLOAT16))


@pytest.mark.parametrize("name", ["none", *SOME_TERMS])
@pytest.mark.parametrize("shape", [BESIDE, PARTIAL_SUMS], ids=["one chunk", "partial"])
def test_metrics(sm90, shape, name):
    x, weight, target = layer(shape, sm90)
    chosen = {} if name == "none" else chosen_terms(name, shape, sm90, FLOAT16)
    output, grads = run(shape, x, weight, target, **chosen, **OBSERVED)
    values, expected = exact(x, weight, target, **chosen)
    largest = linear(x.double(), weight.double()).abs().max()
    assert (output.entropy.double() - values["entropy"]).abs().max() <= ROWS * largest
    if name == "none":
        assert_observed(x, weight, target, output.entropy, output.argmax)
    for actual, wanted in zip(grads, expected, strict=True):
        assert (actual.double() - wanted).norm() <= gradient_tolerance(wanted, FLOAT16) * wanted.norm()


# --- the range of exponentials ------------------------------------------------------------------------------


@pytest.mark.parametrize("scale, least, most", [(1.0, 0.0, 0.0), (2.0, 0.05, 0.5), (4.0, 0.5, 1.0)])
@KINDS
def test_the_smallest_logit_as_target(sm90, shape, scale, least, most):
    """In none, some and most rows a tile has a sum that is shifted down."""
    x, weight, _ = layer(shape, sm90, scale=scale)
    logits = linear(x.double(), weight.double())
    target = logits.argmin(-1)
    _, totals = row_sums(logits, references(logits, target))
    shifted = (totals >= 2.0**LARGEST_SUM_EXPONENT).any(1).float().mean()
    assert least <= shifted <= most
    check(shape, x, weight, target, loss_tolerance=ROWS)


@pytest.mark.parametrize("share", [0.01, 1.0])
@KINDS
def test_sums_beyond_2_to_the_60_are_recomputed(sm90, shape, share):
    x, weight, target = layer(shape, sm90, ignored=0.1)
    x[: round(share * shape.rows)] *= 60
    logits = linear(x.double(), weight.double())
    _, totals = row_sums(logits, references(logits, target.clamp_min(0)))
    assert (totals > MAX_ROW_SUM).any() and (share == 1 or (totals < 1e6).all(1).any())
    check(shape, x, weight, target, loss_tolerance=ROWS)


@pytest.mark.parametrize("shape", [BESIDE, SHAPES["sums, larger"]], ids=["one chunk", "sums"])
def test_rows_that_are_shifted_for_their_one_hot_term(sm90, shape):
    """No tile has a large sum, but the row has: minus that is the element of the target."""
    x, weight, target = layer(shape, sm90, scale=0.25)
    target[target >= 0] = 3
    x[:, 0], weight[:, 0] = 4.0, 0.75
    weight[sampled(shape.vocab), 0] = weight[3, 0] = 0.0
    logits = linear(x.double(), weight.double())
    e, totals = row_sums(logits, references(logits, torch.full_like(target, 3)))
    assert (totals < 2.0**LARGEST_SUM_EXPONENT).all()
    assert (e.sum(1) >= 2.0**LARGEST_SUM_EXPONENT).float().mean() > 0.5
    if shape is BESIDE:
        check(shape, x, weight, target)
        return
    # One element of x is most of its row, so it is most of the gradient of the class too: its rounding in
    # every chunk is not averaged over a row.
    _, grads = run(shape, x, weight, target)
    _, expected = exact(x, weight, target)
    errors = [
        ((actual.double() - wanted).norm() / wanted.norm()).item()
        for actual, wanted in zip(grads, expected, strict=True)
    ]
    assert errors[0] <= gradient_tolerance(expected[0], FLOAT16) and errors[1] <= 1.5e-3


@pytest.mark.parametrize("nats", [2.0, 5.0, 7.0])
@KINDS
def test_confident_rows(sm90, shape, nats):
    """Probabilities up to 0.999: the gradient of the target's logit is a small difference."""
    x, weight, target = layer(shape, sm90, ignored=0.0, scale=0.5)
    rows = weight[target].float()
    logits = linear(x.float(), weight.float())
    away = logits.logsumexp(-1) - logits.gather(1, target[:, None]).squeeze(1)
    x = (x.float() + ((away + nats) / rows.square().sum(1))[:, None] * rows).to(FLOAT16)
    probability = linear(x.double(), weight.double()).softmax(-1).gather(1, target[:, None])
    assert 0.6 < probability.median() < 0.9995
    output, grads = run(shape, x, weight, target, reduction="sum")
    values, expected = exact(x, weight, target, reduction="sum")
    # Logits are sums of products in float32, so losses near 0 and the gradient have an absolute error.
    assert (output.logprobs.double() - values["logprobs"]).abs().max() < 5e-5
    for name, actual, wanted in zip(("input", "weight"), grads, expected, strict=True):
        error = ((actual.double() - wanted).norm() / wanted.norm()).item()
        most = gradient_tolerance(wanted, FLOAT16) + 2e-5 / (1 - probability.median().item())
        assert error <= most, f"gradient of {name}: error {error:.3g}, allowed {most:.3g}"


# --- the range of scales and gradients ----------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 65536.0, 1e-6])
@KINDS
def test_loss_scales(sm90, shape, factor):
    """An upstream gradient as a loss scale makes it, divided by the number of rows."""
    upstream = torch.rand(shape.rows, device=sm90) * factor / shape.rows
    x, weight, target = layer(shape, sm90)
    _, grads = run(shape, x, weight, target, upstream=upstream, reduction="none")
    _, expected = exact(x, weight, target, upstream=upstream, reduction="none")
    for name, actual, wanted in zip(("input", "weight"), grads, expected, strict=True):
        assert actual.isfinite().all()
        # Below 2^-14 a rounding is 2^-25, whatever the element is.
        rounding = torch.maximum(wanted.abs() * 2.0**-11, torch.tensor(2.0**-25, device=sm90).double())
        error = (actual.double() - wanted).abs()
        assert (error <= rounding + 2e-3 * wanted.abs().max()).all(), name
        norm = (wanted.to(FLOAT16).double() - wanted).norm() + 4e-4 * wanted.norm()
        assert error.norm() <= norm, f"gradient of {name}: {error.norm() / norm:.3g} times what is allowed"


@KINDS
def test_rows_of_very_different_weights(sm90, shape):
    """Gradients of rows are as exact as others where their scales differ by 10^9; ignored rows may be
    infinite."""
    upstream = 10 ** (9 * torch.rand(shape.rows, device=sm90) - 6)
    upstream *= torch.randn(shape.rows, device=sm90).sign()
    x, weight, target = layer(shape, sm90)
    dirty = x.clone()
    dirty[target == -100] = torch.inf
    _, grads = run(shape, dirty, weight, target, upstream=upstream, reduction="none")
    _, expected = exact(x, weight, target, upstream=upstream, reduction="none")
    live = target != -100
    actual, wanted = grads[0].double()[live], expected[0][live]
    rounded = (wanted.to(FLOAT16).double() - wanted).norm(dim=1)
    assert ((actual - wanted).norm(dim=1) <= rounded + 8e-4 * wanted.norm(dim=1)).all()
    error = (grads[1].double() - expected[1]).norm() / expected[1].norm()
    assert error <= gradient_tolerance(expected[1], FLOAT16)
    assert not grads[0][~live].any()


@KINDS
def test_gradients_beyond_float16_are_infinite(sm90, shape):
    """A loss scale that is too large: infinities where the exact gradient is beyond 65504, and no NaN."""
    x, weight, target = layer(shape, sm90, ignored=0.5)
    upstream = torch.full((shape.rows,), 1e6, device=sm90)
    _, grads = run(shape, x, weight, target, upstream=upstream, reduction="none")
    _, expected = exact(x, weight, target, upstream=upstream, reduction="none")
    for actual, wanted in zip(grads, expected, strict=True):
        assert not actual.isnan().any() and actual.isinf().any() and actual.isfinite().any()
        # An element that is small in its row, or the difference of the sums of chunks, has the error of the
        # others.
        margin = 2e-3 * wanted.abs().max().item()
        assert actual[wanted.abs() > 65520 + margin].isinf().all()
        assert actual[wanted.abs() < 65504 - margin].isfinite().all()
        assert (actual.sign() == wanted.sign())[actual.isinf()].all()
    assert not grads[0][target == -100].any()


@pytest.mark.parametrize("factor", [1.0, 65536.0, 1e-3])
@KINDS
def test_a_factor_after_the_forward(sm90, shape, factor):
    """The forward rounds the gradients of a mean, of 64 times the loss: a loss scale finds elements of 11
    bits."""
    x, weight, target = layer(shape, sm90)
    upstream = torch.tensor(factor, device=sm90)
    _, grads = run(shape, x, weight, target, upstream=upstream)
    _, expected = exact(x, weight, target, upstream=upstream)
    for name, actual, wanted in zip(("input", "weight"), grads, expected, strict=True):
        error, most = (actual.double() - wanted).norm() / wanted.norm(), gradient_tolerance(wanted, FLOAT16)
        assert error <= most, f"gradient of {name}: error {error:.3g}, allowed {most:.3g}"
