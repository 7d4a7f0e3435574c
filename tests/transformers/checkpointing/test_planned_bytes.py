# SPDX-License-Identifier: BSD-3-Clause
"""What ``liger plan --model`` says of recomputed layers and of adapters, and what tiny models save."""

import pytest
import torch

pytest.importorskip("transformers")

import saved_bytes as counted
from planned_llama import FEWEST

import liger
from liger.transformers.checkpointing import attention_calls, decoder_layers, offload
from liger.transformers.checkpointing.memory_plan import State
from liger.transformers.checkpointing.offload import HostStore
from liger.transformers.checkpointing.saved_bytes import (
    recomputed_layers,
    saved_in_layers,
    saved_with_adapters,
)

TYPES = ("llama", "qwen3", "gemma3_text", "mixtral", "phi3")
WITHIN = 0.05


def patched(model):
    return liger.patch(model, verbose=False)


def recomputing(model, state, store):
    """The patched model with all layers in a state."""
    layers = decoder_layers.find(patched(model))
    switches = decoder_layers.Switches(model, layers, store)
    [attention_calls.intercept(layer) for layer in layers]
    switches.leaving = [True] * len(layers)
    switches.turn((state,) * len(layers))
    return model


def planned(model_type):
    """Predicted bytes per token of one layer."""
    return recomputed_layers(patched(counted.build(model_type, layers=1)), torch.bfloat16)


@pytest.mark.parametrize("model_type", TYPES)
def test_recomputed_layers(model_type):
    """The input of a layer, and with it the output and the sums of its attention."""
    expected = planned(model_type)
    for state, count in ((State.NOTHING, 0), (State.ATTENTION, expected.attention)):
        found = counted.saved_per_token(
            lambda model, state=state: recomputing(model, state, HostStore(False)), model_type
        )
        assert found == pytest.approx(expected.inputs + count, rel=WITHIN), state
    assert 0 < expected.attention < expected.layer


@pytest.mark.skipif(bool(FEWEST), reason="this transformers reads the function of a layer earlier")
@pytest.mark.parametrize("model_type", TYPES)
def test_offloaded_layers(model_type, monkeypatch):
    """All but the last layer leave the device."""
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)
    store, layers = HostStore(True), 4
    model = recomputing(counted.build(model_type, layers=layers), State.ATTENTION, store)
    store.begin()
    loss = counted.forward(model, counted.ids())
    store.flush()
    expected = recomputed_layers(model, torch.bfloat16)
    tokens = counted.ROWS * counted.TOKENS
    whole = expected.inputs + expected.attention
    assert store.moved / tokens == pytest.approx(whole * (layers - 1) / layers, rel=WITHIN)
    # On the device: three inputs, and the attention of two layers.
    assert expected.passing_inputs == expected.inputs * 3 / layers
    assert expected.passing_attention == expected.attention / 2
    loss.backward()


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_adapters(model_type):
    """LoRA on all linear layers saves no product of gate and up, but narrow tensors."""
    peft, rank = pytest.importorskip("peft"), 4

    def adapted(model):
        config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return patched(peft.get_peft_model(model, config, autocast_adapter_dtype=False))

    model = patched(counted.build(model_type, layers=1))
    expected = saved_with_adapters(saved_in_layers(model, torch.bfloat16))
    linear = sum(isinstance(m, torch.nn.Linear) for m in model.model.layers.modules())
    found = counted.saved_per_token(adapted, model_type)
    assert found == pytest.approx(expected + linear * rank * 2, rel=WITHIN)
