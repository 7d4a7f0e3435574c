# SPDX-License-Identifier: BSD-3-Clause
"""Patching with tiled_mlp: MLPs a shard of tokens at a time, with the results of the unpatched model."""

import pytest
import torch

import liger

transformers = pytest.importorskip("transformers")

from called_ops import CalledOps  # noqa: E402
from tiny_models import FAMILIES, assert_same_step, batch, make, step, twin  # noqa: E402

from liger.transformers import patch_report  # noqa: E402
from liger.transformers.checkpointing import methods  # noqa: E402
from liger.transformers.mlp.recipe import TiledMLPRecipe  # noqa: E402


@pytest.fixture
def calls(monkeypatch):
    """The number of shards and the activation of each call of the op by a patched MLP."""
    seen, run = [], TiledMLPRecipe.run

    def watched(self, module, x):
        seen.append((self._shards(x), self.activation))
        return run(self, module, x)

    monkeypatch.setattr(TiledMLPRecipe, "run", watched)
    return seen


def tiled_kinds(model):
    return list(patch_report(model).replaced.values()).count("tiled_mlp")


@pytest.mark.parametrize("shards", [None, 3, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_step(device, family, shards, calls):
    plain = make(family, device)
    patched = liger.patch(twin(plain), tiled_mlp=True, tiled_mlp_num_shards=shards)
    assert tiled_kinds(patched) == 2 and "swiglu" not in patch_report(patched).replaced.values()
    calls.clear()
    inputs = batch(device)
    assert_same_step(step(patched, **inputs), step(plain, **inputs))
    # A batch of 22 tokens has no thousand shards.
    assert calls == [(None if shards is None else min(shards, 22), "silu")] * 2


@pytest.mark.parametrize(
    ("hidden_act", "activation"), [("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("silu", "silu")]
)
def test_activations(device, hidden_act, activation, calls):
    plain = make("llama", device, hidden_act=hidden_act, mlp_bias=True)
    patched = liger.patch(twin(plain), tiled_mlp=True, tiled_mlp_num_shards=2)
    calls.clear()
    assert_same_step(step(patched, **batch(device)), step(plain, **batch(device)))
    assert calls == [(2, activation)] * 2


def test_an_activation_that_is_none_of_them():
    report = patch_report(liger.patch(make("llama", hidden_act="relu"), tiled_mlp=True))
    assert "tiled_mlp" not in report.replaced.values()
    assert "does not compute down(silu(gate) or gelu(gate) * up)" in report.left["model.layers.0.mlp"]


def test_gradient_checkpointing(device):
    plain = make("llama", device)
    patched = liger.patch(twin(plain), tiled_mlp=True, tiled_mlp_num_shards=3)
    for model in (plain, patched):
        methods.enable(model)
    assert_same_step(step(patched, **batch(device)), step(plain, **batch(device)))


def test_layers_that_do_more_than_multiply_are_called(device, calls):
    plain = make("llama", device)
    patched = liger.patch(twin(plain), tiled_mlp=True, tiled_mlp_num_shards=3)
    calls.clear()
    rows = []
    hook = lambda module, inputs, output: rows.append(output.shape[:-1].numel())  # noqa: E731
    patched.model.layers[0].mlp.up_proj.register_forward_hook(hook)
    assert_same_step(step(patched, **batch(device)), step(plain, **batch(device)))
    assert rows == [8, 8, 6] * 2  # the forward, and once more in the backward
    assert calls == [(3, "silu")]


def test_lora(device, calls):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    plain = make("llama", device)
    models = []
    for options in (None, {"tiled_mlp": True, "tiled_mlp_num_shards": 3}):
        torch.manual_seed(5)
        model = peft.get_peft_model(twin(plain), config)
        models.append(model if options is None else liger.patch(model, **options))
    calls.clear()
    with CalledOps() as ops:
        ours = step(models[1], **batch(device))
    theirs = step(models[0], **batch(device))
    assert any("lora" in name and "gate_proj" in name for name in ours[1])
    assert_same_step(ours, theirs)
    # The product still comes from the op: three shards of two layers, and once more in the backward.
    assert not calls and ops.full_names.count("liger::swiglu") == 12


def test_an_activation_with_hooks_is_called(calls):
    plain = make("llama")
    patched = liger.patch(twin(plain), tiled_mlp=True, tiled_mlp_num_shards=3)
    calls.clear()
    seen = []
    patched.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, inputs, output: seen.append(1))
    assert_same_step(step(patched, **batch()), step(plain, **batch()))
    assert len(seen) == 6 and calls == [(3, "silu")]


def test_a_model_that_is_made_later(calls):
    plain = make("qwen2")
    liger.transformers.patch_future("qwen2", tiled_mlp=True, tiled_mlp_num_shards=2)
    try:
        patched = make("qwen2")
    finally:
        liger.transformers.unpatch_future("qwen2")
    patched.load_state_dict(plain.state_dict())
    calls.clear()
    assert_same_step(step(patched, **batch()), step(plain, **batch()))
    assert calls == [(2, "silu")] * 2
    liger.unpatch(patched)
    assert_same_step(step(patched, **batch()), step(plain, **batch()))
    assert len(calls) == 2


@pytest.mark.parametrize(
    "options", [{"tiled_mlp": True, "tiled_mlp_num_shards": 0}, {"tiled_mlp_num_shards": 4}]
)
def test_shards_that_make_no_sense(options):
    with pytest.raises(
        ValueError, match=r"tiled_mlp_num_shards is .*, expected at least 1, and only together"
    ):
        liger.patch(make("llama"), **options)
