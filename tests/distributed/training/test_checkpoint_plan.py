# SPDX-License-Identifier: BSD-3-Clause
"""liger.transformers.checkpoint on several ranks: one plan for all, and the gradients of the model without
it."""

import datetime
import re

import pytest
import ranks
import tiny_models
import torch
from planned_llama import LAYERS, MOST, attention_path, set_level, whole_layers
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import liger
import liger.transformers as lt
from liger.transformers.checkpointing import agreement, memory_plan
from liger.transformers.checkpointing import planner as planning
from liger.transformers.checkpointing.checkpoint import planners

pytestmark = pytest.mark.usefixtures(whole_layers.__name__)

PLENTY = 10**12


def make(family="llama", **settings):
    settings = {"num_hidden_layers": LAYERS, "attn_implementation": "sdpa", **settings}
    return liger.patch(tiny_models.make(family, ranks.DEVICE, **settings))


def step(model, tokens=11):
    """Gradients of a step; each rank has tokens of its own."""
    given = tiny_models.batch(ranks.DEVICE, rows=2, tokens=tokens)
    given["input_ids"] = (given["input_ids"] + ranks.RANK) % tiny_models.VOCAB
    model.zero_grad()
    model(**given).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def kept(model):
    (planner,) = planners(model)
    return planner.step.kept


def counts_of_ranks(model):
    counts = [None] * ranks.WORLD
    torch.distributed.all_gather_object(counts, (kept(model), planners(model)[0].longest))
    return counts


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer, mesh=ranks.mesh())
    return fully_shard(model, mesh=ranks.mesh())


def replicated(model):
    """DDP. More than two ranks keep its first buckets: otherwise the second step has other ones, and the
    order in which ranks add depends on the place in the bucket."""
    return DistributedDataParallel(model, find_unused_parameters=ranks.WORLD > 2)


WRAPPERS = {"none": lambda model: model, "ddp": replicated, "fsdp2": sharded}


