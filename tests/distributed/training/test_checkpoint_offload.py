# SPDX-License-Identifier: BSD-3-Clause
"""Inputs of layers in host memory, and optimizer steps in the backward, on several ranks."""

import pytest
import ranks
import tiny_models
import torch
from test_checkpoint_plan import PLENTY, WRAPPERS, make, step
from torch.nn.parallel import DistributedDataParallel

import liger.transformers as lt
from liger.transformers.checkpointing import offload
from liger.transformers.checkpointing.checkpoint import planners


@pytest.mark.parametrize("order", ["planner first", "planner last"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_same_gradients(wrapper, order, monkeypatch):
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)
    theirs, ours = WRAPPERS[wrapper](make()), make()
    if order == "planner first":
        lt.checkpoint(ours, PLENTY, offload=True)
    ours = WRAPPERS[wrapper](ours)
    if order == "planner last":
        lt.checkpoint(ours, PLENTY, offload=True)
    expected = step(theirs)
    (planner,) = planners(ours)
    for allowed in (0, 0, 1):
        planner.allowed = allowed
        planner.settled.clear()
        grads = step(ours)
        assert grads.keys() == expected.keys() and grads
        for name, grad in expected.items():
            assert torch.equal(ranks.whole(grads[name]), ranks.whole(grad)), name
    assert planner.store.moved == 22 * 64 * 4 * (
        len(planner.layers) - 1 - planner.plan.counts(planner.step.kept)[-1]
    )


def trained(model, released):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if released:
        lt.release_gradients(optimizer)
    for _ in range(3):
        given = tiny_models.batch(ranks.DEVICE)
        given["input_ids"] = (given["input_ids"] + ranks.RANK) % tiny_models.VOCAB
        model(**given).loss.backward()
        assert released == all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return [ranks.whole(p).clone() for p in model.parameters()]


def test_released_gradients_of_a_sharded_model():
    weights = [trained(WRAPPERS["fsdp2"](make()), released) for released in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_released_gradients_need_shards():
    model = DistributedDataParallel(make())
    lt.release_gradients(torch.optim.SGD(model.parameters(), lr=0.1))
    message = rf"on {ranks.WORLD} ranks the parameters must be sharded by fully_shard"
    with pytest.raises(RuntimeError, match=message):
        model(**tiny_models.batch(ranks.DEVICE)).loss.backward()
