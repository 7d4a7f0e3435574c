# SPDX-License-Identifier: BSD-3-Clause
"""The models whose training steps are measured, and the ways to train them."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from liger_bench.models import contestants as model_contestants
from liger_bench.models import sizes as model_sizes
from liger_bench.models import trainee as model_trainee
from liger_bench.models.contestants import Contestant

TINY = model_sizes.SELF_TEST


@pytest.mark.parametrize("name", model_sizes.SIZES)
def test_sizes_are_those_of_their_models(name):
    """Parameters in billions, as their authors count them; of mixtures a twelfth, sixteenth or sixth of the
    layers."""
    transformers = pytest.importorskip("transformers")
    size = model_sizes.size_of(name)
    config = transformers.AutoConfig.for_model(size.family, **{"tie_word_embeddings": True, **size.config})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    billions = {"1b": 1.24, "8b": 8.03, "qwen3-1.7b": 1.72, "gemma3-1b": 1.0}
    billions["qwen3-moe"] = 0.622 + (30.53 - 0.622) / 12
    billions["mixtral"] = 0.262 + (46.70 - 0.262) / 16
    billions["gpt-oss"] = 1.158 + (20.91 - 1.158) / 6
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions[name], abs=0.006)


def first_loss(prepare, **settings):
    trainee = model_trainee.Trainee(Contestant(prepare, **settings), TINY, "cpu")
    trainee.build()
    tokens = torch.arange(32).view(2, 16)
    trainee.warm_up([tokens])
    trainee.measure(tokens)
    assert len(trainee.samples) == 1 and 0 < trainee.host[0] <= trainee.samples[0]
    return trainee.loss


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_model_of_4_bits_is_prepared_as_the_recipe_says(checkpointing):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    size = replace(TINY, dtype=torch.bfloat16, lora=2, nf4=True, checkpointing=checkpointing)
    trainee = model_trainee.Trainee(Contestant(lambda model: model), size, "cpu")
    trainee.build()
    model = trainee.model.get_base_model()
    assert model.model.norm.weight.dtype == torch.float32
    assert model.is_gradient_checkpointing is checkpointing


def test_a_step_as_one_graph_needs_a_gpu():
    with pytest.raises(ValueError, match="the model is on cpu, expected one CUDA device"):
        first_loss(lambda model: model, captured=True)


def test_steps_of_reduce_overhead(monkeypatch):
    """Compiled without CUDA graphs; the loss is a copy, since the next step overwrites the output."""
    monkeypatch.setattr(
        model_contestants, "compiled", lambda model, mode: model if mode == "reduce-overhead" else None
    )
    assert first_loss(model_contestants.reduce_overhead) == first_loss(lambda model: model)
