# SPDX-License-Identifier: BSD-3-Clause
"""Experts whose weights torchao has quantised: the same training as with dense weights of the same values,
with and without adapters of PEFT, and no dense weight that autograd saves."""

import pytest
import torch

import liger

transformers = pytest.importorskip("transformers")
quantization = pytest.importorskip("torchao.quantization")
peft = pytest.importorskip("peft")
pytest.importorskip("transformers.integrations.moe")

from combinations import DEVICES  # noqa: E402
from tiny_models import assert_same_step, batch, enable_checkpointing, make, step  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.lora import base_weight  # noqa: E402
from liger.transformers.lora.expert_weights import WEIGHTS  # noqa: E402
from liger.transformers.mlp.experts import QUANTISED  # noqa: E402

FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 48, "num_experts_per_tok": 2},
}
CONFIGURATIONS = {
    "int8": quantization.Int8WeightOnlyConfig,
    "float8": quantization.Float8WeightOnlyConfig,
    "int8, input too": quantization.Int8DynamicActivationInt8WeightConfig,
}


def experts_of(model):
    return [m for m in model.modules() if hasattr(m, "down_proj") and isinstance(m.down_proj, torch.Tensor)]


def quantise(model, name, names=WEIGHTS):
    for experts in experts_of(model):
        chosen = {weight: CONFIGURATIONS[name]() for weight in names}
        quantization.quantize_(experts, quantization.FqnToConfig(chosen), filter_fn=None)
        experts.requires_grad_(False)
    return model


def with_dense_weights(model):
    for experts in experts_of(model):
        for name in WEIGHTS:
            weight = experts._parameters[name]
            plain = torch.nn.Parameter(base_weight.dense(weight, None, weight.dtype), weight.requires_grad)
            experts._parameters[name] = plain
    return model


def pair(family, name, device="cpu", names=WEIGHTS, adapted=False):
    """(patched with quantised weights, neither)"""
    models = [quantise(make(family, device, **FAMILIES[family]), name, names) for _ in range(2)]
    with_dense_weights(models[1])
    if adapted:
        config = peft.LoraConfig(
            r=4, init_lora_weights=False, target_modules=["q_proj"],
            target_parameters=[f"mlp.experts.{weight}" for weight in WEIGHTS],
        )  # fmt: skip
        for i, model in enumerate(models):
            torch.manual_seed(11)
            models[i] = peft.get_peft_model(model, config).train()
    return liger.patch(models[0], verbose=False), models[1]


def dense_saved(model):
    """How many tensors autograd saves in a step that have the size of a weight of all experts."""
    sizes = {getattr(m, name).numel() for m in experts_of(model) for name in WEIGHTS}
    found = []

    def pack(tensor):
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        found.append(is_plain and tensor.dim() == 3 and tensor.numel() in sizes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step(model, **batch(next(model.parameters()).device))
    return sum(found)


def assert_same(ours, theirs, device="cpu"):
    assert_same_step(step(ours, **batch(device)), step(theirs, **batch(device)))


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize("name", ["int8", "float8"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
def test_same_training(device, family, name, adapted):
    ours, theirs = pair(family, name, device, adapted=adapted)
    report = lt.patch_report(ours)
    assert report.left == {} and list(report.replaced.values()).count("experts") == 2
    assert_same(ours, theirs, device)
    assert dense_saved(ours) == 0 < dense_saved(theirs)


def test_one_quantised_weight():
    assert_same(*pair("Mixtral", "int8", names=WEIGHTS[1:]))


def test_checkpointing_autocast_and_evaluation():
    ours, theirs = pair("Qwen3Moe", "int8")
    for model in (ours, theirs):
        enable_checkpointing(model)
    assert_same(ours, theirs)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        losses = [model.eval()(**batch()).loss for model in (ours, theirs)]
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)


def test_implementation():
    ours, theirs = pair("Mixtral", "int8")
    ours = liger.unpatch(ours)
    ours.set_experts_implementation("liger")
    assert_same(ours, theirs)
    assert dense_saved(ours) == 0


def test_weights_that_are_quantised_after_the_patch():
    """The report says it; a second patch reaches them."""
    ours = quantise(liger.patch(make("Mixtral", **FAMILIES["Mixtral"]), verbose=False), "int8")
    assert list(lt.patch_report(ours).left.values()) == [QUANTISED] * 2
    assert lt.patch_report(liger.patch(ours, verbose=False)).left == {}
    assert_same(ours, pair("Mixtral", "int8")[1])


def test_weights_that_quantise_their_input_are_left_alone():
    model = quantise(make("Mixtral", **FAMILIES["Mixtral"]), "int8, input too")
    report = lt.patch_report(liger.patch(model, verbose=False))
    assert list(report.left.values()) == [base_weight.QUANTISED] * 2


def test_a_loaded_model(tmp_path):
    """As transformers quantises it."""
    make("Qwen3Moe", **FAMILIES["Qwen3Moe"]).save_pretrained(tmp_path)
    chosen = quantization.FqnToConfig(
        {r"re:.*experts\.(gate_up|down)_proj": quantization.Int8WeightOnlyConfig()}
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=transformers.TorchAoConfig(chosen), dtype=torch.float32
    ).train()
    assert type(experts_of(model)[0].down_proj).__name__ == "Int8Tensor"
    report = lt.patch_report(liger.patch(model, verbose=False))
    assert report.left == {} and list(report.replaced.values()).count("experts") == 2
    assert dense_saved(model) == 0
