# SPDX-License-Identifier: BSD-3-Clause
"""log_sum_sq_probs and mean_logits from the engine of compute capability 9.0, against float64."""

import math

import pytest
import torch
from cases import poison_memory
from cuda_graphs import capture
from float16_rule import sampled
from logprobs_sm90 import KEPT
from sm90_engine import BESIDE, DTYPES, FLOAT16, KINDS, SHAPES, SUMS, Shape
from torch.nn.functional import linear

import liger

pytestmark = pytest.mark.gpu

METRICS = "log_sum_sq_probs", "mean_logits"
# Relative to the largest logit: the sums of tensor cores are truncated, and an exponential has the absolute
# error of its exponent.
ERROR = 2e-5


def run(shape, x, weight, target, temperature=1.0, **options):
    poison_memory()
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    out = liger.fused_linear_logprobs(
        *leaves, target, temperature=temperature, memory_budget=shape.budget, **options
    )
    poison_memory()
    return out, torch.autograd.grad(out.logprobs.sum(), leaves)


def exact(x, weight, target, temperature):
    live = target != -100
    z = linear(x.double().where(live[:, None], 0.0), weight.double()) / temperature
    squares = (2 * z).logsumexp(-1) - 2 * z.logsumexp(-1)
    return squares.where(live, 0.0), z.mean(-1).where(live, 0.0), z.abs().max().clamp_min(1.0)


def assert_exact(out, x, weight, target, temperature):
    squares, means, largest = exact(x, weight, target, temperature)
    for mine, wanted in ((out.log_sum_sq_probs, squares), (out.mean_logits, means)):
        if mine is not None:
            assert mine.dtype == torch.float32 and not mine.requires_grad
            assert (mine - wanted).abs().max() <= ERROR * largest
            assert not mine[target == -100].any()


@KEPT
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", SHAPES)
@DTYPES
def test_every_kind_of_plan(sm90, dtype, calls, name, temperature, recompute):
    shape = SHAPES[name]
    layer = shape.layer(sm90, dtype=dtype)
    layer[0][layer[2] == -100] = math.nan
    out, _ = run(shape, *layer, temperature, recompute=recompute, metrics=METRICS)
    assert_exact(out, *layer, temperature)
    # Not the path of fused_linear_ce, whose kernels have no sums of squares.
    assert calls[0] == ("forward", not recompute)


@KEPT
@pytest.mark.parametrize("name", METRICS)
@KINDS
def test_one_alone(sm90, shape, name, recompute):
    layer = shape.layer(sm90)
    out, _ = run(shape, *layer, 0.7, recompute=recompute, metrics=(name,))
    both, _ = run(shape, *layer, 0.7, recompute=recompute, metrics=METRICS)
    assert [getattr(out, n) is not None for n in METRICS] == [n == name for n in METRICS]
    assert torch.equal(getattr(out, name), getattr(both, name))
    assert out.entropy is None and out.argmax is None


@KEPT
@KINDS
def test_the_rest_has_the_same_bits(sm90, shape, recompute):
    layer = shape.layer(sm90)
    asked = "entropy", "argmax"
    plain, grads = run(shape, *layer, 0.7, recompute=recompute, metrics=asked)
    found, found_grads = run(shape, *layer, 0.7, recompute=recompute, metrics=(*asked, *METRICS))
    for field in ("logprobs", *asked):
        assert torch.equal(getattr(found, field), getattr(plain, field))
    for mine, other in zip(found_grads, grads, strict=True):
        assert torch.equal(mine, other)


@KEPT
@pytest.mark.parametrize("gap", [30.0, 60.0, 300.0])
@pytest.mark.parametrize("shape", [BESIDE, SUMS], ids=["one chunk", "sums"])
@DTYPES
def test_targets_far_below_the_largest_logit(sm90, dtype, shape, gap, recompute):
    """Exponentials relative to the target of e^30 (their squares are 2^87), and rows that are computed again
    from their maximum."""
    x, weight, target = shape.layer(sm90, dtype=dtype)
    logits = linear(x.float(), weight.float())
    rows = torch.arange(0, shape.rows, 3, device=sm90)
    target[rows] = logits[rows].argmin(-1)
    spread = (logits.amax(-1) - logits.amin(-1))[rows].min().item()
    x[rows] *= gap / spread
    out, _ = run(shape, x, weight, target, recompute=recompute, metrics=METRICS)
    assert_exact(out, x, weight, target, 1.0)
    assert out.log_sum_sq_probs.isfinite().all()


@KEPT
@DTYPES
def test_a_sum_of_squares_beyond_float32(sm90, dtype, recompute):
    """One exponential of 2^59.5 in each of 600 tiles, of no class that is a sample: no tile is computed
    again, and the sum of squares is 2^128.2."""
    shape = Shape(256, 64, 600 * 256)
    x, weight, target = shape.layer(sm90, ignored=0.0, dtype=dtype)
    x.zero_()
    x[:, 0] = 41.25
    weight.zero_()
    weight[::256, 0] = 1.0
    if dtype == FLOAT16:
        weight[sampled(shape.vocab), 0] = 0.0
    target.fill_(1)
    out, _ = run(shape, x, weight, target, recompute=recompute, metrics=METRICS)
    assert_exact(out, x, weight, target, 1.0)


def test_a_graph(sm90):
    shape = SUMS
    x, weight, target = shape.layer(sm90)

    def step():
        out = liger.fused_linear_logprobs(
            x, weight, target, temperature=0.7, memory_budget=shape.budget, metrics=METRICS
        )
        return out.log_sum_sq_probs, out.mean_logits

    expected = [t.clone() for t in step()]
    graph, results = capture(step)
    graph.replay()
    for mine, other in zip(results, expected, strict=True):
        assert torch.equal(mine, other)
