# SPDX-License-Identifier: BSD-3-Clause
"""DeepSpeed ZeRO-3: checkpointing, leaf modules, and patching of a model whose parameters are partitioned."""

import families
import pytest
import ranks
import torch
import transformers
from test_deepspeed import deepspeed
from test_deepspeed_families import CONFIG, run
from transformers.integrations import HfDeepSpeedConfig

import liger
from liger.transformers.checkpointing import methods, offload
from liger.transformers.checkpointing.checkpoint import planners

REENTRANT = ["qwen3", "gemma3", "mixtral"]


@pytest.mark.parametrize(
    "name, reentrant", [(n, False) for n in families.FAMILIES] + [(n, True) for n in REENTRANT]
)
def test_checkpointing(name, reentrant):
    def change(model):
        methods.enable(model, use_reentrant=reentrant)

    run(name, change=change)


@pytest.mark.parametrize("name", families.MOE)
def test_leaf_modules(name):
    """DeepSpeed gathers the block of a mixture with all that is in it, and finds the block by its class."""

    def change(model):
        blocks = {
            type(m) for m in model.modules() if type(m).__name__.endswith(("SparseMoeBlock", "GptOssMLP"))
        }
        experts = {type(m) for m in model.modules() if type(m).__name__.endswith("Experts")}
        assert len(deepspeed.utils.set_z3_leaf_modules(model, list(blocks))) == 2
        assert len(blocks) == len(experts) == 1

    run(name, change=change)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_patch_of_partitioned_model(name, tmp_path):
    """from_pretrained partitions the parameters where ZeRO-3 is configured: patching sees empty ones."""
    folder = [tmp_path]
    torch.distributed.broadcast_object_list(folder)
    # Rank 0 alone writes the weights.
    families.make(name).save_pretrained(folder[0])
    torch.distributed.barrier()

    def load(name, tied):
        # It is in effect as long as it exists.
        configuration = HfDeepSpeedConfig(CONFIG)
        model = getattr(transformers, families.FAMILIES[name].model).from_pretrained(
            folder[0], attn_implementation="eager"
        )
        assert all(parameter.numel() == 0 for parameter in model.parameters())
        del configuration
        return model.train()

    run(name, make=load)


@pytest.mark.parametrize("targets, save_head", [("layers", False), ("layers", True), ("head", False)])
def test_lora(targets, save_head):
    pytest.importorskip("peft")
    from test_lora_families import make

    def lora(name, tied=None):
        return make(targets, save_head)

    run("qwen3", make=lora, whole=lora)


@pytest.mark.parametrize("choice", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral"])
def test_planned_checkpointing(name, choice, monkeypatch):
    """The first step recomputes every layer, the later ones none. On a GPU one layer keeps its activations
    until a step has confirmed the counted bytes."""
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)
    planned = []

    def change(model):
        liger.transformers.checkpoint(model, 10**12, offload=choice)
        planned.append(model)

    run(name, change=change)
    for model in planned:
        (planner,) = planners(model)
        assert (planner.store.most > 0) == choice
        assert planner.step.kept == (1 if ranks.ON_GPU else len(planner.layers))
