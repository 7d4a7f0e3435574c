# SPDX-License-Identifier: BSD-3-Clause
"""Attention that is not SDPA of transformers' interface, with stand-ins for what is not installed."""

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models
import transformers
from combinations import inputs_of, lora, seeded_step
from planned_llama import (
    LAYERS,
    MOST,
    PLENTY,
    Kernels,
    assert_bits,
    attention_first,
    counts,
    llama,
    set_level,
)
from transformers.integrations import flash_attention

import liger.transformers as lt
from liger.transformers.checkpointing import offload
from liger.transformers.checkpointing.checkpoint import planners
from liger.transformers.checkpointing.memory_plan import State

pytestmark = pytest.mark.usefixtures(attention_first.__name__)


def noisy_attention(module, query, key, value, mask, dropout=0.0, scaling=None, **kwargs):
    """Attention with dropout in plain torch ops, as a package's function that draws random numbers."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    weights = torch.softmax(query @ key.transpose(2, 3) * scaling, -1)
    noisy_attention.calls += 1
    return (torch.dropout(weights, dropout, True) @ value).transpose(1, 2).contiguous(), None


@pytest.fixture
def noisy():
    noisy_attention.calls = 0
    table = transformers.AttentionInterface
    table.register("noisy", noisy_attention)
    yield
    del table._global_mapping["noisy"]


def test_random_numbers_after_attention(noisy):
    """The recomputation draws the numbers of later dropouts, but not the numbers of attention."""
    given = inputs_of("llama")
    models = []
    for _ in range(2):
        model = lora(
            llama(attn_implementation="noisy", attention_dropout=0.3),
            "o_proj",
            "down_proj",
            init_lora_weights=False,
            lora_dropout=0.2,
        )
        models.append(model)
    expected = seeded_step(models[1], given)
    lt.checkpoint(models[0], PLENTY)
    set_level(models[0], 0)
    assert_bits(seeded_step(models[0], given), expected)
    noisy_attention.calls = 0
    set_level(models[0], MOST)
    assert_bits(seeded_step(models[0], given), expected)
    # The attention of the first layer has no gradient, so it has nothing to keep.
    assert counts(models[0])[State.ATTENTION] == MOST and noisy_attention.calls == LAYERS + 1


# --- packages that are not installed ------------------------------------------------------------------------


class Flash(torch.autograd.Function):
    """Stands in for the node of flash-attn: it saves q, k, v, its output and the logarithms of the sums."""

    calls = 0

    @staticmethod
    def weights(q, k, sums=None):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        sums = scores.logsumexp(-1) if sums is None else sums
        return torch.exp(scores - sums[..., None]), sums

    @staticmethod
    def forward(ctx, q, k, v):
        Flash.calls += 1
        weights, sums = Flash.weights(q, k)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, sums = ctx.saved_tensors
        weights, _ = Flash.weights(q, k, sums)
        inner = torch.einsum("bqhd,bkhd->bhqk", gradient, v)
        inner = weights * (inner - (gradient * out).sum(-1).transpose(1, 2)[..., None]) / q.shape[-1] ** 0.5
        return (
            torch.einsum("bhqk,bkhd->bqhd", inner, k),
            torch.einsum("bhqk,bqhd->bkhd", inner, q),
            torch.einsum("bhqk,bqhd->bkhd", weights, gradient),
        )


@pytest.fixture
def flash(monkeypatch):
    """What transformers calls in the place of the packages' functions."""

    def stand_in(query, key, value, *_, **__):
        groups = query.shape[2] // key.shape[2]
        return Flash.apply(query, *(x.repeat_interleave(groups, 2) for x in (key, value)))

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", stand_in)
    monkeypatch.setattr(Flash, "calls", 0)


def named(implementation):
    """A model that calls attention by a name, without transformers' question for the package."""
    model = llama(attn_implementation="sdpa")
    model.config._attn_implementation_internal = implementation
    assert model.config._attn_implementation == implementation
    return model


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3"])
def test_flash_attn_by_name(implementation, offloaded, flash, monkeypatch):
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)
    given = tiny_models.batch()
    del given["attention_mask"]
    models = [named(implementation) for _ in range(2)]
    expected = seeded_step(models[1], given)
    assert Flash.calls == LAYERS
    lt.checkpoint(models[0], PLENTY, offload=offloaded)
    (planner,) = planners(models[0])
    for level in (0, MOST, MOST + 1):
        set_level(models[0], level)
        Flash.calls = 0
        assert_bits(seeded_step(models[0], given), expected)
        states = planner.plan.states[level] if level else [State.NOTHING] * LAYERS
        assert Flash.calls == LAYERS + states.count(State.NOTHING) - (level == 0)
    # The output and the sums; keys and values, which are repeated inside the call, are kept as well.
    rows = given["input_ids"].numel()
    assert planner.plan.layers[1][0] == rows * 4 * (3 * 16 + 1) * 4
    assert (planner.store.moved > planner.store.inputs) == offloaded
    assert "cannot keep attention alone" not in planner.summary
    assert f" keep attention ({implementation}, 0." in planner.summary


def test_an_unknown_function_keeps_what_its_ops_save(noisy):
    """Counted with all weights, which are no small tensors; so whole layers may come first, and bits stay."""
    given = inputs_of("llama")
    models = [llama(attn_implementation="noisy") for _ in range(2)]
    expected = seeded_step(models[1], given)
    lt.checkpoint(models[0], PLENTY)
    for level in (0, 1, MOST):
        set_level(models[0], level)
        assert_bits(seeded_step(models[0], given), expected)
    (planner,) = planners(models[0])
    rows, length = given["input_ids"].shape
    assert planner.plan.layers[1][0] >= rows * 4 * length * (length + 16) * 4


# --- SDPA without the interface -----------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A layer of a model that is none of transformers."""

    def __init__(self, width=32):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2)).tanh()


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def gradients_of(model, x):
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return {"loss": loss.detach()}, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("offloaded", [False, True])
def test_selective_checkpointing_where_sdpa_is_called_by_itself(offloaded, monkeypatch):
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)
    model, x = Stack(), torch.randn(2, 8, 32, requires_grad=True)
    expected = gradients_of(Stack(), x)
    lt.checkpoint(model, PLENTY, offload=offloaded)
    for level in (0, 1, LAYERS, LAYERS + 1):
        set_level(model, level)
        with Kernels() as kernels:
            assert_bits(gradients_of(model, x), expected)
        if level:
            nothing, attention, _ = counts(model)
            assert kernels.forwards == LAYERS + nothing and attention == min(level, 2 * LAYERS - level)
    (planner,) = planners(model)
    # The output and a float32 per row and head.
    assert planner.plan.layers[1] == [16 * (32 + 4) * 4] * LAYERS
    assert planner.store.moved == planner.store.inputs and bool(planner.store.moved) == offloaded
    assert " keep attention (torch's selective checkpointing, 0.00 MiB each)" in planner.summary
