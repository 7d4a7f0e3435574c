# SPDX-License-Identifier: BSD-3-Clause
"""Entropies and most probable classes from the engine of compute capability 9.0, in fused_linear_ce."""

import math

import pytest
import torch
from cuda_graphs import capture
from sm90_engine import (
    BFLOAT16,
    GRADIENT,
    KINDS,
    LOSS,
    OBSERVED,
    ROWS,
    SHAPES,
    assert_close_to_exact,
    assert_observed,
    assert_same_bits,
    exact,
    run,
)
from torch.nn.functional import linear

pytestmark = pytest.mark.gpu


def observe(shape, x, weight, target, trained=(True, True), **chosen):
    output, grads = run(shape, x, weight, target, trained, **OBSERVED, **chosen)
    assert_observed(x, weight, target, output.entropy, output.argmax)
    live = target != -100
    accuracy = (output.argmax == target)[live].double().mean()
    torch.testing.assert_close(output.token_accuracy.double(), accuracy, equal_nan=True, rtol=1e-6, atol=0)
    return output, grads


@pytest.mark.parametrize("name", SHAPES)
def test_every_kind_of_plan(sm90, name):
    shape = SHAPES[name]
    x, weight, target = shape.layer(sm90)
    right = linear(x.double(), weight.double()).argmax(-1)
    target[::3] = torch.where(target[::3] >= 0, right[::3], target[::3])
    output, _ = observe(shape, x, weight, target)
    assert 0.2 < output.token_accuracy < 0.6


@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@KINDS
def test_only_what_is_trained(sm90, shape, reduction, trained):
    x, weight, target = shape.layer(sm90)
    upstream = torch.ones(shape.rows, device=sm90) if reduction == "none" else None
    observe(shape, x, weight, target, trained, reduction=reduction, upstream=upstream)


@KINDS
def test_with_every_option_the_rest_is_as_exact_as_before(sm90, shape):
    chosen = {
        "ce_weight": torch.rand(shape.vocab, device=sm90) + 0.1,
        "token_weight": torch.rand(shape.rows, device=sm90) + 0.1,
        "lse_square_scale": 1e-2,
    }
    x, weight, target = shape.layer(sm90)
    output, grads = observe(shape, x, weight, target, **chosen)
    values, expected = exact(x, weight, target, **chosen)
    assert_close_to_exact(output.loss, values["loss"].detach(), LOSS, "loss")
    assert_close_to_exact(output.logprobs, values["logprobs"].detach(), ROWS, "logprobs")
    for actual, wanted in zip(grads, expected, strict=True):
        assert (actual.double() - wanted).norm() <= GRADIENT * wanted.norm()


@pytest.mark.parametrize("name", SHAPES)
def test_the_rest_does_not_change(sm90, name):
    shape = SHAPES[name]
    layer = shape.layer(sm90)
    plain, grads = run(shape, *layer)
    observed, observed_grads = run(shape, *layer, **OBSERVED)
    results = [
        [getattr(output, name) for name in ("loss", "z_loss", "logprobs")] for output in (plain, observed)
    ]
    assert_same_bits(zip(results, (grads, observed_grads), strict=True))


@pytest.mark.parametrize("name", ["entropy", "argmax", "token_accuracy"])
@KINDS
def test_one_alone(sm90, shape, name):
    layer = shape.layer(sm90)
    everything, _ = run(shape, *layer, **OBSERVED)
    alone, _ = run(shape, *layer, metrics=(name,))
    assert torch.equal(getattr(alone, name), getattr(everything, name))
    assert sum(getattr(alone, other) is not None for other in OBSERVED["metrics"]) == 1


# --- ties ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 2, 8, 128])
@pytest.mark.parametrize("scale", [1.0, 60.0])
@KINDS
def test_of_equal_logits_the_first_is_the_most_probable(sm90, shape, scale, period):
    """Classes come in groups of the same weight: neighbours of a lane, of a quad, of a tile, of tiles far
    apart."""
    x, weight, target = shape.layer(sm90, scale=scale)
    if period == 1:
        weight = weight[:1].expand_as(weight).contiguous()
    elif period == 128:
        weight = weight[:128].repeat(shape.vocab // 128, 1)
    else:
        weight = weight[::period].repeat_interleave(period, 0)
    output, _ = observe(shape, x, weight, target)
    predicted = output.argmax[target >= 0]
    if period == 1:
        assert (predicted == 0).all()
    elif period == 128:
        assert (predicted < 128).all() and predicted.unique().numel() > 64
    else:
        assert (predicted % period == 0).all() and predicted.unique().numel() > 64


@KINDS
def test_zeros_are_equal_and_their_entropy_is_the_largest(sm90, shape):
    x, weight, target = shape.layer(sm90)
    weight = torch.where(weight > 0, 0.0, -0.0).to(BFLOAT16)
    output, _ = run(shape, x, weight, target, **OBSERVED)
    entropy, predicted = (t[target >= 0] for t in (output.entropy, output.argmax))
    assert (predicted == 0).all()
    torch.testing.assert_close(entropy, torch.full_like(entropy, math.log(shape.vocab)))


# --- the range of logits, ignored rows ----------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.01, 1.0])
@KINDS
def test_sums_beyond_their_range_are_repaired(sm90, shape, share):
    x, weight, target = shape.layer(sm90, ignored=0.1)
    x[: round(share * shape.rows)] *= 60
    logits = linear(x.double(), weight.double())
    below = logits.max(-1).values - logits.gather(1, target.clamp_min(0).unsqueeze(1)).squeeze(1)
    assert (below[target >= 0] > 42).any()
    observe(shape, x, weight, target)


@pytest.mark.parametrize("pick", [torch.argmin, torch.argmax])
@KINDS
def test_the_smallest_and_the_largest_logit_as_target(sm90, shape, pick):
    x, weight, _ = shape.layer(sm90, scale=2.0)
    target = pick(linear(x.double(), weight.double()), -1)
    output, _ = observe(shape, x, weight, target)
    assert output.token_accuracy == (1 if pick is torch.argmax else 0)


@KINDS
def test_all_rows_ignored(sm90, shape):
    output, _ = observe(shape, *shape.layer(sm90, ignored=1.0))
    assert output.token_accuracy.isnan()


@pytest.mark.parametrize("ignored", [0.5, 0.99])
@KINDS
def test_ignored_rows(sm90, shape, ignored):
    x, weight, target = shape.layer(sm90, ignored)
    runs = []
    for fill in (0.0, torch.inf):
        x[target == -100] = fill
        runs.append(run(shape, x, weight, target, **OBSERVED))
    assert_same_bits(runs)
    x[target == -100] = 0.0
    observe(shape, x, weight, target)


# --- how it runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_bits_twice(sm90, name):
    shape = SHAPES[name]
    layer = shape.layer(sm90)
    runs = []
    for fill in (0.0, torch.nan):
        garbage = torch.full((1 << 26,), fill, device=sm90)  # whatever the memory held before
        del garbage
        runs.append(run(shape, *layer, **OBSERVED))
    assert_same_bits(runs)


@KINDS
def test_a_graph_fits_other_inputs(sm90, shape):
    static = shape.layer(sm90)

    def step():
        return run(shape, *static, **OBSERVED)

    graph, captured = capture(step)
    for ignored, scale in ((0.0, 1.0), (0.9, 30.0), (0.2, 0.5)):
        for tensor, value in zip(static, shape.layer(sm90, ignored, scale), strict=True):
            tensor.copy_(value)
        graph.replay()
        assert_same_bits([captured, step()])
