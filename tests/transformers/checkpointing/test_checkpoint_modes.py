# SPDX-License-Identifier: BSD-3-Clause
"""What holds for a plan of whole layers and of attention, on the device and in host memory: the bits of a
model without a plan, at every level, and nothing left behind."""

import copy
import gc
import pickle
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models
from combinations import inputs_of, lora, seeded_step, tiny
from planned_llama import (
    FEWEST,
    LAYERS,
    PLENTY,
    assert_bits,
    attention_path,
    free_bytes,
    llama,
    result_of,
    set_level,
    whole_path,
)

import liger
import liger.transformers as lt
from liger.transformers.checkpointing import offload
from liger.transformers.checkpointing import planner as planning
from liger.transformers.checkpointing.checkpoint import planners
from liger.transformers.checkpointing.memory_plan import State


class Mode(NamedTuple):
    is_attention: bool
    is_offloaded: bool

    def settings(self):
        """Eager attention cannot be kept alone."""
        return {"attn_implementation": "sdpa"} if self.is_attention else {}

    def planned(self, model):
        lt.checkpoint(model, PLENTY, offload=self.is_offloaded)
        set_level(model, 0)
        (planner,) = planners(model)
        return planner

    def pair(self, make=llama, *args, **settings):
        """(planner of the first of two equal models, both models)"""
        models = [make(*args, **self.settings(), **settings) for _ in range(2)]
        return self.planned(models[0]), models

    def levels(self, planner):
        """Of a plan after its first step."""
        most = len(planner.layers) - FEWEST
        return (0, 1, most, most + 1, 2 * most) if self.is_attention else (0, most // 2, most)

    def check(self, planner, level):
        """The last step ran at a level, and its tensors have left host memory."""
        most = len(planner.layers) - FEWEST
        whole = max(level - most, 0) if self.is_attention else level
        states = planner.plan.counts(planner.step.kept)
        assert states[State.EVERYTHING] == whole and states[State.ATTENTION] == (
            min(level, most) - whole if self.is_attention else 0
        )
        if self.is_offloaded:
            assert planner.store.moved > 0 or planner.step.kept >= most - 1
            assert planner.store.refused == 0
            assert planner.store.pool is None or free_bytes(planner.store) == planner.store.pool.size


MODES = {
    "layers": Mode(False, False),
    "layers, offload": Mode(False, True),
    "attention": Mode(True, False),
    "attention, offload": Mode(True, True),
}


@pytest.fixture(params=MODES)
def mode(request, monkeypatch):
    found = MODES[request.param]
    monkeypatch.setattr(planning, "path", attention_path if found.is_attention else whole_path)
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)
    return found


@pytest.mark.covering(2)
@pytest.mark.parametrize("options", [None, {}, {"recompute": True}], ids=["plain", "patched", "recompute"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "gemma3"])
def test_same_bits(mode, model_type, options):
    """Grouped queries, norms of queries and keys, sliding windows with masks, experts, images; with dropout
    where attention is recomputed with its layer."""
    # The types with a list of layer types have two layers.
    settings = {"num_hidden_layers": LAYERS} if model_type in ("llama", "mixtral", "qwen3_moe") else {}
    settings |= {} if mode.is_attention else {"attention_dropout": 0.2}
    models = [tiny(model_type, **mode.settings(), **settings) for _ in range(2)]
    if options is not None:
        [liger.patch(model, verbose=False, **options) for model in models]
    planner, given = mode.planned(models[0]), inputs_of(model_type)
    expected = seeded_step(models[1], given)
    assert_bits(seeded_step(models[0], given), expected)
    for level in mode.levels(planner):
        set_level(models[0], level)
        assert_bits(seeded_step(models[0], given), expected)
        mode.check(planner, level)


def test_adapters(mode):
    models = [
        lora(llama(**mode.settings()), "q_proj", "down_proj", init_lora_weights=False, lora_dropout=0.2)
        for _ in range(2)
    ]
    for model in models:
        model.enable_input_require_grads()
    planner, given = mode.planned(models[0]), inputs_of("llama")
    for level in (0, *mode.levels(planner)):
        set_level(models[0], level)
        assert_bits(*(seeded_step(model, given) for model in models))
    mode.check(planner, level)


def check_at_levels(mode, step):
    """``step(model)``: the loss, after its backward."""
    planner, models = mode.pair()
    for level in (0, 1, LAYERS - FEWEST):
        set_level(models[0], level)
        results = []
        for model in models:
            model.zero_grad()
            results.append(result_of(model, step(model)))
        assert_bits(*results)
    mode.check(planner, level)


def test_accumulation_and_evaluation(mode):
    """Micro-batches of two forwards each, and forwards without gradients between the steps."""

    def step(model):
        model.eval()
        with torch.no_grad():
            model(**tiny_models.batch())
        model.train()
        for tokens in (11, 8, 11):
            loss = model(**tiny_models.batch(tokens=tokens)).loss
            loss = loss - 0.5 * model(**tiny_models.batch(tokens=7)).loss
            loss.backward()
        return loss.detach()

    check_at_levels(mode, step)


def test_two_backwards_of_one_graph(mode):
    def step(model):
        loss = model(**tiny_models.batch()).loss
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    check_at_levels(mode, step)


def test_errors_and_forwards_without_a_backward(mode):
    planner, models = mode.pair()

    def fail(*_):
        raise RuntimeError("in a layer")

    for number in range(LAYERS):
        set_level(models[0], number and 1)
        models[0](**tiny_models.batch())
        handle = models[0].model.layers[number].mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="in a layer"):
            models[0](**tiny_models.batch())
        handle.remove()
        assert_bits(*(tiny_models.step(model, **tiny_models.batch()) for model in models))
        assert planner.longest[0] == 22 and not planner.store._leaving
        # The graph of a forward with an error is a cycle.
        gc.collect()
    mode.check(planner, 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_copies_have_plans_and_host_memory_of_their_own(mode, copied, steps):
    planner, (model, plain) = mode.pair()
    for _ in range(steps):
        tiny_models.step(model, **tiny_models.batch())
        set_level(model, 1)
    other = copied(model)
    (theirs,) = planners(other)
    assert theirs is not planner and theirs.layers[0] is other.model.layers[0]
    assert theirs.store is not planner.store and theirs.store.pool is None
    expected = tiny_models.step(plain, **tiny_models.batch())
    lt.checkpoint(model, None)
    for level in (0, 1, 1):
        set_level(other, level)
        assert_bits(tiny_models.step(other, **tiny_models.batch()), expected)
    mode.check(theirs, 1)
    lt.checkpoint(other, None)
    assert not planners(other) and not other.is_gradient_checkpointing


def test_the_end_restores_what_was_there(mode):
    model = llama(**mode.settings())
    before = [dict(vars(module)) for module in model.modules()]
    mode.planned(model)
    tiny_models.step(model, **tiny_models.batch())
    assert model.is_gradient_checkpointing
    assert lt.checkpoint(model, None) is model
    assert planners(model) == [] and not model.is_gradient_checkpointing
    assert [dict(vars(module)) for module in model.modules()] == before
