# SPDX-License-Identifier: BSD-3-Clause
"""The Trainer with accelerate's FSDP2 plugin: loss and weights of a patched model after some steps."""

import families
import pytest
import ranks
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from trainer_steps import Rows, Trainer, arguments, collate, losses_of, reset, steps_of

NAMES = ["qwen3", "gemma2", "gemma3", "qwen3_moe", "mixtral", "gpt_oss"]


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch):
    if not ranks.ON_GPU:
        # accelerate shards on accelerators only, though its FSDP2 code runs on CPUs.
        original = AcceleratorState.__init__

        def init(self, *args, fsdp_plugin=None, **kwargs):
            original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
            if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
                self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
                if self._mixed_precision != "no":
                    fsdp_plugin.set_mixed_precision(self._mixed_precision)

        monkeypatch.setattr(AcceleratorState, "__init__", init)
    yield
    reset()


def train(model, folder, **options):
    """(the :class:`families.Result` without gradients, the micro-batches of this rank)."""
    reset()
    before = families.weights_of(model)
    trainer = Trainer(
        model, arguments(folder, fsdp=True, **options), train_dataset=Rows(), data_collator=collate
    )
    trainer.train()
    assert isinstance(trainer.model_wrapped, FSDPModule)
    after = families.weights_of(trainer.model_wrapped)
    return families.result(losses_of(trainer), [{}], before, after), trainer.seen


def run(name, folder, tied=None, dtype=torch.float32, make=families.make, **options):
    theirs, seen = train(make(name, tied), folder, **options)
    model = families.patched(make(name, tied), name)
    ours, again = train(model, folder, **options)
    families.assert_patched(model, name)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(seen, again, strict=True))
    exact = families.exactly(families.make(name, tied), steps_of(seen))
    families.assert_as_exact(ours, theirs, exact._replace(first={}, last={}), dtype)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("name", NAMES)
def test_float32(name, reshard, tmp_path):
    run(name, tmp_path, fsdp_config={"reshard_after_forward": reshard})


@pytest.mark.parametrize("checkpointing", [False, True], ids=["activations", "checkpointing"])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name, checkpointing, tmp_path):
    config = {"activation_checkpointing": checkpointing}
    run(name, tmp_path, dtype=torch.bfloat16, bf16=True, fsdp_config=config)


@pytest.mark.usefixtures("liger_kernel")
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral"])
def test_use_liger_kernel(name, tmp_path):
    """The Trainer patches the model itself, before it shards it."""
    theirs, seen = train(families.make(name), tmp_path)
    model = families.make(name)
    ours, _ = train(model, tmp_path, use_liger_kernel=True)
    families.assert_patched(model, name)
    exact = families.exactly(families.make(name), steps_of(seen))
    families.assert_as_exact(ours, theirs, exact._replace(first={}, last={}))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["activations", "checkpointing"])
def test_layers_of_two_kinds(checkpointing, tmp_path):
    """Layers with linear and with full attention have one class in transformers, and each is a unit."""
    model = families.patched(families.make("qwen3_next"), "qwen3_next")
    layers = [m for m in model.modules() if type(m).__name__ == "Qwen3NextDecoderLayer"]
    assert len({type(layer) for layer in layers}) == len(layers) == 2
    config = {"activation_checkpointing": checkpointing}
    run("qwen3_next", tmp_path, fsdp_config=config)
    train(model, tmp_path, fsdp_config=config)
    assert all(isinstance(layer, FSDPModule) for layer in layers)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_tied_or_not(name, tmp_path):
    """The other choice than the configuration of the family makes: accelerate makes other units."""
    run(name, tmp_path, tied=name == "qwen3")


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_of_the_model(name, tmp_path):
    run(name, tmp_path, gradient_checkpointing=True)


@pytest.mark.parametrize("name", NAMES)
def test_loading_on_one_rank(name, tmp_path):
    """accelerate moves the patched model to the meta device, shards it, and loads it from rank 0."""
    run(name, tmp_path, fsdp_config={"cpu_ram_efficient_loading": True})
