# SPDX-License-Identifier: BSD-3-Clause
"""Exponentials that fused_linear_logprobs keeps on compute capability 9.0: when, how long, and for which
callers."""

import dataclasses

import pytest
import torch
from cases import poison_memory
from cross_entropy_reference import random_layer
from cuda_graphs import capture, no_synchronisation
from logprobs_sm90 import ENTROPY, KEPT, assert_gradients, exact, run, upstream
from sm90_engine import BESIDE, BFLOAT16, DTYPES, KINDS, MIB, PARTIAL_SUMS, SUMS, Shape
from torch.utils.checkpoint import checkpoint

import liger
from liger._core.head import kept_logits

pytestmark = pytest.mark.gpu


@ENTROPY
@KINDS
@DTYPES
def test_the_backward_can_run_again(sm90, dtype, shape, entropy):
    """It does not change what the forward has kept."""
    x, weight, target = shape.layer(sm90, scale=2.0, dtype=dtype)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    found = liger.fused_linear_logprobs(
        x, weight, target, temperature=0.7, memory_budget=shape.budget, metrics=("entropy",), recompute=False
    )
    both = upstream(shape, sm90, True)
    asked = both if entropy else both[:1]

    def gradients(leaves=(x, weight), grads=asked, retain_graph=True):
        poison_memory()
        return torch.autograd.grad(found[: len(grads)], leaves, grads, retain_graph=retain_graph)

    first = gradients()
    # Of the other kind, and of one tensor alone.
    gradients(grads=both[:1] if entropy else both)
    (alone,) = gradients(leaves=(x,))
    again = gradients(retain_graph=False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    if not entropy:  # whose chunks depend on the gradients that are needed
        assert torch.equal(alone, first[0])
    with pytest.raises(RuntimeError, match="second time"):
        gradients()


@DTYPES
@pytest.mark.parametrize("shape", [BESIDE, PARTIAL_SUMS], ids=["one chunk", "partial tiles"])
def test_compiled(sm90, calls, shape, dtype):
    x, weight, target = shape.layer(sm90, dtype=dtype)
    grads = upstream(shape, sm90, True)

    def function(x, weight, target):
        return liger.fused_linear_logprobs(
            x, weight, target, temperature=0.7, metrics=("entropy",), recompute=False
        )

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    results = []
    for f in (function, compiled):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        found = f(*leaves, target)
        results.append(torch.autograd.grad((found.logprobs, found.entropy), leaves, grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert calls == [("forward", True), ("backward", True)] * 2


def test_checkpointing(sm90):
    x, weight, target = BESIDE.layer(sm90)
    results = []
    for wrap in (lambda f, *t: f(*t), lambda f, *t: checkpoint(f, *t, use_reentrant=False)):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs = wrap(
            lambda *t: liger.fused_linear_logprobs(*t, temperature=0.7, recompute=False), *leaves, target
        )
        results.append(torch.autograd.grad(logprobs.sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@KEPT
@ENTROPY
@pytest.mark.parametrize("shape", [BESIDE, SUMS], ids=["one chunk", "sums"])
def test_cuda_graph_and_no_synchronisation(sm90, shape, entropy, recompute):
    x, weight, target = shape.layer(sm90)
    leaves = x.requires_grad_(), weight.requires_grad_()
    grads = upstream(shape, sm90, entropy)

    def step():
        found = liger.fused_linear_logprobs(
            *leaves, target, temperature=0.7, memory_budget=shape.budget, metrics=("entropy",),
            recompute=recompute,
        )  # fmt: skip
        return torch.autograd.grad(found[: len(grads)], leaves, grads)

    expected = step()
    with no_synchronisation():
        step()
    graph, captured = capture(step)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_no_second_derivative(sm90):
    x, weight, target = BESIDE.layer(sm90)
    x.requires_grad_()
    logprobs = liger.fused_linear_logprobs(x, weight, target, recompute=False)
    (grad,) = torch.autograd.grad(logprobs.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="fused_linear_logprobs is not differentiable"):
        grad.float().sum().backward()


# --- the choice, and memory ---------------------------------------------------------------------------------

# Exponentials of 500 MiB, which the default budget holds; gradients of 16 and 250 MiB.
LARGE = Shape(4096, 2048, 64000)


@DTYPES
def test_the_budget_decides(sm90, calls, dtype):
    x, weight, target = BESIDE.layer(sm90, dtype=dtype)
    x.requires_grad_()
    needed = kept_logits.exponentials_bytes(BESIDE.rows, BESIDE.vocab)
    for budget, recompute, kept in (
        (None, None, True), (needed, None, True), (needed - 1, None, False), (needed - 1, False, True),
        (needed, True, False),
    ):  # fmt: skip
        calls.clear()
        liger.fused_linear_logprobs(
            x, weight, target, temperature=0.7, memory_budget=budget, recompute=recompute
        ).sum().backward()
        assert calls == [("forward", kept), ("backward", kept)]


@ENTROPY
def test_memory(sm90, calls, entropy):
    x, weight, _, _ = random_layer(LARGE.rows, LARGE.hidden, LARGE.vocab, sm90)
    leaves = x.to(BFLOAT16).requires_grad_(), weight.to(BFLOAT16).requires_grad_()
    target = torch.randint(LARGE.vocab, (LARGE.rows,), device=sm90)
    del x, weight
    budget = 64 * MIB
    before = torch.cuda.memory_allocated()

    def beyond():
        return (torch.cuda.memory_allocated() - before) / MIB

    def peak():
        found = (torch.cuda.max_memory_allocated() - before) / MIB
        torch.cuda.reset_peak_memory_stats()
        return found

    torch.cuda.reset_peak_memory_stats()
    found = liger.fused_linear_logprobs(*leaves, target, metrics=("entropy", "argmax") if entropy else ())
    rows = kept_logits.exponentials_bytes(LARGE.rows, LARGE.vocab) / MIB
    assert rows == 500
    assert rows < beyond() <= rows + 1
    # The gathered rows, and sums of rows and tiles.
    assert peak() <= rows + 16 + 12
    results = found[:2] if entropy else (found,)
    torch.autograd.backward(results, [torch.ones_like(r) for r in results])
    gradients = 16 + 250
    # A second matrix in chunks of the default budget, of which the memory of the gradient holds a part.
    assert peak() <= rows + gradients + (512 + 32 if entropy else 16)
    del found, results
    assert gradients <= beyond() <= gradients + 5
    assert calls == [("forward", True), ("backward", True)]
    # Without kept exponentials the budget bounds everything but the gradients.
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.reset_peak_memory_stats()
    liger.fused_linear_logprobs(*leaves, target, temperature=0.7, memory_budget=budget).sum().backward()
    assert calls[2:] == [("forward", False), ("backward", False)]
    assert peak() <= gradients + 64 + 40


def test_without_gradients_nothing_is_kept(sm90, calls):
    x, weight, target = BESIDE.layer(sm90)
    with torch.no_grad():
        liger.fused_linear_logprobs(x.requires_grad_(), weight, target, temperature=0.7, recompute=False)
    assert calls == [("forward", False)]


def test_smaller_than_the_engine_takes(sm90, calls):
    """Logits are kept instead."""
    shape = dataclasses.replace(BESIDE, rows=200)
    x, weight, target = shape.layer(sm90)
    grads = upstream(shape, sm90, True)
    _, actual = run(shape, x, weight, target, grads, recompute=False)
    _, expected = exact(x, weight, target, grads)
    assert_gradients(actual, expected, target == -100, (True, True), 3e-2)
    assert calls == []
