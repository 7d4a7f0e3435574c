# SPDX-License-Identifier: BSD-3-Clause
"""Log-probabilities with a vocabulary that is sharded over ranks, on the engine of compute capability 9.0:
one device computes all shards in turn, and what the ranks exchange is added in between."""

from functools import partial
from unittest.mock import patch

import in_shards
import pytest
import torch
from cases import poison_memory
from cuda_graphs import capture, no_synchronisation
from logprob_shards_sm90 import heads_of, plans_of, run_backward, run_forward, run_ranks
from logprobs_sm90 import ENTROPY, KEPT, assert_gradients, exact, tolerance_of, upstream
from processes import needs_gloo, on_processes
from shard_logprob_steps import LogProbSteps
from shards_sm90 import SHAPES, even_bounds, surprising
from sm90_engine import MIB, ROWS, assert_observed

import liger
from liger.distributed.vocab import sm90, sm90_logprobs

gpu = pytest.mark.gpu

SUMS, ONE_CHUNK = SHAPES["sums"], SHAPES["beside it"]


def check(shape, bounds, x, weight, target, entropy=False, trained=(True, True), temperature=1.0, **how):
    """Results and gradients against float64. Rows of ignored targets may hold NaN.

    ``tolerance``: of the norm of a gradient, where single rows may be less exact: those with one probable
    class and another target have a small gradient of their entropy, from a rounded exponential.
    """
    if x.is_cuda:
        poison_memory()
    tolerance, logits_error = how.pop("tolerance", None), how.pop("logits_error", ROWS)
    grads = upstream(shape, x.device, entropy)
    found = run_ranks(shape, bounds, x, weight, target, grads, trained, temperature, **how)
    logprobs, expected = exact(x, weight, target, grads, trained, temperature)
    ignored = target == -100
    assert (found.logprobs - logprobs).abs().max() <= logits_error * logprobs.abs().max()
    assert not found.logprobs[ignored].any()
    if how.get("metrics", True):
        clean = x.where(~ignored[:, None], 0.0)
        assert_observed(clean, weight, target, found.entropy, found.argmax, temperature)
    if tolerance is None:
        tolerances = [tolerance_of(e, torch.bfloat16, entropy) for e in expected]
        return assert_gradients(found.grads, expected, ignored, trained, tolerances, x.dtype)
    for name, actual, wanted in zip(("first", "second"), found.grads, expected, strict=False):
        assert actual.isfinite().all(), name
        error = ((actual.double() - wanted).norm() / wanted.norm()).item()
        assert error <= tolerance, f"{name} gradient: error {error:.3g}, allowed {tolerance:.3g}"


def test_the_shapes_are_what_they_are_named():
    """Of the backwards of two ranks on an H200."""
    plans = {name: plans_of(shape, 2)[1] for name, shape in SHAPES.items()}
    several = {name for name, plan in plans.items() if len(plan.chunks) > 1}
    split = {name for name, plan in plans.items() if max(c.k_splits for c in plan.chunks) > 1}
    assert several >= {"sums", "sums, larger", "split-K, chunks", "partial tiles, sums", "few columns"}
    assert split >= {"split-K", "split-K, chunks"} and not split & {"sums, whole waves"}
    assert not several & {"in the weight gradient", "beside it", "split-K"}


@pytest.mark.parametrize("name", SHAPES)
def test_plans_of_kept_exponentials(name):
    """One chunk in the forward and in the backward; with a gradient of entropies chunks within the budget."""
    shape = SHAPES[name]
    forward, backward = plans_of(shape, 2, keep=True)
    assert [len(plan.chunks) for plan in (forward, backward)] == [1, 1] and forward[:4] == backward[:4]
    assert forward.workspace_panel_bytes % (128 * 256) == 0 == forward.rows_in_grad_weight
    assert forward.workspace_panel_bytes >= 256 * shape.rows and forward.chunks[0].k_splits == 1
    assert plans_of(shape, 2, True, True)[1] == plans_of(shape, 2, True)[1]


