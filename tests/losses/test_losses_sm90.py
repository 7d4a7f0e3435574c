# SPDX-License-Identifier: BSD-3-Clause
"""Losses by the products of compute capability 9.0: against float64, where they are used, and where they are
not."""

import math

import pytest
import torch
from cases import poison_memory
from cuda_graphs import no_synchronisation
from losses_cases import leaf
from sm90_engine import BFLOAT16, DTYPES, FLOAT16, GRADIENT_FLOAT16, assert_observed
from test_losses_op import EVERY, call

import liger
from liger import losses
from liger.losses import _chunks

pytestmark = pytest.mark.gpu

HIDDEN, VOCAB, LENGTH = 256, 1408, 96
# Logits of a part of the batch at a time; the units are sequences and pairs of 96 rows.
BUDGETS = {"whole": None, "chunks": 1100 << 10}
NAMES = [name for name in EVERY if name != "grpo"] + ["token"]
MIB = 1 << 20
# Sequences, their length, hidden size, classes, budget; each in several chunks.
PAIRS = {
    "odd lengths": (10, 77, 256, 1408, 1100 << 10),
    "wider": (8, 203, 512, 2048, 3 * MIB),
    # The product of the input gradient is in parts.
    "parts": (6, 150, 256, 8192, 8 * MIB),
    # Gradients go to their places some columns at a time.
    "few classes": (32, 128, 256, 256, 400 << 10),
    # The last tile of columns and the last panel of classes are partial.
    "partial tiles": (10, 77, 320, 1409, 1100 << 10),
    "partial tiles, wider": (8, 203, 576, 2050, 3 * MIB),
    # The last k-block is partial, too.
    "hidden 272": (10, 77, 272, 1409, 1100 << 10),
    "hidden 592": (8, 203, 592, 2050, 3 * MIB),
}


@pytest.fixture
def plans(monkeypatch):
    """What the engine was asked for and answered: the groups of each chunk, or None."""
    seen = []
    real = _chunks.Sm90Chunks.plan.__func__

    def plan(cls, *arguments):
        chunks = real(cls, *arguments)
        seen.append(chunks and chunks.slices)
        return chunks

    monkeypatch.setattr(_chunks.Sm90Chunks, "plan", classmethod(plan))
    return seen


def make(sequences=8, ignored=True, spread=1.0, dtype=torch.bfloat16):
    hidden = (torch.randn(sequences, LENGTH, HIDDEN, device="cuda") * spread).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, device="cuda") / HIDDEN**0.5).to(dtype)
    target = torch.randint(VOCAB, (sequences, LENGTH), device="cuda")
    if ignored:
        target[:, -17:] = target[1, 30:] = target[:, 3] = -100
    return hidden, weight, target


def module_of(name, **how):
    make_module, options = EVERY["grpo" if name == "token" else name]
    return make_module(**({} if name == "token" else options), **how)


def observing(name, **how):
    """A loss that computes all metrics of tokens, and keeps the metrics of its last call as ``seen``."""
    module = module_of(name, metrics=losses.TokenMetrics._fields, **how)
    module.register_forward_hook(lambda module, _, result: setattr(module, "seen", result[1]))
    return module


def call_at_level(module, hidden, weight, target):
    """With references near the log-probabilities: far from them, gradients leave the range of floats."""
    return call(module, hidden, weight, target, None, level=-math.log(VOCAB))


def run(module, hidden, weight, target, function=call_at_level):
    leaves = leaf(hidden), leaf(weight)
    poison_memory()
    loss = function(module, *leaves, target)
    return [loss.detach(), *torch.autograd.grad(loss * 0.5, leaves)]


