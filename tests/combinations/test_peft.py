# SPDX-License-Identifier: BSD-3-Clause
"""Adapters of PEFT other than plain LoRA, DoRA among them, and what becomes of the head."""

import pytest
import torch

import liger

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from combinations import (  # noqa: E402
    ORDERS,
    TYPES,
    adapted,
    assert_replaced,
    assert_same_generation,
    assert_same_training,
    inputs_of,
    kinds,
    lora,
    loss_of,
    seeded_step,
    targets_of,
    tiny,
    types,
)
from tiny_models import assert_same_step  # noqa: E402

import liger.transformers as lt  # noqa: E402

LAYERS = ["q_proj", "gate_proj", "down_proj"]
TOKENS = inputs_of("llama")["input_ids"][0, -3:].tolist()


def wrapped(model_type, wrap, order=None, options=(), **settings):
    """A tiny model in adapters, patched before or after, or never."""
    model = tiny(model_type, **settings)
    if order == "patch first":
        liger.patch(model, **dict(options))
    model = wrap(model)
    return liger.patch(model, **dict(options)) if order == "patch last" else model


def dora(model_type, **settings):
    return lambda model: lora(
        model, *targets_of(model_type), use_dora=True, init_lora_weights=False, **settings
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", TYPES)
def test_dora(model_type, order, tmp_path):
    wrap = dora(model_type, lora_dropout=0.2)
    ours, theirs = (wrapped(model_type, wrap, o) for o in (order, None))
    given = inputs_of(model_type)
    assert_replaced(ours, like=liger.patch(tiny(model_type)))
    assert_same_training(ours, theirs, given)
    assert_same_generation(ours, theirs, given)
    ours.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(liger.patch(tiny(model_type)), tmp_path)
    torch.testing.assert_close(loss_of(again, given), loss_of(ours, given), rtol=1e-5, atol=0)
    ours, theirs = ours.merge_and_unload(), theirs.merge_and_unload()
    assert_replaced(ours, like=liger.patch(tiny(model_type)))
    torch.testing.assert_close(loss_of(ours, given), loss_of(theirs, given), rtol=1e-5, atol=0)


OTHERS = {
    "AdaLoRA": lambda: peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2, target_modules=LAYERS, task_type="CAUSAL_LM"
    ),
    "IA3": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=["down_proj"]),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "norm tuning": lambda: peft.LNTuningConfig(target_modules=["post_attention_layernorm", "norm"]),
    "LoRA and tokens": lambda: peft.LoraConfig(target_modules=LAYERS, trainable_token_indices=TOKENS),
    "LoRA on embedding and head": lambda: peft.LoraConfig(target_modules=["embed_tokens", "lm_head"]),
    "OFT": lambda: peft.OFTConfig(r=4, oft_block_size=0, target_modules=["q_proj"]),
    "layer replication": lambda: peft.LoraConfig(target_modules=LAYERS, layer_replication=[[0, 2], [1, 2]]),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_adapters(name, order):
    # Layers of Qwen3 have entries in the configuration, which PEFT does not replicate.
    model_type = "llama" if name == "layer replication" else "qwen3"
    ours, theirs = (wrapped(model_type, lambda m: adapted(m, OTHERS[name]()), o) for o in (order, None))
    given = inputs_of(model_type)
    assert ours(**given).logits is None and kinds(ours)["fused_linear_cross_entropy"]
    assert_same_training(ours, theirs, given)
    if name != "layer replication":  # whose layers share a place in the cache
        assert_same_generation(ours, theirs, given)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", types("mixtral", "qwen3_moe"))
def test_lora_on_the_weights_of_experts(model_type, order):
    """PEFT turns the weights into parametrizations, which compute them at every call."""

    def wrap(model):
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        return lora(model, "q_proj", target_parameters=names, init_lora_weights=False)

    ours, theirs = (wrapped(model_type, wrap, o) for o in (order, None))
    given = inputs_of(model_type)
    assert_replaced(ours, like=liger.patch(tiny(model_type)))
    assert_same_training(ours, theirs, given)
    ours, theirs = ours.merge_and_unload(), theirs.merge_and_unload()
    torch.testing.assert_close(loss_of(ours, given), loss_of(theirs, given), rtol=1e-5, atol=0)
    assert_replaced(ours, like=liger.patch(tiny(model_type)))