@pytest.mark.parametrize("order", ["planner first", "planner last"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_same_gradients(wrapper, order):
    check_gradients(wrapper, order, make(), make())


def test_same_gradients_of_experts():
    check_gradients("fsdp2", "planner first", *(make("Mixtral", num_local_experts=4) for _ in range(2)))


def check_gradients(wrapper, order, theirs, ours):
    theirs = WRAPPERS[wrapper](theirs)
    if order == "planner first":
        lt.checkpoint(ours, PLENTY)
    ours = WRAPPERS[wrapper](ours)
    if order == "planner last":
        lt.checkpoint(ours, PLENTY)
    expected, seen = step(theirs), []
    for allowed in (MOST, 0, 2, MOST):
        (planner,) = planners(ours)
        planner.allowed = allowed
        planner.settled.clear()
        grads = step(ours)
        seen.append(kept(ours))
        assert grads.keys() == expected.keys() and grads
        for name, grad in expected.items():
            assert torch.equal(ranks.whole(grads[name]), ranks.whole(grad)), name
    # On a GPU the first step that keeps anything keeps one layer, and measures its memory.
    assert seen == [0, 0, 1 if ranks.ON_GPU else 2, MOST]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_same_gradients_with_kept_attention(wrapper, monkeypatch):
    """Nothing, the attention of two layers, of all, and everything in two layers and attention in the
    others."""
    monkeypatch.setattr(planning, "path", attention_path)
    theirs, ours = WRAPPERS[wrapper](make()), lt.checkpoint(WRAPPERS[wrapper](make()), PLENTY)
    expected, seen = step(theirs), []
    for level in (0, 0, 2, MOST, MOST + 1, MOST + 2):
        set_level(ours, level)
        grads = step(ours)
        (planner,) = planners(ours)
        seen.append(None if planner.plan is None else planner.plan.counts(kept(ours)))
        for name, grad in expected.items():
            assert torch.equal(ranks.whole(grads[name]), ranks.whole(grad)), name
    first = LAYERS - MOST
    assert seen[2:4] == [(LAYERS - 2, 2, 0), (first, MOST, 0)]
    assert seen[-1] == (first, MOST - 2, 2)


def room_for(layers):
    """Bytes in which a step of 22 tokens has room for some layers. Of the tests on the CPU."""
    model = lt.checkpoint(make(), PLENTY)
    step(model), step(model)
    (planner,) = planners(model)
    need = planner.plan.need(False, 0, planner.longest) + planner.plan.cost(layers)
    return planner.last_start[False] + need


needs_counts = pytest.mark.skipif(ranks.ON_GPU, reason="on a GPU the memory is measured, not counted")


@needs_counts
def test_ranks_whose_times_differ_agree_on_a_path(monkeypatch):
    """One rank has found that attention takes no time, the others that it takes some."""
    monkeypatch.setattr(planning, "path", memory_plan.path)
    monkeypatch.setattr(planning, "estimated", lambda *_: (10**6, min(ranks.RANK, 1) * 9 * 10**5))
    model = lt.checkpoint(make(), PLENTY)
    step(model), step(model)
    paths = [None] * ranks.WORLD
    torch.distributed.all_gather_object(paths, planners(model)[0].plan.upgrades)
    assert all(path == paths[0] for path in paths) and len(paths[0]) == 2 * MOST


@needs_counts
def test_the_rank_with_the_least_memory_decides():
    model = lt.checkpoint(make(), room_for(3 if ranks.RANK else 1))
    for _ in range(3):
        step(model)
    assert kept(model) == 1 and planners(model)[0].settled == {False}


@needs_counts
def test_a_longer_step_of_one_rank_shrinks_the_plan_of_all(capsys):
    model = lt.checkpoint(make(), room_for(MOST))
    for _ in range(3):
        step(model)
    assert kept(model) == MOST
    for tokens in (12, 40):
        step(model, tokens if ranks.RANK == 1 else 11)
        counts = counts_of_ranks(model)
        assert all(count == counts[0] for count in counts)
        assert counts[0][0] < MOST and counts[0][1] == [2 * tokens]
    assert kept(model) == 0
    # One rank prints.
    assert ("are more than in any step before" in capsys.readouterr().err) == (ranks.RANK == 0)


@needs_counts
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_one_rank_alone_starts_to_offload(micro_batch):
    """It measures anew, and the other ranks, whose plans were settled, do so in the same steps."""
    model, levels = lt.checkpoint(make(), PLENTY), []
    (planner,) = planners(model)
    for number in range(5):
        model.zero_grad()
        for batch in range(2):
            if number == 3 and batch == micro_batch and ranks.RANK:
                assert planner.settled == {False, True}
                planner.memory = "auto"
                planner._offload("a step ran out of memory")
            model(**tiny_models.batch(ranks.DEVICE)).loss.backward()
            levels.append(kept(model))
    assert planner.store.is_on == (ranks.RANK > 0)
    # Recomputed are the step that counts and, behind gradients, the first one without them.
    start = 6 + micro_batch
    assert levels[start - 1] == MOST and levels[start] == 0 and levels[-1] == MOST
    of_ranks = [None] * ranks.WORLD
    torch.distributed.all_gather_object(of_ranks, (levels, planner.settled, planner.kept, planner.age))
    assert all(of_rank == of_ranks[0] for of_rank in of_ranks)


def test_a_group_of_one_rank(capsys):
    groups = [torch.distributed.new_group([rank]) for rank in range(ranks.WORLD)]
    model = make()
    lt.checkpoint(model, PLENTY, group=groups[ranks.RANK])
    # The other rank runs another number of steps. On a GPU the second one keeps one layer.
    for _ in range(3 + 3 * ranks.RANK):
        step(model)
    assert kept(model) == MOST, capsys.readouterr().err


def test_ranks_with_different_layers():
    """Stages of a pipeline, for example: a group of all ranks has no common plan."""
    model = lt.checkpoint(make(num_hidden_layers=LAYERS + ranks.RANK), PLENTY)
    with pytest.raises(
        ValueError, match=f"the ranks plan between {LAYERS} and {LAYERS + ranks.WORLD - 1} layers"
    ):
        step(model)


def test_ranks_that_have_no_plan(monkeypatch):
    """Their backward waits for the others, in the group whose ranks would agree on a plan."""
    monkeypatch.setattr(agreement, "_patience", lambda store: datetime.timedelta(seconds=3))
    expected = step(DistributedDataParallel(make()))
    model = DistributedDataParallel(make(), broadcast_buffers=False)
    if ranks.RANK == 0:
        lt.checkpoint(model, PLENTY)
        words = f"the ranks {[*range(1, ranks.WORLD)]} have not come to the first step of a plan"
        for _ in range(2):
            with pytest.raises(ValueError, match=re.escape(f"liger.transformers.checkpoint: {words}")):
                step(model)
        lt.checkpoint(model, None)
    grads = step(model)
    assert all(torch.equal(grads[name], grad) for name, grad in expected.items())
    lt.checkpoint(model, PLENTY)
    for _ in range(3):
        step(model)
    assert kept(model) > 0