def run_in_float64(module, hidden, weight, target, function=call_at_level):
    with liger.use_backend("torch"):
        return run(module, hidden.double(), weight.double(), target, function)


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def assert_gradients(actual, expected, dtype, of_float16=GRADIENT_FLOAT16):
    """One rounding to bfloat16 is 1.7e-3; scales and sums of chunks in 16 bits add as much at most.

    In float16 ``run`` halves the loss: the forward rounds twice the expected gradient, the backward its
    half. Elements of a mean are below 2^-14, where a rounding is 2^-25.
    """
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == dtype and a.isfinite().all()
        most = 3.4e-3
        if dtype == FLOAT16:
            most = of_float16 + relative(((2 * b).to(FLOAT16) * 0.5).double(), b)
        error = relative(a, b)
        assert error <= most, f"error {error:.3g}, allowed {most:.3g}"


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", NAMES)
@DTYPES
def test_against_float64(sm90, plans, dtype, name, temperature, ignored, budget):
    hidden, weight, target = make(ignored=ignored, dtype=dtype)
    module = module_of(name, temperature=temperature, memory_budget=BUDGETS[budget])
    ours = run(module, hidden, weight, target)
    assert plans[0] is not None and (len(plans[0]) > 1) == (budget == "chunks")
    exact = run_in_float64(module, hidden, weight, target)
    assert relative(ours[0], exact[0]) < 2e-5
    assert_gradients(ours[1:], exact[1:], dtype)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("dtype", "name"), [*((BFLOAT16, name) for name in NAMES), (FLOAT16, "dpo"), (FLOAT16, "token")], ids=str
)
def test_observed_tokens(sm90, plans, dtype, name, temperature, budget):
    hidden, weight, target = make(dtype=dtype)
    options = {"temperature": temperature, "memory_budget": BUDGETS[budget]}
    module = observing(name, **options)
    ours = run(module, hidden, weight, target)
    assert plans[0] is not None and (len(plans[0]) > 1) == (budget == "chunks")
    entropy, argmax = module.seen.entropy, module.seen.argmax
    assert entropy.shape == argmax.shape == target.shape
    assert_observed(
        hidden.flatten(0, 1), weight, target.flatten(), entropy.flatten(), argmax.flatten(), temperature
    )
    exact = run_in_float64(module_of(name, **options), hidden, weight, target)
    assert relative(ours[0], exact[0]) < 2e-5
    assert_gradients(ours[1:], exact[1:], dtype)


@pytest.mark.parametrize("budget", BUDGETS)
def test_observed_tokens_far_from_their_targets(sm90, plans, budget):
    hidden, weight, target = make(spread=30.0)
    module = losses.FusedLinearGRPOLoss(
        beta=0.0, memory_budget=BUDGETS[budget], temperature=0.7, metrics=("entropy", "argmax")
    )
    advantages = torch.linspace(-1, 2, len(target), device="cuda")
    _, metrics = module(hidden, leaf(weight), target, advantages=advantages)
    assert plans[0] is not None
    observed = metrics.entropy.flatten(), metrics.argmax.flatten()
    assert_observed(hidden.flatten(0, 1), weight, target.flatten(), *observed, 0.7)


def test_targets_far_below_the_largest_logit(sm90, plans):
    """Sums of exponentials from the target's leave the range of floats, and are made again."""
    hidden, weight, target = make(spread=30.0)
    advantages = torch.linspace(-1, 2, len(target), device="cuda")

    def policy_gradient(module, hidden, weight, target):
        return module(hidden, weight, target, advantages=advantages)[0]

    module = losses.FusedLinearGRPOLoss(beta=0.0, memory_budget=BUDGETS["chunks"], temperature=0.7)
    ours, exact = (f(module, hidden, weight, target, policy_gradient) for f in (run, run_in_float64))
    assert plans[0] is not None
    assert abs(ours[0] - exact[0]) < 1e-5
    assert_gradients(ours[1:], exact[1:], BFLOAT16)


@pytest.mark.parametrize("spread", [4.0, 30.0], ids=["shifted", "recomputed"])
def test_targets_below_the_largest_logit_in_float16(sm90, plans, spread):
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
    assert_gradients(ours[1:], exact[1:], FLOAT16)


