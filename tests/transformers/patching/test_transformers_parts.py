# SPDX-License-Identifier: BSD-3-Clause
"""Layer norms, squared ReLU, forms of rotary embeddings and weightless norms in architectures of
transformers."""

import pytest
import torch

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import assert_same_step, batch, make, step, twin  # noqa: E402

from liger.transformers import patch_report  # noqa: E402

LATENT = {
    "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 16,
    "kv_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "num_key_value_heads": 4,
}  # fmt: skip
USUAL = {"rms_norm": 5, "fused_add_rms_norm": 2, "rope": 2}
HEAD = {"fused_linear_cross_entropy": 1}

# Architecture -> (settings, the number of parts of each kind).
ARCHITECTURES = {
    "StableLm": ({}, {"layer_norm": 5, "rope": 2, "swiglu": 2}),
    "Starcoder2": (
        {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
        {"layer_norm": 5, "rope": 2},
    ),
    "GPTNeoX": ({}, {"layer_norm": 5, "rope": 2}),
    "Phi": ({}, {"layer_norm": 3, "rope": 2, "gelu": 2}),
    "GPTJ": (
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_inner": 96},
        {"layer_norm": 3, "rope": 2, "gelu": 2},
    ),
    "Olmo": ({}, {"layer_norm": 5, "rope": 2, "swiglu": 2}),
    "Cohere": ({}, {"layer_norm": 3, "rope": 2, "swiglu": 2}),
    "Nemotron": ({}, {"layer_norm": 5, "rope": 2, "relu_squared": 2}),
    "Gemma2": ({}, {**USUAL, **HEAD, "rms_norm": 9, "geglu": 2}),
    "Phi3": ({}, {**USUAL, **HEAD, "swiglu": 2}),
    "Granite": ({"logits_scaling": 3.0}, {**USUAL, **HEAD, "swiglu": 2}),
    "Arcee": ({}, {**USUAL, "relu_squared": 2}),
    "NanoChat": ({}, {"rms_norm": 9, "fused_add_rms_norm": 2, "rope": 2, "relu_squared": 2}),
    "Glm4": ({}, {"rms_norm": 9, "fused_add_rms_norm": 2, "rope": 2, "swiglu": 2}),
    "Helium": ({}, {**USUAL, "swiglu": 2}),
    "Ernie4_5": ({}, {**USUAL, "swiglu": 2}),
    "GptOss": ({"num_local_experts": 4}, USUAL),
    "DeepseekV2": (LATENT, {**USUAL, "rms_norm": 9}),
    "DeepseekV3": (LATENT, {**USUAL, "rms_norm": 9}),
}


def make_or_skip(name):
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this transformers has no {name}")
    return make(name, **ARCHITECTURES[name][0])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients(name):
    plain = make_or_skip(name)
    model = liger.patch(twin(plain))
    kinds = list(patch_report(model).replaced.values())
    assert {kind: kinds.count(kind) for kind in ARCHITECTURES[name][1]} == ARCHITECTURES[name][1]
    expected = step(plain, **batch())
    assert_same_step(step(model, **batch()), expected)
    liger.unpatch(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert_same_step(step(model, **batch()), expected)


# --- multimodal models --------------------------------------------------------------------------------------


def same_steps(model, plain, inputs):
    results = []
    for m in (model, plain):
        torch.manual_seed(4)
        output = m(**inputs)
        output = output[0] if output.get("loss") is None else output["loss"]
        loss = output.float().square().mean()
        m.zero_grad()
        loss.backward()
        results.append(({"loss": loss}, {n: p.grad for n, p in m.named_parameters() if p.grad is not None}))
    assert_same_step(*results)


def randomised(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def text_sizes(**more):
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **more}


def config_class(package, name):
    module = pytest.importorskip(f"transformers.models.{package}.configuration_{package}")
    return getattr(module, name)


@pytest.mark.parametrize("package", ["qwen2_vl", "qwen2_5_vl"])
def test_vision_towers_of_qwen(package):
    prefix = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[package]
    sizes = {"depth": 2, "num_heads": 2, "patch_size": 4, "hidden_size": 32, "temporal_patch_size": 2}
    if package == "qwen2_vl":
        sizes |= {"embed_dim": 32, "hidden_size": 64}
        kinds = {"layer_norm": 5, "rope": 2}
    else:
        sizes |= {
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 16,
        }
        kinds = {"rms_norm": 5, "rope": 2, "swiglu": 2}
    settings = config_class(package, f"{prefix}VisionConfig")(**sizes, attn_implementation="eager")
    modeling = pytest.importorskip(f"transformers.models.{package}.modeling_{package}")
    tower = next(
        cls
        for name, cls in vars(modeling).items()
        if name.endswith(("VisionTransformerPretrainedModel", "VisionModel"))
    )
    plain = randomised(tower(settings))
    model = liger.patch(twin(plain))
    found = list(patch_report(model).replaced.values())
    assert {kind: found.count(kind) for kind in kinds} == kinds
    inputs = {"hidden_states": torch.randn(16, 3 * 2 * 4 * 4), "grid_thw": torch.tensor([[1, 4, 4]])}
    upstream = torch.randn(64)
    results = []
    for m in (model, plain):
        output = m(**inputs)
        output = output if isinstance(output, torch.Tensor) else output[0]
        loss = (output * upstream[: output.shape[-1]]).sum()
        m.zero_grad()
        loss.backward()
        results.append(({"loss": loss}, {n: p.grad for n, p in m.named_parameters() if p.grad is not None}))
    assert_same_step(*results)


def test_text_model_of_llama4():
    settings = config_class("llama4", "Llama4TextConfig")(
        **text_sizes(intermediate_size_mlp=96, num_local_experts=2, no_rope_layers=[1, 0], moe_layers=[1]),
        attn_implementation="eager",
    )
    plain = randomised(transformers.Llama4ForCausalLM(settings))
    model = liger.patch(twin(plain))
    found = list(patch_report(model).replaced.values())
    assert found.count("rope") == 2 and found.count("rms_norm") >= 6
    same_steps(model, plain, batch())


@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_attention_that_rotates_one_tensor_at_a_time(name):
    modeling = pytest.importorskip(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    settings = config_class(name.lower(), f"{name}TextConfig")(
        **text_sizes(vocab_size_per_layer_input=300, hidden_size_per_layer_input=8, num_kv_shared_layers=0),
        layer_types=["sliding_attention", "full_attention"],
        attn_implementation="eager",
    )
    plain = randomised(getattr(modeling, f"{name}ForCausalLM")(settings))
    model = liger.patch(twin(plain))
    found = list(patch_report(model).replaced.values())
    assert found.count("qk_norm_rope") == 2 and found.count("rms_norm") > 10
    liger.patch(model, qk_norm_rope=False)
    found = list(patch_report(model).replaced.values())
    assert found.count("rope") == 2 and found.count("rms_norm") > 10
    liger.patch(model)
    same_steps(model, plain, batch())
