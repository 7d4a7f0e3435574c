# SPDX-License-Identifier: BSD-3-Clause
"""What patch_report says of a model: what runs on liger now, in words about the model."""

import pytest
import torch
from torch import nn

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import assert_same_step, batch, config, make, step, twin  # noqa: E402
from transformers.activations import ReLUSquaredActivation  # noqa: E402

from liger.transformers import patch_report  # noqa: E402


def count(found):
    kinds = list(found.values())
    return {kind: kinds.count(kind) for kind in kinds}


def test_experts_are_replaced_and_those_without_a_gate_are_not_looked_at():
    model = make("Mixtral", num_local_experts=2)
    report = patch_report(liger.patch(model))
    assert report.replaced[""] == "fused_linear_cross_entropy" and not report.left
    # Before transformers 5 every expert is a module with an MLP's form but other names.
    if not any(type(m).__name__.endswith("Experts") for m in model.modules()):
        return
    assert count(report.replaced)["experts"] == 2 and not report.not_looked_at
    liger.unpatch(model)
    for layer in model.model.layers:
        del layer.mlp.experts.gate_up_proj
        layer.mlp.experts.up_proj = nn.Parameter(torch.randn(2, 96, 64))
    report = patch_report(liger.patch(model))
    assert count(report.not_looked_at) == {"experts": 2}
    assert "not looked at: 2 x experts" in report.summary


# The option that is False, what is not replaced then, and a model that has it.
NOT_ASKED = {
    "layer_norm": ({"layer_norm": 5}, lambda: transformers.StableLmForCausalLM(config("StableLm"))),
    "rms_norm": ({"rms_norm": 5, "fused_add_rms_norm": 2}, lambda: make("llama")),
    "fused_add_rms_norm": ({"fused_add_rms_norm": 2}, lambda: make("llama")),
    "rope": ({"rope": 2}, lambda: make("llama")),
    "swiglu": ({"swiglu": 2}, lambda: make("llama")),
    "mlp": ({"swiglu": 2}, lambda: make("llama")),
    "geglu": ({"geglu": 2}, lambda: make("llama", hidden_act="gelu")),
    "relu_squared": ({"relu_squared": 1}, lambda: nn.Sequential(ReLUSquaredActivation(), nn.RMSNorm(4))),
    "fused_linear_cross_entropy": ({"fused_linear_cross_entropy": 1}, lambda: make("llama")),
}


@pytest.mark.parametrize("option", NOT_ASKED)
def test_what_was_not_asked_for(option):
    """It has no reason, which would be one for not replacing it."""
    expected, made = NOT_ASKED[option]
    model = made()
    report = patch_report(liger.patch(model, **{option: False}))
    assert count(report.not_asked_for) == expected and not report.left
    assert "not asked for" in report.summary and "not asked for" in str(report)
    assert not report.not_asked_for.keys() & (report.not_looked_at.keys() | report.replaced.keys())
    report = patch_report(liger.patch(model))
    # Nor is the activation that a replaced MLP covers.
    assert not report.not_asked_for and not report.not_looked_at


def test_rotary_embeddings_of_images_that_were_not_asked_for():
    if not hasattr(transformers, "Qwen2VLConfig"):
        pytest.skip("this transformers has no Qwen2-VL")
    modeling = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    settings = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
        depth=1, embed_dim=16, hidden_size=16, num_heads=2
    )
    holder = nn.ModuleList([make("llama"), modeling.VisionAttention(settings)])
    report = patch_report(liger.patch(holder, rope=False))
    assert report.not_asked_for["1"] == "rope"


def test_an_unpatched_model_has_an_empty_report():
    model = make("Mixtral", num_local_experts=2)
    for _ in range(2):
        assert str(patch_report(model)) == "not patched: call liger.patch(model)"
        liger.unpatch(liger.patch(model))


def test_reasons_speak_of_the_model():
    class Reading(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            self.model.own_method()

    report = patch_report(liger.patch(Reading(config("llama"))))
    assert report.left == {
        "": "its forward needs more than a trial can give it, so that nothing is known of what it computes"
    }


def test_after_merge_and_unload():
    peft = pytest.importorskip("peft")
    model = make("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    before = patch_report(liger.patch(wrapped))
    merged = wrapped.merge_and_unload()
    after = patch_report(merged)
    expected = count(before.replaced)
    assert expected.pop("lora_linear") == 2
    assert count(after.replaced) == expected and "" in after.replaced
    assert patch_report(merged.model.layers[0]).replaced.keys() == {
        "", "self_attn", "mlp", "input_layernorm", "post_attention_layernorm",
    }  # fmt: skip
    liger.unpatch(merged)
    assert str(patch_report(merged)) == "not patched: call liger.patch(model)"


def test_a_forward_that_came_after_the_patch_is_reported():
    model = liger.patch(make("llama"))
    model.forward = lambda *args, **kwargs: None
    model.model.norm.forward = lambda x: x
    report = patch_report(model)
    words = "its forward was replaced on the instance"
    assert report.left == {"": words, "model.norm": words}
    assert count(report.replaced)["rms_norm"] == 4 and "fused_linear_cross_entropy" not in count(
        report.replaced
    )
    del model.forward, model.model.norm.forward
    assert not patch_report(model).left


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate")
    # The settings belong to the process: neither another test's here, nor these in the next test.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_autocast_around_the_forward_hides_nothing(accelerator):
    """As accelerator.prepare does it, which keeps the forward of the class."""
    plain = make("llama")
    model = liger.patch(twin(plain))
    prepared = accelerator.prepare_model(model)
    assert "forward" in prepared.__dict__
    assert patch_report(prepared).replaced[""] == "fused_linear_cross_entropy"
    assert prepared(**batch()).logits is None
    # What was prepared first holds on to the forward of its old class.
    late = liger.patch(accelerator.prepare_model(twin(plain)))
    assert patch_report(late).left == {"": "its forward was replaced on the instance"}
    assert late(**batch()).logits is not None


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_models_keep_their_names(kind):
    plain = make(kind)
    model = liger.patch(twin(plain))
    for name in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(model), name) == getattr(type(plain), name)
    assert model._get_name() == plain._get_name()
    assert str(model).startswith(f"{type(plain).__name__}(") and "LigerSiLU" not in str(model)
    assert "RMSNorm" in str(model) and f"Liger{type(plain.model.norm).__name__}" in str(model)
    assert (
        model._get_name() in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )
    assert_same_step(step(model, **batch()), step(plain, **batch()))


def test_patch_in_inference_mode():
    """The trials need gradients; the report comes from a call outside."""
    expected = str(patch_report(liger.patch(make("llama"))))
    with torch.inference_mode():
        assert str(patch_report(liger.patch(make("llama")))) == expected


@pytest.mark.parametrize("name", ["llama", "Mixtral"])
def test_activations_with_hooks_of_others(name):
    """As tools that watch every module have: they see the activation, so the code of the model runs."""
    model = liger.patch(make(name, **({"num_local_experts": 2} if name == "Mixtral" else {})))
    before = patch_report(model)
    activation = next(m for n, m in model.named_modules() if n.endswith(".act_fn"))
    hook = activation.register_forward_hook(lambda module, args, output: None)
    report = patch_report(model)
    assert list(report.left.values()) == ["its activation has hooks, which the op would not call"]
    assert len(report.replaced) == len(before.replaced) - 1
    hook.remove()
    assert patch_report(model) == before
