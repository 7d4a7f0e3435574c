# SPDX-License-Identifier: BSD-3-Clause
"""liger.transformers.release_gradients: the weights and states of steps after the backward, and one gradient
at a time."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models
from planned_llama import LAYERS, PLENTY, llama
from trainer_runs import train

import liger
import liger.transformers as lt
from liger.transformers.checkpointing import methods
from liger.transformers.checkpointing.checkpoint import planners

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


def groups_of(model):
    """Two groups, as for weight decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "lr": 0.02},
        {"params": [p for p in parameters if p.dim() == 1]},
    ]


def steps(model, optimizer, count=3, scheduler=None):
    for tokens in range(9, 9 + count):
        model(**tiny_models.batch(tokens=tokens)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def assert_same(ours, theirs, optimizers):
    for (name, p), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, expected), name
    # A parameter gets its states in the order of the steps.
    ours, theirs = (optimizer.state_dict()["state"] for optimizer in optimizers)
    assert ours.keys() == theirs.keys()
    for number, expected in theirs.items():
        mine = ours[number]
        assert mine.keys() == expected.keys() and mine
        for name, value in expected.items():
            assert torch.equal(mine[name], value) if torch.is_tensor(value) else mine[name] == value, name


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_same_bits(name, checkpointing):
    models = [llama(tie_word_embeddings=True) for _ in range(2)]
    if checkpointing:
        [methods.enable(model) for model in models]
    optimizers = [OPTIMIZERS[name](groups_of(model)) for model in models]
    schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1) for optimizer in optimizers]
    lt.release_gradients(optimizers[0])
    for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
        steps(model, optimizer, scheduler=scheduler)
    assert_same(*models, optimizers)


def test_gradients_are_freed_one_by_one():
    model = liger.patch(llama())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    lt.release_gradients(optimizer)
    alive = []
    for parameter in model.parameters():
        # Hooks run in the order in which they were registered.
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    model(**tiny_models.batch()).loss.backward()
    assert len(alive) == len(list(model.parameters())) and max(alive) <= 1
    assert alive[-1] == 0 and all(p.grad is None for p in model.parameters())


def test_the_end():
    models = [llama(), llama()]
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    handle = lt.release_gradients(optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, 1)
    handle.remove()
    models[0](**tiny_models.batch()).loss.backward()
    assert all(p.grad is not None for p in models[0].parameters())
    optimizers[0].zero_grad()
    lt.release_gradients(optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer)
    assert_same(*models, optimizers)


def test_states_are_saved_and_loaded():
    models = [llama(), llama()]
    optimizers = [OPTIMIZERS["adamw"](groups_of(model)) for model in models]
    lt.release_gradients(optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, 1)
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.param_groups[1]["lr"] = 0.03
        steps(model, optimizer)
    assert_same(*models, optimizers)


def test_several_forwards_and_one_backward():
    models = [llama(), llama()]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    lt.release_gradients(optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(2):
            chosen, rejected = (model(**tiny_models.batch(tokens=n)).loss for n in (11, 8))
            (chosen - rejected).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*models, optimizers)


def test_frozen_weights():
    models = [llama(), llama()]
    for model in models:
        model.model.layers[:2].requires_grad_(False)
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    lt.release_gradients(optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer)
    assert_same(*models, optimizers)


def test_trainer(tmp_path):
    results = []
    for released in (False, True):
        model = llama()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        if released:
            lt.release_gradients(optimizer)
        results.append(
            train(model, tmp_path, (optimizer, None), max_grad_norm=0.0, gradient_accumulation_steps=1)
        )
    assert results[0] == results[1]


def test_accumulation_raises_before_it_harms():
    model = llama()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    lt.release_gradients(optimizer)
    model(**tiny_models.batch()).loss.backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"a second gradient .* before optimizer\.step\(\).* add the losses"
    ):
        model(**tiny_models.batch()).loss.backward()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_after_an_error_in_a_backward():
    model = llama()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    lt.release_gradients(optimizer)

    def fail(_):
        raise MemoryError("in a backward")

    handle = model.model.layers[1].mlp.down_proj.weight.register_hook(fail)
    with pytest.raises(MemoryError, match="in a backward"):
        model(**tiny_models.batch()).loss.backward()
    handle.remove()
    optimizer.zero_grad()
    message = (
        r"After an error in a backward, call zero_grad\(\) and then optimizer\.step\(\) before the next one"
    )
    with pytest.raises(RuntimeError, match=message):
        model(**tiny_models.batch()).loss.backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    model(**tiny_models.batch()).loss.backward()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_scaled_gradients_raise():
    model = llama()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    lt.release_gradients(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(**tiny_models.batch()).loss).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


class Together(torch.optim.SGD):
    """Counts steps in its parameter groups, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_states_of_groups_raise():
    model = llama()
    lt.release_gradients(Together(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"Together keeps states .* in its parameter groups \(k\)"):
        model(**tiny_models.batch()).loss.backward()


def test_a_gradient_elsewhere_raises():
    model = liger.patch(llama(), accumulate_grad_weight=True)
    weight = model.get_output_embeddings().weight
    weight.main_grad = torch.zeros_like(weight)
    lt.release_gradients(OPTIMIZERS["sgd"](model.parameters()))
    with pytest.raises(RuntimeError, match=r"is not in its grad \(main_grad\?\)"):
        model(**tiny_models.batch()).loss.backward()


def test_bad_arguments():
    model = llama()
    with pytest.raises(
        TypeError, match=r"release_gradients: optimizer must be a torch\.optim\.Optimizer, not list"
    ):
        lt.release_gradients([])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    lt.release_gradients(optimizer)
    with pytest.raises(ValueError, match="are released already"):
        lt.release_gradients(optimizer)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.ds_id = 0
    with pytest.raises(ValueError, match="DeepSpeed has the gradients"):
        lt.release_gradients(OPTIMIZERS["sgd"]([weight]))


def test_the_plan_counts_one_gradient():
    peaks = []
    for released in (False, True):
        model = llama()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        if released:
            lt.release_gradients(optimizer)
        lt.checkpoint(model, PLENTY)
        for _ in range(3):
            steps(model, optimizer, 1)
        (planner,) = planners(model)
        peaks.append(planner.plan.need(False, 0, planner.longest))
        assert len(planner.layers) == LAYERS
    sizes = [p.nbytes for p in llama().parameters()]
    assert peaks[0] - peaks[1] == sum(sizes) - max(sizes)
