# SPDX-License-Identifier: BSD-3-Clause
"""Losses in float16 by the products of compute capability 9.0, against float64."""

import pytest
import torch
from cuda_graphs import capture
from losses_cases import leaf
from sm90_engine import GRADIENT_FLOAT16, assert_observed
from test_losses_sm90 import (
    BUDGETS,
    NAMES,
    PAIRS,
    call_at_level,
    make,
    make_pairs,
    module_of,
    observing,
    plans,  # noqa: F401  a fixture
    relative,
    run,
    run_in_float64,
)

from liger import losses

pytestmark = pytest.mark.gpu
FLOAT16 = torch.float16


def assert_gradients(actual, expected, tolerance=GRADIENT_FLOAT16):
    """``run`` halves the loss: the forward rounds twice the expected gradient, the backward its half.
    Elements of a mean are below 2^-14, where a rounding is 2^-25."""
    for a, b in zip(actual, expected, strict=True):
        rounded = ((2 * b).to(FLOAT16) * 0.5).double()
        error, most = relative(a, b), tolerance + relative(rounded, b)
        assert a.dtype == FLOAT16 and a.isfinite().all()
        assert error <= most, f"error {error:.3g}, allowed {most:.3g}"


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", NAMES)
def test_against_float64(sm90, plans, name, temperature, ignored, budget):  # noqa: F811
    hidden, weight, target = make(ignored=ignored, dtype=FLOAT16)
    module = module_of(name, temperature=temperature, memory_budget=BUDGETS[budget])
    ours = run(module, hidden, weight, target)
    assert plans[0] is not None and (len(plans[0]) > 1) == (budget == "chunks")
    exact = run_in_float64(module, hidden, weight, target)
    assert relative(ours[0], exact[0]) < 2e-5
    assert_gradients(ours[1:], exact[1:])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ["dpo", "token"])
def test_observed_tokens(sm90, plans, name, budget):  # noqa: F811
    hidden, weight, target = make(dtype=FLOAT16)
    options = {"temperature": 0.7, "memory_budget": BUDGETS[budget]}
    module = observing(name, **options)
    ours = run(module, hidden, weight, target)
    assert plans[0] is not None
    entropy, argmax = module.seen.entropy, module.seen.argmax
    assert_observed(hidden.flatten(0, 1), weight, target.flatten(), entropy.flatten(), argmax.flatten(), 0.7)
    assert_gradients(ours[1:], run_in_float64(module_of(name, **options), hidden, weight, target)[1:])


@pytest.mark.parametrize("spread", [4.0, 30.0], ids=["shifted", "recomputed"])
def test_targets_below_the_largest_logit(sm90, plans, spread):  # noqa: F811
    """Between the two steps of a chunk its rows keep their references and shifts."""
    hidden, weight, target = make(spread=spread, dtype=FLOAT16)
    logits = torch.nn.functional.linear(hidden.float(), weight.float())
    target = torch.where(target < 0, target, logits.argmin(-1))
    assert (logits.amax(-1) - logits.amin(-1)).median() > (41 if spread == 30 else 15)
    advantages = torch.linspace(-1, 2, len(target), device="cuda")

    def policy_gradient(module, hidden, weight, target):
        return module(hidden, weight, target, advantages=advantages)[0]

    module = losses.FusedLinearGRPOLoss(beta=0.0, memory_budget=BUDGETS["chunks"], temperature=0.7)
    ours, exact = (f(module, hidden, weight, target, policy_gradient) for f in (run, run_in_float64))
    assert plans[0] is not None and len(plans[0]) > 1
    assert abs(ours[0] - exact[0]) < 1e-5
    assert_gradients(ours[1:], exact[1:])


@pytest.mark.parametrize("shape", PAIRS)
@pytest.mark.parametrize("name", ["dpo", "simpo"])
def test_pairs_in_several_chunks(sm90, plans, name, shape):  # noqa: F811
    *sizes, budget = PAIRS[shape]
    half = sizes[0] // 2
    hidden, weight, target = make_pairs(*sizes, skipped=(0, 2, half + 1, half + 2), dtype=FLOAT16)
    module = module_of(name, memory_budget=budget)
    ours = run(module, hidden, weight, target)
    assert len(plans[0]) > 2
    exact = run_in_float64(module, hidden, weight, target)
    assert relative(ours[0], exact[0]) < 2e-5
    # Every chunk rounds the sum of the weight gradient once more.
    assert_gradients(ours[1:], exact[1:], tolerance=5e-4)
    assert not ours[1][target == -100].any()


@pytest.mark.parametrize("name", ["token", "dpo"])
def test_a_graph(sm90, name):
    hidden, weight, target = make(dtype=FLOAT16, spread=4.0)
    module = module_of(name, memory_budget=BUDGETS["chunks"])
    leaves = leaf(hidden), leaf(weight)

    def step():
        return torch.autograd.grad(call_at_level(module, *leaves, target), leaves)

    expected = step()
    graph, captured = capture(step)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
