# SPDX-License-Identifier: BSD-3-Clause
"""A vocabulary that is sharded over ranks, on the engine of compute capability 9.0: one device computes all
shards in turn, and the sums of the ranks are added in between."""

from functools import partial
from unittest.mock import patch

import in_shards
import pytest
import torch
from cases import poison_memory
from cross_entropy_reference import leaves, reference
from cuda_graphs import capture, no_synchronisation
from processes import needs_gloo, on_processes
from shard_steps import ReferenceSteps
from shards_sm90 import SHAPES, even_bounds, plan_of, run_ranks, surprising
from sm90_engine import GRADIENT, LOSS, MIB, ROWS, assert_close_to_exact, exact
from torch.nn.functional import linear

import liger
from liger.distributed.vocab import sm90

gpu = pytest.mark.gpu

SUMS = SHAPES["sums"]


def check(
    shape, bounds, x, weight, target, trained=(True, True), tolerance=GRADIENT, loss_tolerance=LOSS, **chosen
):
    """Results and gradients against float64. Rows of ignored targets may hold NaN."""
    if x.is_cuda:
        poison_memory()
    found = run_ranks(shape, bounds, x, weight, target, trained, **chosen)
    ignored = target == chosen.get("ignore_index", -100)
    clean = x.masked_fill(ignored[:, None], 0.0)
    chosen.setdefault("reduction", "mean")
    values, grads = exact(clean, weight, target, trained, **chosen)
    for name in ("loss", "z_loss"):
        assert_close_to_exact(getattr(found, name), values[name].detach(), loss_tolerance, name)
    assert_close_to_exact(found.logprobs, values["logprobs"].detach(), ROWS, "logprobs")
    assert not found.logprobs[ignored].any()
    gradients = [g for g, want in zip(found[3:], trained, strict=True) if want]
    for name, actual, expected in zip(("first", "second"), gradients, grads, strict=False):
        assert actual.dtype == x.dtype and actual.isfinite().all(), name
        error = ((actual.double() - expected).norm() / expected.norm()).item()
        assert error <= tolerance, f"{name} gradient: error {error:.3g}, allowed {tolerance:.3g}"
    if trained[0]:
        assert not found.grad_input[ignored].any()
    return found


def test_the_shapes_are_what_they_are_named():
    """Of two ranks on an H200."""
    plans = {name: plan_of(shape, 2) for name, shape in SHAPES.items()}
    several = {name for name, plan in plans.items() if len(plan.chunks) > 1}
    split = {name for name, plan in plans.items() if max(c.k_splits for c in plan.chunks) > 1}
    assert several >= {"sums", "sums, larger", "split-K, chunks", "partial tiles, sums", "few columns"}
    assert split >= {"split-K", "split-K, chunks"} and not split & {"sums, whole waves"}
    assert not several & {"in the weight gradient", "beside it", "split-K"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_rules_without_a_gpu(ranks, dtype, scale, monkeypatch):
    """With steps in torch that round as the engine does, except for the sum of weight gradients."""
    monkeypatch.setattr(sm90, "steps", ReferenceSteps)
    monkeypatch.setattr(ReferenceSteps, "moved", 0)
    x, weight, target = (t.to(dtype) if t.is_floating_point() else t for t in SUMS.layer("cpu"))
    if scale > 1.0:
        x, weight, target = surprising(SUMS, scale, x, weight, target)
    x[target == -100] = torch.nan
    tolerances = {"tolerance": 1e-5} if dtype == torch.float32 else {}
    if scale > 1.0:
        tolerances = {"tolerance": tolerances.get("tolerance", 4e-3), "loss_tolerance": 2e-5}
    check(SUMS, even_bounds(SUMS.vocab, ranks), x, weight, target, **tolerances)
    assert (ReferenceSteps.moved > 0) == (scale > 1.0 and ranks > 1)


@gpu
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_every_kind_of_plan(shards, name, ranks):
    shape = SHAPES[name]
    x, weight, target = shape.layer(shards)
    x[target == -100] = torch.nan
    check(shape, even_bounds(shape.vocab, ranks), x, weight, target)


@gpu
@pytest.mark.parametrize("bounds", [(0, 1, 2305), (0, 2200, 2305), (0, 128, 129, 2305)], ids=str)
def test_shards_of_any_size(shards, bounds):
    """Targets are in one shard or the other; rows of a shard have none."""
    check(SUMS, bounds, *SUMS.layer(shards))


@gpu
@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)], ids=str)
def test_only_what_is_trained(shards, trained):
    check(SUMS, even_bounds(SUMS.vocab, 2), *SUMS.layer(shards), trained)