def test_switched_off_adapters():
    ours, theirs = (wrapped("gemma3_text", dora("gemma3_text"), o) for o in ("patch last", None))
    given = inputs_of("gemma3_text")
    with ours.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(ours(**given).loss, theirs(**given).loss, rtol=1e-5, atol=0)
    with ours.disable_adapter():
        torch.testing.assert_close(ours(**given).loss, tiny("gemma3_text")(**given).loss, rtol=1e-5, atol=0)


def test_tiled_mlps_of_dora_layers():
    options = {"tiled_mlp": True, "tiled_mlp_num_shards": 3}
    ours, theirs = (wrapped("llama", dora("llama"), o, options) for o in ("patch last", None))
    assert kinds(ours)["tiled_mlp"] == 2
    assert_same_training(ours, theirs, inputs_of("llama"))


# --- the head after patching --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_a_merged_head_computes_the_loss(order, caplog):
    """Merging replaces the LoRA layer, which was patched, by the linear layer in it, which was not."""
    ours, theirs = (
        wrapped(
            "llama", lambda m: lora(m, "q_proj", "lm_head", init_lora_weights=False), o
        ).merge_and_unload()
        for o in (order, None)
    )
    ours.requires_grad_(True)
    theirs.requires_grad_(True)
    given = inputs_of("llama")
    found = seeded_step(ours, given)
    assert_same_step(found, seeded_step(theirs, given))
    assert found[1]["lm_head.weight"] is not None and ours.lm_head._get_name() == "LigerLinear"
    assert kinds(ours)["fused_linear_cross_entropy"] == 1
    assert not any("full logits" in record.message for record in caplog.records)
    liger.unpatch(ours)
    assert type(ours.lm_head) is torch.nn.Linear


def test_a_head_of_the_user_computes_the_loss():
    """It has a bias, which the head that was patched had not."""
    ours, theirs = liger.patch(tiny("llama")), tiny("llama")
    theirs.lm_head = torch.nn.Linear(64, 320, bias=True)
    ours.set_output_embeddings(torch.nn.Linear(64, 320, bias=True))
    ours.lm_head.load_state_dict(theirs.lm_head.state_dict())
    assert_same_training(ours, theirs, inputs_of("llama"))
    assert ours.lm_head._get_name() == "LigerLinear"


def test_a_head_that_became_another_layer_is_reported(caplog):
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    ours, theirs = liger.patch(tiny("llama")), tiny("llama")
    for model in (ours, theirs):
        head = Scaled(64, 320, bias=False)
        head.weight = model.lm_head.weight
        model.lm_head = head
    assert "Scaled, not a plain linear layer" in lt.patch_report(ours).left[""]
    given = inputs_of("llama")
    assert_same_step(seeded_step(ours, given), seeded_step(theirs, given))
    assert "a model was patched, but now its head is a" in caplog.text


@pytest.mark.parametrize("head", [None, torch.nn.Identity()], ids=str)
def test_a_head_that_was_taken_away_is_reported(head):
    model = liger.patch(tiny("llama"))
    model.lm_head = head
    assert type(head).__name__ in lt.patch_report(model).left[""]


@pytest.mark.parametrize("kind", ["DoRA", "IA3", "tokens of a tied head"])
def test_adapters_whose_head_needs_logits_are_reported(kind, caplog):
    def wrap(model):
        if kind == "DoRA":
            return lora(model, "lm_head", use_dora=True, init_lora_weights=False)
        if kind == "IA3":
            return adapted(model, peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]))
        return adapted(model, peft.LoraConfig(target_modules=LAYERS, trainable_token_indices=TOKENS))

    settings = {"tie_word_embeddings": True} if kind.startswith("tokens") else {}
    ours, theirs = (wrapped("llama", wrap, o, **settings) for o in ("patch first", None))
    (reason,) = lt.patch_report(ours).left.values()
    assert "peft." in reason and "full logits" in reason
    assert_same_training(ours, theirs, inputs_of("llama"))
    assert "full logits" in caplog.text