@pytest.mark.covering(2)
@KEPT
@ENTROPY
@pytest.mark.parametrize(("ranks", "scale"), [(2, 1.0), (1, 40.0), (3, 40.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rules_without_a_gpu(ranks, dtype, scale, entropy, recompute, monkeypatch):
    """With steps in torch that round as the engine does, except for the sum of weight gradients."""
    monkeypatch.setattr(sm90, "steps", LogProbSteps)
    monkeypatch.setattr(LogProbSteps, "moved", 0)
    monkeypatch.setattr(LogProbSteps, "overflows", 0)
    x, weight, target = (t.to(dtype) if t.is_floating_point() else t for t in SUMS.layer("cpu"))
    if scale > 1.0:
        x, weight, target = surprising(SUMS, scale, x, weight, target)
    x[target == -100] = torch.nan
    how = {"temperature": 0.8, "keep": not recompute}
    if dtype == torch.float32:
        how["tolerance"] = 1e-5 if scale == 1.0 else 5e-5
    elif scale > 1.0:
        how["tolerance"] = 8e-3 if entropy else 4e-3
    if scale > 1.0:
        how["logits_error"] = 2e-5
    check(SUMS, even_bounds(SUMS.vocab, ranks), x, weight, target, entropy, **how)
    # The references of a backward that computes again are such that no tile overflows.
    assert (LogProbSteps.moved > 0) == (scale > 1.0 and ranks > 1 and not recompute)


@gpu
@KEPT
@ENTROPY
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_every_kind_of_plan(shards, name, ranks, entropy, recompute):
    shape = SHAPES[name]
    x, weight, target = shape.layer(shards)
    x[target == -100] = torch.nan
    bounds = even_bounds(shape.vocab, ranks)
    check(shape, bounds, x, weight, target, entropy, temperature=0.7, keep=not recompute)


@gpu
@pytest.mark.parametrize("bounds", [(0, 1, 2305), (0, 2200, 2305), (0, 128, 129, 2305)], ids=str)
def test_shards_of_any_size(shards, bounds):
    """Targets are in one shard or the other; rows of a shard have none."""
    for keep in (False, True):
        check(SUMS, bounds, *SUMS.layer(shards), entropy=True, keep=keep)


@gpu
@KEPT
@ENTROPY
@pytest.mark.parametrize("trained", [(True, False), (False, True)], ids=str)
def test_only_what_is_trained(shards, trained, entropy, recompute):
    check(SUMS, even_bounds(SUMS.vocab, 2), *SUMS.layer(shards), entropy, trained, keep=not recompute)


@gpu
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_without_metrics(shards, temperature):
    """The logits GEMM of the forward has its epilogue during the next mainloop from a hidden size of 720
    on."""
    for shape in (SUMS, SHAPES["sums, larger"]):
        for keep in (False, True):
            bounds = even_bounds(shape.vocab, 2)
            layer = shape.layer(shards)
            check(shape, bounds, *layer, temperature=temperature, metrics=False, keep=keep)


@gpu
@KEPT
@ENTROPY
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("scale", [20.0, 60.0])
def test_rows_that_overflow(shards, ranks, scale, entropy, recompute):
    shape = SHAPES["sums, larger"]
    layer = surprising(shape, scale, *shape.layer(shards))
    tolerance = 8e-3 if entropy else 4e-3
    bounds = even_bounds(shape.vocab, ranks)
    check(shape, bounds, *layer, entropy, tolerance=tolerance, logits_error=2e-5, keep=not recompute)


@gpu
@KEPT
@ENTROPY
def test_a_row_of_nan(shards, entropy, recompute):
    """Its tile is computed again relative to other references, which leaves no trace in other rows."""
    x, weight, target = SUMS.layer(shards, ignored=0.0)
    weight[: SUMS.vocab // 2] /= 64
    x = 20 * x
    target[:2] = 3
    grads = upstream(SUMS, shards, entropy)
    clean = run_ranks(SUMS, even_bounds(SUMS.vocab, 2), x, weight, target, grads, keep=not recompute)
    x[0] = torch.nan
    found = run_ranks(SUMS, even_bounds(SUMS.vocab, 2), x, weight, target, grads, keep=not recompute)
    assert found.logprobs[0].isnan() and found.entropy[0].isnan() and found.grads[0][0].isnan().all()
    torch.testing.assert_close(found.logprobs[1:], clean.logprobs[1:], rtol=1e-5, atol=1e-4)
    rest, others = found.grads[0][1:].double(), clean.grads[0][1:].double()
    assert rest.isfinite().all() and (rest - others).norm() <= 2e-2 * others.norm()


@gpu
def test_targets_that_are_no_class(shards):
    """A row of NaN on all ranks; the results of others are theirs."""
    x, weight, target = SUMS.layer(shards, ignored=0.0)
    target[5], target[7] = SUMS.vocab, -3
    heads = heads_of(SUMS, even_bounds(SUMS.vocab, 2), x, weight, target)
    found = run_forward(heads)
    logprobs = found[0][0].logprobs
    assert logprobs[[5, 7]].isnan().all() and logprobs.isnan().sum() == 2
    grad_input, _ = run_backward(heads, found, upstream(SUMS, shards, False))
    assert grad_input[[5, 7]].isnan().all() and grad_input.isnan().any(1).sum() == 2


@gpu
@KEPT
@ENTROPY
@pytest.mark.parametrize("name", ["sums, larger", "split-K, chunks", "partial tiles, sums"])
def test_the_same_bits_twice_and_inputs_untouched(shards, name, entropy, recompute):
    shape = SHAPES[name]
    x, weight, target = shape.layer(shards)
    grads = upstream(shape, shards, entropy)
    copies = [t.clone() for t in (x, weight, target, *grads)]
    runs = []
    for fill in (0.0, torch.nan):
        garbage = torch.full((64 * MIB,), fill, device=shards)
        del garbage
        bounds = even_bounds(shape.vocab, 2)
        found = run_ranks(shape, bounds, x, weight, target, grads, keep=not recompute)
        runs.append([*found[:3], *found.grads])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
    for tensor, copy in zip((x, weight, target, *grads), copies, strict=True):
        assert torch.equal(tensor, copy)


@gpu
@ENTROPY
def test_a_backward_runs_again(shards, entropy):
    """Kept exponentials are only read."""
    x, weight, target = ONE_CHUNK.layer(shards)
    heads = heads_of(ONE_CHUNK, even_bounds(ONE_CHUNK.vocab, 2), x, weight, target)
    found = run_forward(heads, keep=True)
    grads = upstream(ONE_CHUNK, shards, entropy)
    for first, second in zip(*(run_backward(heads, found, grads) for _ in range(2)), strict=True):
        assert torch.equal(first, second)


@gpu
@KEPT
@ENTROPY
@pytest.mark.parametrize("valid", [0, 1, 300])
def test_few_valid_rows(shards, valid, entropy, recompute):
    """Whole chunks without any."""
    x, weight, target = SUMS.layer(shards, ignored=0.0)
    target[valid:] = -100
    x[valid:] = torch.nan
    grads = upstream(SUMS, shards, entropy)
    bounds = even_bounds(SUMS.vocab, 2)
    found = run_ranks(SUMS, bounds, x, weight, target, grads, keep=not recompute)
    assert not found.grads[0][valid:].any() and found.grads[1].isfinite().all()
    assert not found.logprobs[valid:].any() and (found.argmax[valid:] == -1).all()
    if valid == 0:
        assert not found.grads[1].any()
        return
    _, expected = exact(x, weight, target, grads)
    for actual, wanted in zip(found.grads, expected, strict=True):
        allowed = tolerance_of(wanted, torch.bfloat16, entropy)
        assert (actual.double() - wanted).norm() <= allowed * wanted.norm()


@gpu
@KEPT
@ENTROPY
def test_a_graph_fits_other_inputs(shards, entropy, recompute):
    static = [*SUMS.layer(shards, ignored=0.5), *upstream(SUMS, shards, entropy)]
    bounds = even_bounds(SUMS.vocab, 2)

    def step():
        found = run_ranks(SUMS, bounds, *static[:3], static[3:], keep=not recompute, compare=False)
        return [*found[:3], *found.grads]

    step()
    with no_synchronisation():
        step()
    graph, captured = capture(step)
    for ignored, scale in ((0.5, 1.0), (0.0, 1.0), (0.99, 0.5), (0.2, 30.0)):
        others = [*SUMS.layer(shards, ignored, scale), *upstream(SUMS, shards, entropy)]
        for tensor, value in zip(static, others, strict=True):
            tensor.copy_(value)
        graph.replay()
        for replayed, again in zip(captured, step(), strict=True):
            assert torch.equal(replayed, again)


def _one_process(entropy, keep, rank, world):
    """``keep``: whether the exponentials fit the budget."""
    device, shape = torch.device("cuda"), ONE_CHUNK if keep else SUMS
    x, weight, target = shape.layer(device)
    mine = [t.clone().requires_grad_() for t in (x, weight)]
    grads = upstream(shape, device, entropy)
    engine = sm90_logprobs
    with (
        liger.use_backend("cuda"),
        patch.object(engine, "forward", wraps=engine.forward) as forward,
        patch.object(engine, "backward", wraps=engine.backward) as backward,
    ):
        found = in_shards.fused_linear_logprobs(
            *mine, target, temperature=0.7, memory_budget=shape.budget, metrics=("entropy", "argmax")
        )
        actual = torch.autograd.grad(found[: len(grads)], mine, grads)
    assert forward.call_count == backward.call_count == 1
    assert forward.call_args.args[-1] == keep
    logprobs, expected = exact(x, weight, target, grads, temperature=0.7)
    assert (found.logprobs.detach() - logprobs).abs().max() <= ROWS * logprobs.abs().max()
    assert_observed(x, weight, target, found.entropy.detach(), found.argmax, 0.7)
    tolerances = [tolerance_of(e, torch.bfloat16, entropy) for e in expected]
    assert_gradients(actual, expected, target == -100, (True, True), tolerances)


@gpu
@needs_gloo
@ENTROPY
@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
def test_the_public_function_uses_the_steps(shards, entropy, keep, tmp_path):
    """A group of one process, which does not communicate."""
    on_processes(tmp_path, partial(_one_process, entropy, keep), 1)


def test_memory_of_kept_exponentials():
    """What is compared with the budget is what a forward allocates, in the layout of its plan."""
    plan, _ = plans_of(ONE_CHUNK, 2, keep=True)
    for classes in (128, 4225):
        (elements,), numbers = sm90_logprobs.kept_shapes(ONE_CHUNK.rows, classes)
        assert 2 * elements == -(-classes // 128) * plan.workspace_panel_bytes
        assert numbers == (ONE_CHUNK.rows, 4)
