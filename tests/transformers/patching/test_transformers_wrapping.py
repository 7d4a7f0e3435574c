# SPDX-License-Identifier: BSD-3-Clause
"""Patched models in the eyes of frameworks that wrap layers: classes found by name, outputs cast by a
policy."""

import functools
import pickle

import pytest
import torch

pytest.importorskip("transformers")
from tiny_models import batch, make, twin
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import liger
from model_scan import models

# Layers of one class that call other submodules, and, in the last type, layers that are left as before.
MIXED = {
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextDecoderLayer"),
    "lfm2_moe": ("Lfm2MoeForCausalLM", "Lfm2MoeDecoderLayer"),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VLMoeDecoderLayer"),
}


def first_class(model, name):
    """As accelerate, PEFT and the Trainer find a class: the class of the first module with this name of its
    class."""
    return next(type(module) for module in model.modules() if type(module).__name__ == name)


@pytest.mark.parametrize("model_type", MIXED)
def test_policies_find_every_layer(model_type):
    class_name, layer_name = MIXED[model_type]
    model = liger.patch(models.build(model_type, class_name))
    layers = [module for module in model.modules() if type(module).__name__ == layer_name]
    assert len({type(layer) for layer in layers}) > 1
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={first_class(model, layer_name)}
    )
    chosen = [m for m in model.modules() if policy(module=m, recurse=False, nonwrapped_numel=0)]
    assert chosen == layers


def test_isinstance_of_patched_classes():
    plain = make("llama")
    model = liger.patch(twin(plain))
    norm, plain_norm = model.model.norm, plain.model.norm
    original, cls = type(plain_norm), type(norm)
    assert cls is not original and cls.__name__ == original.__name__
    assert isinstance(norm, original) and isinstance(plain_norm, cls)
    assert not isinstance(model.lm_head, cls) and not isinstance(object(), cls)
    assert issubclass(cls, original) and not issubclass(original, cls)

    class Derived(cls):
        pass

    assert not isinstance(norm, Derived) and not isinstance(plain_norm, Derived)
    assert type(pickle.loads(pickle.dumps(norm))) is cls


@pytest.mark.parametrize("family", ["llama", "Gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_of_the_output_of_the_head(family, dtype):
    """A hook casts the output of the head, as FSDP2 does with an output_dtype: the loss has its precision."""
    plain = make(family)
    model = liger.patch(twin(plain))

    def cast(module, args, output):
        return output.to(dtype)

    cast.__module__ = "torch.distributed.fsdp"
    # The second loss is infinite in float16.
    for number in (None, 1e-4):
        inputs = {**batch(), "num_items_in_batch": number}
        expected = plain(**inputs).loss
        expected.backward()
        hook = model.lm_head.register_forward_hook(cast)
        loss = model(**inputs).loss
        hook.remove()
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            scale = theirs.grad.abs().max().item()
            torch.testing.assert_close(
                mine.grad, theirs.grad, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
            )
        plain.zero_grad()
        model.zero_grad()
