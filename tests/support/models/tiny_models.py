# SPDX-License-Identifier: BSD-3-Clause
"""Tiny Hugging Face models for the patching tests, and one training step of them."""

import copy

import pytest
import torch
import transformers

from liger.transformers.checkpointing import methods

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def first_is_quick(first, *others):
    """Parameters of tests that take seconds each: a quick run has the first alone."""
    return [first, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


ONE_QUICK = first_is_quick(*FAMILIES)
VOCAB = 300


def config(family, **overrides):
    """Two layers, grouped-query attention, and for mistral and qwen a sliding window shorter than the
    sequences."""
    name = FAMILIES.get(family, family)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "attn_implementation": "eager",
        **overrides,
    }
    if family == "mistral":
        settings.setdefault("sliding_window", 5)
    return getattr(transformers, f"{name}Config")(**settings)


def make(family, device="cpu", dtype=torch.float32, **overrides):
    """A CausalLM with the same weights for the same arguments; norm weights and biases are not trivial."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        settings = config(family, **overrides)
        name = FAMILIES.get(family, family)
        model = getattr(transformers, f"{name}ForCausalLM")(settings)
        fill(model)
    return model.to(device, dtype).train()


def fill(model):
    """Gives norm weights and biases random values."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.1)


def batch(device="cpu", rows=2, tokens=11):
    """input_ids and labels, some of them ignored, and a mask that pads the second row on the right."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    mask = torch.ones_like(ids)
    mask[1:2, -3:] = 0
    labels[mask == 0] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device), "attention_mask": mask.to(device)}


def step(model, **inputs):
    """(output, {parameter name: gradient}) of one forward and backward."""
    model.zero_grad()
    output = model(**inputs)
    loss = output["loss"] if isinstance(output, dict) else output[0]
    loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def enable_checkpointing(model, reentrant=False):
    """Checkpointing of whole layers."""
    methods.enable(model, use_reentrant=reentrant)


disable_checkpointing = methods.disable


def twin(model):
    """An independent copy."""
    return copy.deepcopy(model)


def assert_same_step(ours, theirs):
    """Two results of :func:`step` agree within a few float32 roundings: loss and every gradient."""
    torch.testing.assert_close(ours[0]["loss"], theirs[0]["loss"], rtol=2e-6, atol=0)
    assert ours[1].keys() == theirs[1].keys()
    # GEMMs on a GPU sum in another order for each shape.
    rounding = 5e-5 if ours[0]["loss"].is_cuda else 1e-5
    for name, expected in theirs[1].items():
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            ours[1][name], expected, rtol=rounding, atol=rounding * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def older_checkpointing_method(monkeypatch):
    """Gives older versions of transformers the name of transformers 5.24, which the documents use."""
    from transformers import PreTrainedModel

    if not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        older = PreTrainedModel.gradient_checkpointing_enable
        monkeypatch.setattr(PreTrainedModel, "activation_checkpointing_enable", older, raising=False)
