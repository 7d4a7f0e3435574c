# SPDX-License-Identifier: BSD-3-Clause
"""Gradient checkpointing of both kinds, selective checkpointing, and saved tensors that are moved to the
CPU."""

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import liger

pytest.importorskip("transformers")

from combinations import (
    CLASSES,
    DEVICES,
    TYPES,
    assert_same_training,
    has_common_parts,
    inputs_of,
    lora,
    seeded_step,
    targets_of,
    tiny,
    types,
)
from tiny_models import assert_same_step

from liger.transformers.checkpointing import methods
from liger.transformers.recipe import reuse

TEXTS = types("qwen3", "gemma3_text", "mixtral")


def pair(model_type, use_reentrant, device="cpu", options=(), **settings):
    """A patched model and one as before, both with gradient checkpointing."""
    models = tiny(model_type, device, **settings), tiny(model_type, device, **settings)
    liger.patch(models[0], **dict(options))
    for model in models:
        methods.enable(model, use_reentrant=use_reentrant)
    return models


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("model_type", types(*(name for name in CLASSES if name != "llava")))
def test_every_weight_trains(model_type, use_reentrant, device):
    ours, theirs = pair(model_type, use_reentrant, device)
    assert has_common_parts(ours)
    assert_same_training(ours, theirs, inputs_of(model_type, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("model_type", TYPES)
def test_adapters_train(model_type, use_reentrant, device):
    pytest.importorskip("peft")
    models = pair(model_type, use_reentrant, device)
    for model in models:
        model.enable_input_require_grads()
    targets = targets_of(model_type)
    ours, theirs = (lora(m, *targets, init_lora_weights=False, lora_dropout=0.2) for m in models)
    assert_same_training(ours, theirs, inputs_of(model_type, device))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("model_type", TEXTS)
@pytest.mark.parametrize(
    "change",
    [
        {"tie_word_embeddings": True},
        {"attention_dropout": 0.2},
        {"options": {"tiled_mlp": True, "tiled_mlp_num_shards": 3}},
        {"options": {"fused_linear_cross_entropy": False, "cross_entropy": True}},
    ],
    ids=["tied", "dropout", "tiled", "loss from logits"],
)
def test_variants(model_type, use_reentrant, change):
    ours, theirs = pair(model_type, use_reentrant, **change)
    given = inputs_of(model_type)
    assert_same_step(seeded_step(ours, given), seeded_step(theirs, given))


@pytest.mark.parametrize("saved", ["GEMMs", "ops of liger"])
@pytest.mark.parametrize("model_type", TEXTS)
def test_selective_checkpointing(model_type, saved, monkeypatch):
    """Outputs that a policy saves must survive a backward that overwrites activations."""
    monkeypatch.setattr(reuse, "WORTH_REUSING", 0)

    def policy(context, op, *args, **kwargs):
        names = ("aten.mm", "aten.addmm") if saved == "GEMMs" else ("liger.",)
        is_saved = str(op).startswith(names)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    models = liger.patch(tiny(model_type)), tiny(model_type)
    for model in models:
        context = functools.partial(create_selective_checkpoint_contexts, policy)
        methods.enable(model, context_fn=context)
    assert_same_step(*(seeded_step(model, inputs_of(model_type)) for model in models))


def loss_and_gradients(model, loss):
    loss.backward()
    return {"loss": loss}, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_around_the_model(use_reentrant):
    results, given = [], inputs_of("llama")
    for patched in (True, False):
        model = tiny("llama", tie_word_embeddings=True)
        if patched:
            liger.patch(model)
        start = torch.zeros((), requires_grad=True)
        loss = checkpoint(
            lambda start, model=model: model(**given).loss + start, start, use_reentrant=use_reentrant
        )
        results.append(loss_and_gradients(model, loss))
    assert_same_step(*results)


def test_checkpoint_around_the_backbone():
    """The embedding is recomputed outside the call of the model, in which it shares a weight with the
    head."""
    results = []
    for patched in (True, False):
        model = tiny("llama", tie_word_embeddings=True)
        if patched:
            liger.patch(model)
        backbone = model.model.forward
        model.model.forward = lambda backbone=backbone, **arguments: checkpoint(
            backbone, use_reentrant=False, **arguments
        )
        results.append(loss_and_gradients(model, model(**inputs_of("llama")).loss))
    assert_same_step(*results)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", TEXTS)
def test_saved_tensors_on_the_cpu(model_type, device, monkeypatch):
    """Copies of saved tensors may not be taken for the memory that a backward may overwrite."""
    monkeypatch.setattr(reuse, "WORTH_REUSING", 0)
    results = []
    for model in (liger.patch(tiny(model_type, device)), tiny(model_type, device)):
        with torch.autograd.graph.save_on_cpu():
            loss = model(**inputs_of(model_type, device)).loss
        results.append(loss_and_gradients(model, loss))
    assert_same_step(*results)
