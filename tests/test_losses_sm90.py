"""Losses by the products of compute capability 9.0: against float64, where they are used, and where they are not."""

import math

import pytest
import torch
from losses_cases import leaf
from sm90_engine import assert_observed, engine_device
from test_losses_op import EVERY, call

import liger
from liger import losses
from liger.losses import _chunks

pytestmark = pytest.mark.gpu

HIDDEN, VOCAB, LENGTH = 256, 1408, 96
# Logits of a part of the batch at a time; the units are sequences and pairs of 96 rows.
BUDGETS = {"whole": None, "chunks": 1100 << 10}
NAMES = [name for name in EVERY if name != "grpo"] + ["token"]


@pytest.fixture
def gpu():
    device = engine_device()
    with liger.use_backend("cuda"):
        yield device


@pytest.fixture
def plans(monkeypatch):
    """What the engine was asked for and answered: chunks, or None."""
    seen = []
    real = _chunks.Sm90Chunks.plan.__func__

    def plan(cls, *arguments):
        seen.append(real(cls, *arguments))
        return seen[-1]

    monkeypatch.setattr(_chunks.Sm90Chunks, "plan", classmethod(plan))
    return seen


def make(sequences=8, ignored=True, spread=1.0):
    hidden = (torch.randn(sequences, LENGTH, HIDDEN, device="cuda") * spread).bfloat16()
    weight = (torch.randn(VOCAB, HIDDEN, device="cuda") / HIDDEN**0.5).bfloat16()
    target = torch.randint(VOCAB, (sequences, LENGTH), device="cuda")
    if ignored:
        target[:, -17:] = target[1, 30:] = target[:, 3] = -100
    return hidden, weight, target


def module_of(name, **how):
    make_module, options = EVERY["grpo" if name == "token" else name]
    return make_module(**({} if name == "token" else options), **how)


def call_at_level(module, hidden, weight, target):
    """With references near the log-probabilities: far from them, gradients leave the range of floats."""
    return call(module, hidden, weight, target, None, level=-math.log(VOCAB))


def run(module, hidden, weight, target, function=call_at_level):
    leaves = leaf(hidden), leaf(weight)
    loss = function(module, *leaves, target)
    return [loss.detach(), *torch.autograd.grad(loss * 0.5, leaves)]


def run_in_float64(module, hidden, weight, target, function=call_at_level):
    with liger.use_backend("torch"):
        return run(module, hidden.double(), weight.double(), target, function)


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", NAMES)
def test_against_float64(gpu, plans, name, temperature, ignored, budget):
    hidden, weight, target = make(ignored=ignored)
    module = module_of(name, temperature=temperature, memory_budget=BUDGETS[budget])
    ours = run(module, hidden, weight, target)
    assert plans[0] is not None and (len(plans[0].slices) > 1) == (budget == "chunks")
    exact = run_in_float64(module, hidden, weight, target)
    assert relative(ours[0], exact[0]) < 2e-5
    # One rounding to bfloat16 is 1.7e-3; scales and sums of chunks in 16 bits add as much at most.
    assert all(relative(a, b) < 3.4e-3 for a, b in zip(ours[1:], exact[1:], strict=True))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", NAMES)
def test_observed_tokens(gpu, plans, name, temperature, budget):
    hidden, weight, target = make()
    seen = []
    options = {"temperature": temperature, "memory_budget": BUDGETS[budget]}
    ours = run(module_of(name, observe=seen.append, **options), hidden, weight, target)
    assert plans[0] is not None and (len(plans[0].slices) > 1) == (budget == "chunks")
    ((_, entropy, argmax),) = seen
    assert entropy.shape == argmax.shape == target.shape
    assert_observed(
        hidden.flatten(0, 1), weight, target.flatten(), entropy.flatten(), argmax.flatten(), temperature
    )
    exact = run_in_float64(module_of(name, **options), hidden, weight, target)
    assert relative(ours[0], exact[0]) < 2e-5
    assert all(relative(a, b) < 3.4e-3 for a, b in zip(ours[1:], exact[1:], strict=True))


@pytest.mark.parametrize("budget", BUDGETS)
def test_observed_tokens_far_from_their_targets(gpu, plans, budget):
    hidden, weight, target = make(spread=30.0)
    seen = []
    module = losses.FusedLinearGRPOLoss(
        beta=0.0, memory_budget=BUDGETS[budget], temperature=0.7, observe=seen.append
    )
    module(hidden, leaf(weight), target, None, torch.linspace(-1, 2, len(target), device="cuda"))
    assert plans[0] is not None
    ((_, entropy, argmax),) = seen
    assert_observed(hidden.flatten(0, 1), weight, target.flatten(), entropy.flatten(), argmax.flatten(), 0.7)


def test_targets_far_below_the_largest_logit(gpu, plans):
    """Sums of exponentials from the target's leave the range of floats, and are made again."""
    hidden, weight, target = make(spread=30.0)
    advantages = torch.linspace(-1, 2, len(target), device="cuda")

    def policy_gradient(module, hidden, weight, target):
        return module(hidden, weight, target, None, advantages)[0]

    module = losses.FusedLinearGRPOLoss(beta=0.0, memory_budget=BUDGETS["chunks"], temperature=0.7)
    ours, exact = (f(module, hidden, weight, target, policy_gradient) for f in (run, run_in_float64))
    assert plans[0] is not None
    assert abs(ours[0] - exact[0]) < 1e-5
    assert all(relative(a, b) < 3.4e-3 for a, b in zip(ours[1:], exact[1:], strict=True))


@pytest.mark.parametrize("name", ["dpo", "kto", "token"])
def test_parts_of_the_gradient(gpu, name):
    hidden, weight, target = make()
    module = module_of(name, memory_budget=BUDGETS["chunks"])
    both = run(module, hidden, weight, target)[1:]
    for i in (0, 1):
        tensors = [hidden, weight]
        tensors[i] = leaf(tensors[i])
        (alone,) = torch.autograd.grad(call_at_level(module, *tensors, target) * 0.5, tensors[i])
        assert relative(alone, both[i].double()) < 3e-3


def test_nothing_counts(gpu):
    hidden, weight, target = make()
    results = run(module_of("token"), hidden, weight, torch.full_like(target, -100))
    assert all(t.count_nonzero() == 0 for t in results)


def test_where_the_engine_is_not_used(gpu, plans):
    hidden, weight, target = make()
    for changed in ({"softcap": 30.0}, {"memory_budget": 2 * 64 * VOCAB}):
        run(module_of("dpo", **changed), hidden, weight, target)
    run(module_of("dpo"), hidden.half(), weight.half(), target)
    run(module_of("dpo"), hidden[:2], weight, target[:2])
    # An entropy that is differentiated.
    with_bonus = losses.FusedLinearGRPOLoss(beta=0.0, entropy_coef=0.1, observe=lambda tokens: None)
    run(with_bonus, hidden, weight, target)
    assert plans == [None] * 5


@pytest.mark.parametrize("observed", [False, True])
def test_cuda_graph_and_no_synchronisation(gpu, observed):
    hidden, weight, target = make()
    seen = []
    module = module_of("token", memory_budget=BUDGETS["chunks"], observe=seen.append if observed else None)
    leaves = leaf(hidden), leaf(weight)

    def step():
        seen.clear()
        grads = torch.autograd.grad(call_at_level(module, *leaves, target), leaves)
        return [*grads, *(t for tokens in seen for t in tokens)]

    expected = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for a, b in zip(captured, expected, strict=True):
        assert torch.equal(a, b)