@pytest.mark.parametrize("name", ["dpo", "kto", "token"])
def test_parts_of_the_gradient(sm90, name):
    hidden, weight, target = make()
    module = module_of(name, memory_budget=BUDGETS["chunks"])
    both = run(module, hidden, weight, target)[1:]
    for i in (0, 1):
        tensors = [hidden, weight]
        tensors[i] = leaf(tensors[i])
        (alone,) = torch.autograd.grad(call_at_level(module, *tensors, target) * 0.5, tensors[i])
        assert relative(alone, both[i].double()) < 3e-3


def test_nothing_counts(sm90):
    hidden, weight, target = make()
    results = run(module_of("token"), hidden, weight, torch.full_like(target, -100))
    assert all(t.count_nonzero() == 0 for t in results)


def test_where_the_engine_is_not_used(sm90, plans):
    hidden, weight, target = make()
    for changed in ({"softcap": 30.0}, {"memory_budget": 2 * 64 * VOCAB}):
        run(module_of("dpo", **changed), hidden, weight, target)
    run(module_of("dpo"), hidden.float(), weight.float(), target)
    run(module_of("dpo"), hidden[:2], weight, target[:2])
    # An entropy that is differentiated.
    with_bonus = losses.FusedLinearGRPOLoss(beta=0.0, entropy_coef=0.1, metrics=("argmax",))
    run(with_bonus, hidden, weight, target)
    assert plans == [None] * 5


def make_pairs(sequences, length, hidden_size, vocab, skipped=(), dtype=torch.bfloat16):
    """A quarter of the tokens does not count, nor does any of the skipped sequences."""
    hidden = torch.randn(sequences, length, hidden_size, device="cuda").to(dtype)
    weight = (torch.randn(vocab, hidden_size, device="cuda") / hidden_size**0.5).to(dtype)
    target = torch.randint(vocab, (sequences, length), device="cuda")
    target[torch.rand(target.shape, device="cuda") < 0.25] = -100
    target[list(skipped)] = -100
    return hidden, weight, target


@pytest.mark.parametrize("shape", PAIRS)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [(BFLOAT16, "dpo"), (BFLOAT16, "orpo"), (BFLOAT16, "simpo"), (FLOAT16, "dpo"), (FLOAT16, "simpo")],
    ids=str,
)
def test_pairs_in_several_chunks(sm90, plans, dtype, name, shape):
    *sizes, budget = PAIRS[shape]
    half = sizes[0] // 2
    # Both answers of a pair without a token that counts, one that was chosen, one that was rejected. (What
    # the odds of the empty answer are depends on the dtype.)
    alone = () if name == "orpo" else (0, half + 1)
    hidden, weight, target = make_pairs(*sizes, skipped=(2, half + 2, *alone), dtype=dtype)
    module = module_of(name, memory_budget=budget)
    ours = run(module, hidden, weight, target)
    assert len(plans[0]) > 2
    exact = run_in_float64(module, hidden, weight, target)
    assert relative(ours[0], exact[0]) < 2e-5
    # Every chunk rounds the sum of a float16 weight gradient once more.
    assert_gradients(ours[1:], exact[1:], dtype, of_float16=5e-4)
    assert not ours[1][target == -100].any()
    if dtype == FLOAT16:
        return  # in which small rows have an absolute error
    # Row by row: none in the place of another, however small its gradient is.
    errors = (ours[1].double() - exact[1]).norm(dim=-1) / exact[1].norm(dim=-1).clamp_min(1e-30)
    assert errors[exact[1].count_nonzero(-1) > 0].max() < 2e-2


