# SPDX-License-Identifier: BSD-3-Clause
"""liger.transformers.checkpoint(offload=...) on the CPU, where copies are plain: the same bits, what is
moved."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("transformers")

import tiny_models
from combinations import inputs_of, lora, seeded_step
from planned_llama import FEWEST, LAYERS, PLENTY, SETTLING, assert_bits, free_bytes, llama

import liger.transformers as lt
from liger.transformers.checkpointing import host_pool, offload
from liger.transformers.checkpointing.checkpoint import planners

# Bytes of an input of a layer: 22 tokens of a tiny Llama.
INPUT = 22 * 64 * 4
PAGE = 4096


@pytest.fixture(autouse=True)
def small_tensors_move(monkeypatch):
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)


def planned(model, offload=True, **settings):
    lt.checkpoint(model, PLENTY, offload=offload, **settings)
    (planner,) = planners(model)
    return planner


def allow(planner, number):
    planner.allowed = min(number, len(planner.layers) - FEWEST)
    planner.settled.clear()


def test_what_is_moved():
    """The input of every recomputed layer but the last one."""
    model = llama()
    planner = planned(model)
    for allowed in (0, 0, 1, 2, 3, 4):
        for _ in range(SETTLING):
            allow(planner, allowed)
            tiny_models.step(model, **tiny_models.batch())
        # The step that measures has a layer that is not recomputed.
        recomputed = LAYERS - planner.step.kept
        assert planner.store.moved == max(recomputed - 1, 0) * INPUT
        assert planner.store.refused == 0


def test_inputs_are_freed_in_the_forward():
    model = llama()
    planner = planned(model)
    for _ in range(2):
        allow(planner, 0)
        tiny_models.step(model, **tiny_models.batch())
    storages = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, given: storages.append(StorageWeakRef(given["hidden_states"].untyped_storage())),
            with_kwargs=True,
        )
        layer.register_forward_pre_hook(
            lambda _, args: storages.append(StorageWeakRef(args[0].untyped_storage()))
        )
    loss = model(**tiny_models.batch()).loss
    inputs = storages[: 2 * LAYERS : 2]
    assert [storage.expired() for storage in inputs] == [True] * (LAYERS - 1) + [False]
    loss.backward()


def test_lora():
    models = [
        lora(llama(), "q_proj", "down_proj", init_lora_weights=False, lora_dropout=0.2) for _ in range(2)
    ]
    for model in models:
        model.enable_input_require_grads()
    planner = planned(models[0])
    allow(planner, 1)
    given = inputs_of("llama")
    for _ in range(3):
        assert_bits(*(seeded_step(model, given) for model in models))
    assert planner.store.moved == (LAYERS - 2) * given["input_ids"].numel() * 64 * 4


def test_a_backward_that_ends_early():
    """The gradients of one layer alone: the layers before it have no backward."""
    models = [llama(), llama()]
    planner = planned(models[0])
    allow(planner, 0)
    for _ in range(3):
        gradients = []
        for model in models:
            weight = model.model.layers[2].mlp.down_proj.weight
            gradients += torch.autograd.grad(model(**tiny_models.batch()).loss, [weight])
        assert torch.equal(*gradients)
    assert_bits(*(tiny_models.step(model, **tiny_models.batch()) for model in models))
    assert free_bytes(planner.store) == planner.store.pool.size


def test_a_bound_for_two_inputs(capsys):
    models = [llama(), llama()]
    planner = planned(models[0], offload=4 * PAGE)
    for _ in range(1 + SETTLING):
        allow(planner, 0)
        assert_bits(*(tiny_models.step(model, **tiny_models.batch()) for model in models))
    assert planner.store.moved == 2 * INPUT and planner.store.refused == INPUT
    assert planner.store.pool.size == 4 * PAGE
    text = "0.01 MiB offloaded to 0.02 MiB of host memory, 0.01 MiB more stay on the device for lack of host memory"
    assert lt.patch_report(models[0]).checkpointing.endswith(text)
    assert FEWEST or text in capsys.readouterr().err  # said of the first steps


def test_longer_steps_need_memory_of_the_host():
    model = llama()
    planner = planned(model, offload=4 * 3 * PAGE)
    for _ in range(2):
        allow(planner, 0)
        tiny_models.step(model, **tiny_models.batch())
    store = planner.store
    store.begin()
    # Three inputs in blocks of eight and four pages.
    assert store.most == 3 * INPUT and store.pool.size == 8 * PAGE
    assert store.shortage(1.0) == store.shortage(2.0) == 0
    assert store.shortage(4.0) == 12 * INPUT - 12 * PAGE


def test_a_host_without_memory(monkeypatch):
    """A step does what it did without offload, and the report says so."""
    monkeypatch.setattr(host_pool, "available", lambda: 0)
    models = [llama(), llama()]
    planner = planned(models[0])
    for _ in range(1 + SETTLING):
        allow(planner, 0)
        assert_bits(*(tiny_models.step(model, **tiny_models.batch()) for model in models))
    assert planner.store.moved == 0 and planner.store.refused == 3 * INPUT
    assert "0.00 MiB offloaded to 0.00 MiB of host memory, 0.02 MiB more stay" in planner.summary


def test_the_plan_counts_inputs():
    """Without offload the inputs are on the device in any plan, with it a kept layer adds its input."""
    costs, needs = [], []
    for choice in (False, True):
        model = llama()
        planner = planned(model, choice)
        for allowed in (0, 0, 2, 2):
            allow(planner, allowed)
            tiny_models.step(model, **tiny_models.batch())
        costs.append(planner.plan.cost(1))
        needs.append([planner.plan.need(False, kept, planner.longest) for kept in (0, 2)])
    assert costs[1] == costs[0] + INPUT
    # The largest of the measured steps counts, the first one among them.
    assert needs[1][0] == needs[0][0] - (3 - FEWEST) * INPUT
    assert needs[1][1] == needs[0][1] - INPUT


def test_small_and_shared_tensors_stay(monkeypatch):
    """A tensor that every layer reads is on the device anyway."""
    store = offload.HostStore(True)
    store.begin()
    shared, handles = torch.ones(8), []
    for _ in range(4):
        with store.layer():
            handles.append([store.put(shared), store.put(torch.ones(8)), store.put(torch.ones(4, 4)[:, :2])])
    store.flush()
    kinds = [[type(handle) for handle in of_layer] for of_layer in handles]
    assert kinds[0] == [offload.Moved, offload.Moved, offload.Kept]
    assert kinds[1:] == [[offload.Kept, offload.Moved, offload.Kept]] * 3
    assert all(handle.get().eq(1).all() for of_layer in handles for handle in of_layer)
    monkeypatch.setattr(offload, "WORTH_MOVING", INPUT + 1)
    model = llama()
    planner = planned(model)
    tiny_models.step(model, **tiny_models.batch())
    assert planner.store.moved == planner.store.refused == 0


@pytest.mark.parametrize("shape, order", [((3, 4, 5), (0, 1, 2)), ((3, 4, 5), (2, 0, 1)), ((1, 7), (1, 0))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_strides_and_dtypes_come_back(shape, order, dtype):
    store = offload.HostStore(True)
    x = torch.arange(60)[: torch.Size(shape).numel()].view(shape).permute(order).to(dtype)
    with store.layer():
        handle = store.put(x)
    back = handle.get()
    assert isinstance(handle, offload.Moved) and back is not x
    assert torch.equal(back, x) and back.dtype == dtype and back.stride() == x.stride()


def test_a_tensor_that_stays():
    x = torch.ones(2)
    handle = offload.Kept(x)
    assert handle.get().data_ptr() == x.data_ptr() and handle.get().is_leaf
    x.add_(1)
    with pytest.raises(RuntimeError, match="at version 1; expected version 0"):
        handle.get()
    # Outside a layer, and while it is off, a store keeps what it gets.
    for store in (offload.HostStore(True), offload.HostStore(None)):
        assert store.put(x).get().data_ptr() == x.data_ptr() and store.moved == 0


def test_an_input_that_is_changed_in_place():
    """Autograd refuses this for saved tensors, and so does the store."""
    model = llama()
    allow(planned(model), 0)
    tiny_models.step(model, **tiny_models.batch())
    seen = []

    def change(x):
        x.detach().add_(1)

    model.model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.model.layers[2].register_forward_pre_hook(lambda *_: change(seen.pop()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(**tiny_models.batch())