@gpu
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("softcap", [None, 8.0])
def test_options(shards, reduction, softcap):
    x, weight, target = SUMS.layer(shards)
    chosen = {
        "ce_weight": torch.rand(SUMS.vocab, device=shards) + 0.1,
        "token_weight": torch.rand(SUMS.rows, device=shards) + 0.1,
        "lse_square_scale": 1e-2,
        "softcap": softcap,
    }
    check(SUMS, even_bounds(SUMS.vocab, 2), x, weight, target, reduction=reduction, **chosen)
    chosen["denominator"] = torch.tensor(123.5, device=shards)
    check(SUMS, even_bounds(SUMS.vocab, 2), x, weight, target.int(), reduction=reduction, **chosen)


@gpu
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("scale", [20.0, 60.0])
def test_rows_that_overflow(shards, ranks, scale):
    shape = SHAPES["sums, larger"]
    layer = surprising(shape, scale, *shape.layer(shards))
    # As exact as such rows are on one device.
    check(shape, even_bounds(shape.vocab, ranks), *layer, tolerance=4e-3, loss_tolerance=2e-5)


@gpu
def test_a_row_of_nan(shards):
    x, weight, target = SUMS.layer(shards)
    target[:2] = 3
    x[0] = torch.nan
    found = run_ranks(SUMS, even_bounds(SUMS.vocab, 2), x, weight, target)
    assert found.loss.isnan() and found.grad_input[0].isnan().all()
    assert found.grad_input[1:].isfinite().all()


@gpu
@pytest.mark.parametrize("name", ["sums, larger", "split-K, chunks", "partial tiles, sums"])
def test_the_same_bits_twice_and_inputs_untouched(shards, name):
    shape = SHAPES[name]
    x, weight, target = shape.layer(shards)
    copies = [t.clone() for t in (x, weight, target)]
    runs = []
    for fill in (0.0, torch.nan):
        garbage = torch.full((64 * MIB,), fill, device=shards)
        del garbage
        runs.append(run_ranks(shape, even_bounds(shape.vocab, 2), x, weight, target))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
    for tensor, copy in zip((x, weight, target), copies, strict=True):
        assert torch.equal(tensor, copy)


@gpu
@pytest.mark.parametrize("kept", [0, 1, 300])
def test_few_valid_rows(shards, kept):
    """Whole chunks without any."""
    x, weight, target = SUMS.layer(shards, ignored=0.0)
    target[kept:] = -100
    found = run_ranks(SUMS, even_bounds(SUMS.vocab, 2), x, weight, target, reduction="sum")
    assert not found.grad_input[kept:].any() and found.grad_weight.isfinite().all()
    exact_x, exact_weight = leaves(x.double(), weight.double())
    reference(linear(exact_x, exact_weight), target, reduction="sum")["loss"].backward()
    if kept == 0:
        assert found.loss == 0 and not found.grad_weight.any()
        return
    for actual, expected in ((found.grad_input, exact_x.grad), (found.grad_weight, exact_weight.grad)):
        assert (actual.double() - expected).norm() <= GRADIENT * expected.norm()


@gpu
def test_a_graph_fits_other_inputs(shards):
    static = SUMS.layer(shards, ignored=0.5)
    bounds = even_bounds(SUMS.vocab, 2)

    def step():
        return run_ranks_without_comparison(SUMS, bounds, *static)

    step()
    with no_synchronisation():
        step()
    graph, captured = capture(step)
    for ignored, scale in ((0.5, 1.0), (0.0, 1.0), (0.99, 0.5), (0.2, 30.0)):
        for tensor, value in zip(static, SUMS.layer(shards, ignored, scale), strict=True):
            tensor.copy_(value)
        graph.replay()
        for replayed, again in zip(captured, step(), strict=True):
            assert torch.equal(replayed, again)


run_ranks_without_comparison = partial(run_ranks, compare=False)


def _one_process(rank, world):
    device = torch.device("cuda")
    x, weight, target = SUMS.layer(device)
    mine = leaves(x, weight)
    options = {"memory_budget": SUMS.budget, "metrics": ("logprobs",)}

    def step():
        return in_shards.fused_linear_ce(*mine, target, **options)

    with liger.use_backend("cuda"), patch.object(sm90, "run", wraps=sm90.run) as run:
        found = step()
    assert run.call_count == 1
    found.loss.backward()
    values, grads = exact(x, weight, target, reduction="mean")
    assert_close_to_exact(found.loss.detach(), values["loss"].detach(), LOSS, "loss")
    for tensor, expected in zip(mine, grads, strict=True):
        assert (tensor.grad.double() - expected).norm() <= GRADIENT * expected.norm()


@gpu
@needs_gloo
def test_the_public_function_uses_the_steps(shards, tmp_path):
    """A group of one process, which does not communicate."""
    on_processes(tmp_path, _one_process, 1)