def test_pairs_by_torchs_products(sm90, plans):
    """Which a bias of zeros is left to; they round the logits to bfloat16."""
    *sizes, budget = PAIRS["odd lengths"]
    hidden, weight, target = make_pairs(*sizes, skipped=(1,))
    module, zeros = module_of("dpo", memory_budget=budget), torch.zeros(sizes[-1], device=sm90).bfloat16()

    def with_bias(module, hidden, weight, target):
        return call(module, hidden, weight, target, zeros, level=-math.log(VOCAB))

    ours = run(module, hidden, weight, target)
    others = run(module, hidden, weight, target, with_bias)
    assert plans[0] is not None and plans[1] is None
    assert all(relative(a, b.double()) < 3e-2 for a, b in zip(ours, others, strict=True))


STRIDED = {
    "rows apart": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "rows not on 16 bytes": lambda x: torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]],
    "columns apart": lambda x: torch.stack([x, x], -1)[..., 0],
    "positions first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("strides", STRIDED)
@pytest.mark.parametrize("name", ["dpo", "kto", "token"])
def test_hidden_states_with_strides(sm90, plans, name, strides):
    *sizes, budget = PAIRS["odd lengths"]
    hidden, weight, target = make_pairs(*sizes, skipped=(1,))
    module, weight = module_of(name, memory_budget=budget), leaf(weight)
    results = []
    for x in (hidden, STRIDED[strides](hidden)):
        x = x.detach().requires_grad_()
        loss = call_at_level(module, x, weight, target)
        results.append([loss.detach(), *torch.autograd.grad(loss, (x, weight))])
    assert not x.is_contiguous() and all(len(plan) > 1 for plan in plans)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_targets_of_either_type(sm90):
    *sizes, budget = PAIRS["odd lengths"]
    hidden, weight, target = make_pairs(*sizes, skipped=(1,))
    module = module_of("dpo", memory_budget=budget)
    both = (run(module, hidden, weight, t) for t in (target, target.int()))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("room", [64, 200, 512, 4096])
def test_rows_go_to_their_places(sm90, room):
    """By way of memory that has room for so many bytes of each row."""
    rows, hidden = 1003, 256
    x = torch.randn(rows, hidden, device=sm90).bfloat16()
    position = torch.randperm(rows, device=sm90, dtype=torch.int32)
    position[torch.rand(rows, device=sm90) < 0.25] = -1
    expected = torch.where(position.unsqueeze(1) >= 0, x[position.clamp_min(0)], 0)
    memory = torch.full((rows * room,), 255, dtype=torch.uint8, device=sm90)
    torch.ops.liger_sm90.permute_rows(position, memory, x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("name", ["token", "kto", "orpo", "dpo"])
def test_peak_memory(sm90, plans, name):
    """What benchmarks/ asks for: both gradients are 1066 MiB of it."""
    hidden = torch.randn(8, 1024, 4096, dtype=torch.bfloat16, device=sm90).requires_grad_()
    weight = torch.randn(128256, 4096, dtype=torch.bfloat16, device=sm90).mul_(1 / 64).requires_grad_()
    target = torch.randint(128256, (8, 1024), device=sm90)
    target[:, :100] = -100
    module = module_of(name)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call_at_level(module, hidden, weight, target).backward()
    used = torch.cuda.max_memory_allocated() - before
    assert len(plans[0]) == 3
    assert 1066 * MIB < used <= 1600 * MIB


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("name", ["token", "dpo"])
@pytest.mark.parametrize(("dtype", "spread"), [(BFLOAT16, 1.0), (FLOAT16, 4.0)], ids=str)
def test_cuda_graph_and_no_synchronisation(sm90, dtype, spread, name, observed):
    hidden, weight, target = make(spread=spread, dtype=dtype)
    module = (observing if observed else module_of)(name, memory_budget=BUDGETS["chunks"])
    leaves = leaf(hidden), leaf(weight)

    def step():
        grads = torch.autograd.grad(call_at_level(module, *leaves, target), leaves)
        return [*grads, *module.seen[-3:]] if observed else grads

    expected = step()
    with no_synchronisation():
        step()
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
