# SPDX-License-Identifier: BSD-3-Clause
"""A tiny Llama whose layers liger.transformers.checkpoint keeps or recomputes, and what a test asks of it."""

import dataclasses

import pytest
import tiny_models
import torch
from combinations import seeded_step
from torch.utils._python_dispatch import TorchDispatchMode

import liger.transformers as lt
from liger.transformers.checkpointing import decoder_layers, memory_plan
from liger.transformers.checkpointing import planner as planning
from liger.transformers.checkpointing.checkpoint import planners

LAYERS = 4
# Where transformers checkpoints the call of a layer, the first one is always recomputed.
FEWEST = int(decoder_layers.READS_BEFORE_HOOKS)
# Steps until a choice holds for the first layer, whose function is read before the choice there.
SETTLING = 1 + FEWEST
MOST = LAYERS - FEWEST
PLENTY = 10**9

# A configuration of Llama-3.2-1B, for plans that need no model.
LLAMA_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def whole_path(savings, fixed=()):
    """Upgrades of whole layers, whatever attention costs in a tiny model: a level is a number of layers."""
    return memory_plan.path([dataclasses.replace(s, attention_bytes=0) for s in savings], fixed)


def attention_path(savings, fixed=()):
    """Upgrades that keep the attention of all layers before any whole layer."""
    return memory_plan.path([dataclasses.replace(s, attention_time=2 * s.time + 1) for s in savings], fixed)


@pytest.fixture
def whole_layers(monkeypatch):
    monkeypatch.setattr(planning, "path", whole_path)


@pytest.fixture
def attention_first(monkeypatch):
    monkeypatch.setattr(planning, "path", attention_path)


def set_level(model, level):
    """Has the following steps of a model with a plan run at a level, at most at the highest one."""
    (planner,) = planners(model)
    planner.allowed = level
    planner.settled.clear()


def llama(**settings):
    return tiny_models.make("llama", num_hidden_layers=LAYERS, **settings)


def sdpa_llama(**settings):
    """Eager attention cannot be kept alone."""
    return llama(attn_implementation="sdpa", **settings)


def planned(model, given, level=0, **settings):
    """The planner of a model with a plan, at a level, after a step that it has counted."""
    lt.checkpoint(model, PLENTY, **settings)
    for _ in range(SETTLING):
        set_level(model, 0)
        seeded_step(model, given)
    if level:
        set_level(model, level)
    (planner,) = planners(model)
    return planner


def kept(model):
    """True if each layer keeps its activations."""
    (planner,) = planners(model)
    return [vars(layer)["_gradient_checkpointing_func"] is decoder_layers.keep for layer in planner.layers]


def calls_of_layers(model):
    """A list that gets the number of a layer each time its attention runs."""
    (planner,) = planners(model)
    calls = []
    for number, layer in enumerate(planner.layers):
        layer.self_attn.register_forward_hook(lambda *_, number=number: calls.append(number))
    return calls


def measured(**settings):
    """(bytes of a step with full checkpointing, bytes of a layer), for 22 tokens of a tiny Llama."""
    model = lt.checkpoint(llama(**settings), PLENTY)
    for _ in range(2):
        tiny_models.step(model, **tiny_models.batch())
    (planner,) = planners(model)
    return planner.last_start[False] + planner.plan.need(False, 0, planner.longest), planner.plan.cost(1)


def result_of(model, loss):
    """The result of a step, after its backward."""
    return {"loss": loss}, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_bits(ours, theirs):
    """Two results of steps have the same bits."""
    assert torch.equal(ours[0]["loss"], theirs[0]["loss"])
    assert ours[1].keys() == theirs[1].keys() and ours[1]
    for name, expected in theirs[1].items():
        assert torch.equal(ours[1][name], expected), name


def free_bytes(store):
    """Bytes of the blocks of host memory that nothing uses."""
    store.pool.settle()
    return sum(length for free in store.pool._free for _, length in free)


def counts(model):
    """The number of layers in each state of the last step."""
    (planner,) = planners(model)
    return planner.plan.counts(planner.step.kept)


class Kernels(TorchDispatchMode):
    """Counts the kernels of SDPA that run in it."""

    def __init__(self):
        super().__init__()
        self.forwards = self.backwards = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_scaled_dot_product" in func.__name__:
            is_backward = "backward" in func.__name__
            self.backwards += is_backward
            self.forwards += not is_backward
        return func(*args, **(kwargs or {}))
