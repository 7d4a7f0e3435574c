# SPDX-License-Identifier: BSD-3-Clause
"""Experts whose weights bitsandbytes has replaced by 4-bit ones: the same training, with and without adapters
of PEFT, and no dense weight that autograd saves."""

import pytest
import torch
from torch.nn.utils import parametrize

import liger

pytest.importorskip("transformers")
functional = pytest.importorskip("bitsandbytes.functional")
parametrize_4bit = pytest.importorskip("bitsandbytes.nn.parametrize")
peft = pytest.importorskip("peft")
pytest.importorskip("transformers.integrations.moe")

from combinations import DEVICES  # noqa: E402
from tiny_models import assert_same_step, batch, enable_checkpointing, make, step  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.lora.expert_weights import WEIGHTS  # noqa: E402

MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 48, "num_experts_per_tok": 2},
}


def experts_of(model):
    return [
        m for m in model.modules() if "down_proj" in dir(m) and not isinstance(m.down_proj, torch.nn.Module)
    ]


def quantise(model, names=WEIGHTS):
    for experts in experts_of(model):
        for name in names:
            parametrize_4bit.replace_parameter_4bit(experts, name, quant_type="nf4")


def round_weights(model, names=WEIGHTS):
    """Dense weights with the values of the quantised ones."""
    for experts in experts_of(model):
        for name in names:
            weight = experts.get_parameter(name)
            weight.data = functional.dequantize_4bit(*functional.quantize_4bit(weight.data, quant_type="nf4"))


def draw_adapters(model):
    wrappers = [m for m in model.modules() if type(m).__name__ == "ParamWrapper"]
    for i, wrapper in enumerate(sorted(wrappers, key=lambda m: m.parameter_name)):
        generator = torch.Generator().manual_seed(i)
        for linear in (wrapper.lora_A["default"], wrapper.lora_B["default"]):
            drawn = torch.randn(linear.weight.shape, generator=generator)
            linear.weight.data.copy_(drawn / linear.weight.shape[1] ** 0.5)


def model_of(family, device, order=None, adapted=WEIGHTS, names=WEIGHTS):
    """A model with frozen 4-bit experts and adapters; patched before or after the quantisation, or never.
    ``order="dense"``: with dense weights of the same values, which PEFT 0.21 needs for its own adapters."""
    torch.manual_seed(5)
    model = make(family, device, **MODELS[family])
    if order == "patched first":
        liger.patch(model, verbose=False)
    (round_weights if order == "dense" else quantise)(model, names)
    if order == "quantised first":
        liger.patch(model, verbose=False)
    # Of what is quantised PEFT compares the whole name.
    targets = [
        f"{path}.{name}" for path, m in model.named_modules() if m in experts_of(model) for name in adapted
    ]
    config = peft.LoraConfig(
        r=4, lora_alpha=6, init_lora_weights=False, target_modules=["q_proj"], target_parameters=targets
    )
    torch.manual_seed(11)
    model = peft.get_peft_model(model, config).train()
    draw_adapters(model)
    return liger.patch(model, verbose=False) if order == "quantised first" else model


def result(model):
    """A step; names of adapters do not depend on which wrapper of a layer contains the other."""
    output, gradients = step(model, **batch(next(model.parameters()).device))
    names = {id(p): name for name, p in model.named_parameters()}
    for path, wrapper in [(p, m) for p, m in model.named_modules() if type(m).__name__ == "ParamWrapper"]:
        layer = path.partition(".base_layer")[0]
        for linear in ("lora_A", "lora_B"):
            weight = getattr(wrapper, linear)["default"].weight
            gradients[f"{layer}.{wrapper.parameter_name}.{linear}"] = gradients.pop(names[id(weight)])
    return output, gradients


def dense_saved(model):
    """How many tensors autograd saves in a step that have the size of a weight of all experts."""
    sizes = {getattr(m, name).numel() for m in experts_of(model) for name in WEIGHTS}
    found = []

    def pack(tensor):
        found.append(tensor.dim() == 3 and tensor.numel() in sizes and tensor.dtype.is_floating_point)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step(model, **batch(next(model.parameters()).device))
    return sum(found)


@pytest.mark.parametrize("order", ["quantised first", "patched first"])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("device", DEVICES)
def test_same_training(device, family, order):
    ours, theirs = (model_of(family, device, o, adapted=()) for o in (order, None))
    assert_same_step(result(ours), result(theirs))
    assert dense_saved(ours) == 0 < dense_saved(theirs)
    assert not parametrize._cache


@pytest.mark.parametrize("adapted", [WEIGHTS, WEIGHTS[:1], WEIGHTS[1:]], ids=["both", *WEIGHTS])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("device", DEVICES)
def test_adapters(device, family, adapted):
    ours, theirs = (model_of(family, device, order, adapted) for order in ("quantised first", "dense"))
    assert_same_step(result(ours), result(theirs))
    assert sum(type(m).__name__ == "ParamWrapper" for m in ours.modules()) == 2 * len(adapted)
    assert dense_saved(ours) == 0
    assert lt.patch_report(ours).left == {}


@pytest.mark.parametrize("device", DEVICES)
def test_one_quantised_weight(device):
    ours, theirs = (
        model_of("Mixtral", device, order, names=WEIGHTS[1:]) for order in ("quantised first", "dense")
    )
    assert_same_step(result(ours), result(theirs))


@pytest.mark.parametrize("device", DEVICES)
def test_checkpointing_and_evaluation(device):
    ours, theirs = (model_of("Qwen3Moe", device, order) for order in ("quantised first", "dense"))
    for model in (ours, theirs):
        enable_checkpointing(model)
    assert_same_step(result(ours), result(theirs))
    with torch.no_grad():
        losses = [model.eval()(**batch(device)).loss for model in (ours, theirs)]
    torch.testing.assert_close(*losses, rtol=2e-6, atol=0)


def test_implementation():
    ours, theirs = (model_of("Mixtral", "cpu", adapted=()) for _ in range(2))
    ours.base_model.model.set_experts_implementation("liger")
    assert_same_step(result(ours), result(theirs))
    assert dense_saved(ours) == 0


def test_compiled_experts_run_the_original():
    ours, theirs = (model_of("Mixtral", "cpu", order, adapted=()) for order in ("quantised first", None))
    for experts in experts_of(ours):
        experts.compile(backend="eager")
    assert_same_step(result(ours), result(theirs))


def test_other_parametrizations_are_left_alone():
    class Twice(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = make("Mixtral", **MODELS["Mixtral"])
    quantise(model)
    for experts in experts_of(model):
        parametrize.register_parametrization(experts, "down_proj", Twice(), unsafe=True)
    theirs = result(model)
    liger.patch(model, verbose=False)
    assert not any(hasattr(type(m), "_liger_recipe") for m in experts_of(model))
    assert_same_step(result(model), theirs)
