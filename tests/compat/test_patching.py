# SPDX-License-Identifier: BSD-3-Clause
"""apply_liger_kernel_to_*, the auto class, patches of single modules: by their effect on tiny models."""

import inspect
import logging

import pytest
import tiny_models
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from liger.compat.patching.architectures import MODEL_TYPES, PARAMETERS  # noqa: E402
from liger.transformers import patch_report  # noqa: E402

FUSED = "fused_linear_cross_entropy"
NORMS = ("rms_norm", "fused_add_rms_norm")
OFF = {"rope": False, "cross_entropy": False, FUSED: False, "rms_norm": False, "swiglu": False}


def kinds(model):
    return set(patch_report(model).replaced.values())


def assert_same_step(*models):
    tiny_models.assert_same_step(*(tiny_models.step(model, **tiny_models.batch()) for model in models))


def test_the_call_of_the_documentation(caplog):
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = tiny_models.make("llama")
    with caplog.at_level(logging.INFO, logger="liger.compat"):
        apply_liger_kernel_to_llama(
            rope=True, cross_entropy=True, fused_linear_cross_entropy=True, mlp=True, model=model
        )
    assert [r.name for r in caplog.records if "both losses" in r.message] == ["liger.compat"]
    assert kinds(model) == {"rope", *NORMS, "swiglu", FUSED}
    assert_same_step(model, tiny_models.make("llama"))


def test_models_that_are_constructed_later():
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(rope=True, cross_entropy=True, fused_linear_cross_entropy=True, mlp=True)
    try:
        model = tiny_models.make("llama")
    finally:
        apply_liger_kernel_to_llama(**OFF)
    assert kinds(model) == {"rope", *NORMS, "swiglu", FUSED}
    assert not kinds(tiny_models.make("llama"))


@pytest.mark.parametrize(
    "family, model_type", [("Olmo2", "olmo2"), ("Gemma2", "gemma2"), ("SmolLM3", "smollm3")]
)
def test_types_whose_functions_liger_kernel_has(family, model_type):
    """Also those for which liger.transformers has no function, of one model and of later ones."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    function = MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]
    one = tiny_models.make(family)
    function(model=one)
    function()
    try:
        later = tiny_models.make(family)
    finally:
        function(**dict.fromkeys(PARAMETERS[model_type][:-1], False))
    assert {"rms_norm", FUSED} <= kinds(one) == kinds(later)
    assert not kinds(tiny_models.make(family))
    assert_same_step(one, tiny_models.make(family))
    assert_same_step(later, tiny_models.make(family))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_function_takes_its_arguments_in_order(model_type):
    """All options False by position: a later model is as transformers made it."""
    from liger_kernel.transformers import monkey_patch

    function = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]
    name = MODEL_TYPES[model_type]
    assert function is getattr(monkey_patch, f"apply_liger_kernel_to_{name}")
    positional = [
        p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert [p.name for p in positional] == PARAMETERS[name]
    model = tiny_models.make("llama")
    function(*(model if p.name == "model" else False for p in positional))
    assert not kinds(model)


def test_options_of_both_libraries():
    from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_llava

    model = tiny_models.make("llama")
    apply_liger_kernel_to_llama(False, None, True, rms_norm=0, tiled_mlp=True, model=model)
    assert kinds(model) == {"tiled_mlp", FUSED}
    apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=False, model=model)
    assert kinds(model) == {"rope", *NORMS, "swiglu", "cross_entropy"}
    apply_liger_kernel_to_llama(**OFF, model=model)
    assert not kinds(model)
    apply_liger_kernel_to_llava(model=model, unknown=1)
    assert FUSED in kinds(model)
    with pytest.raises(
        TypeError, match=r"apply_liger_kernel_to_llama: .*'gelglu'.*expected rope, cross_entropy"
    ):
        apply_liger_kernel_to_llama(gelglu=True)


LINEAR_ATTENTION = {
    "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    "family, settings, option, parts",
    [
        ("Nemotron", {"hidden_act": "relu2"}, "relu_squared", {"relu_squared"}),
        ("Mixtral", {"num_local_experts": 4}, "swiglu", {"experts"}),
        ("Qwen3Next", LINEAR_ATTENTION, "swiglu", {"experts", "swiglu"}),
        ("Qwen3Next", LINEAR_ATTENTION, "rms_norm", {*NORMS, "rms_norm_gated", "qk_norm_rope"}),
    ],
)
def test_parts_that_an_option_switches(family, settings, option, parts):
    """The parts come from the option, of one model and of later ones, and without it all others are
    patched."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = tiny_models.make(family, **settings)
    if "experts" in parts and not any(hasattr(m, "gate_up_proj") for m in model.modules()):
        pytest.skip(f"transformers {transformers.__version__} stores each expert of {family} alone")
    function = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    function(model=model)
    everything = kinds(model)
    assert parts < everything
    function(**{option: False})
    try:
        later = tiny_models.make(family, **settings)
    finally:
        off = [name for name, p in inspect.signature(function).parameters.items() if p.default is True]
        function(**dict.fromkeys(off, False))
    function(model=model, **{option: False})
    # Without its norms, the rotation is an op of its own.
    others = everything - parts | ({"rope"} if "qk_norm_rope" in parts else set())
    assert kinds(model) == kinds(later) == others
    assert not kinds(tiny_models.make(family, **settings))


def test_layer_norms_of_towers():
    """``layer_norm`` where liger_kernel's function has it: the norms of the vision tower."""
    from liger_kernel.transformers import apply_liger_kernel_to_paligemma

    tower = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 64,
    }  # fmt: skip
    text = tiny_models.config("Gemma")
    settings = transformers.PaliGemmaConfig(
        vision_config=tower, text_config=text.to_dict(), projection_dim=64
    )
    model = transformers.PaliGemmaForConditionalGeneration(settings)
    apply_liger_kernel_to_paligemma(model=model)
    everything = kinds(model)
    apply_liger_kernel_to_paligemma(model=model, layer_norm=False)
    assert kinds(model) == everything - {"layer_norm"} != everything


def test_granite_returns_logits_by_default():
    from liger_kernel.transformers import apply_liger_kernel_to_granite

    model = tiny_models.make("Granite")
    apply_liger_kernel_to_granite(model=model)
    assert "cross_entropy" in kinds(model)
    assert model(**tiny_models.batch()).logits is not None
    assert_same_step(model, tiny_models.make("Granite"))


def test_one_instance(caplog):
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    model = tiny_models.make("llama")
    _apply_liger_kernel_to_instance(model=model, rope=False, cross_entropy=True, unknown=7)
    assert kinds(model) == {*NORMS, "swiglu", FUSED}
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=True)
    assert kinds(model) == {"rope", *NORMS, "swiglu", "cross_entropy"}
    other = tiny_models.make("StableLm")  # a type that liger_kernel does not know
    _apply_liger_kernel_to_instance(model=other, unknown=7)
    assert FUSED in kinds(other)
    with caplog.at_level(logging.WARNING, logger="liger.compat"):
        _apply_liger_kernel_to_instance(model=nn.Linear(2, 2))
    assert "nothing in Linear can be patched as asked" in caplog.text


def test_a_type_by_name(caplog):
    from liger_kernel.transformers.trainer_integration import _apply_liger_kernel

    _apply_liger_kernel("mistral", swiglu=False, unknown=7)
    try:
        assert kinds(tiny_models.make("mistral")) == {"rope", *NORMS, FUSED}
    finally:
        _apply_liger_kernel("mistral", **OFF)
    with caplog.at_level(logging.INFO, logger="liger.compat"):
        _apply_liger_kernel("no_such_type")
    assert "no model type 'no_such_type'" in caplog.text


def test_the_auto_class(tmp_path):
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    plain = tiny_models.make("qwen2")
    plain.save_pretrained(tmp_path)
    model = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, rope=False, dtype=torch.float32).train()
    assert kinds(model) == {*NORMS, "swiglu", FUSED}
    assert_same_step(model, plain)
    made = AutoLigerKernelForCausalLM.from_config(
        tiny_models.config("qwen2"), cross_entropy=True, swiglu=False
    )
    assert kinds(made) == {"rope", *NORMS, FUSED}


def test_the_auto_class_loads_adapters(tmp_path):
    """A folder of adapters alone names its base."""
    peft = pytest.importorskip("peft")
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    base, adapters = tmp_path / "base", tmp_path / "adapters"
    tiny_models.make("llama").save_pretrained(base)
    adapted = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = peft.LoraConfig(target_modules=["q_proj", "gate_proj", "lm_head"], init_lora_weights=False)
    peft.get_peft_model(adapted, settings).save_pretrained(adapters)
    plain, patched = (
        auto.from_pretrained(adapters).train()
        for auto in (transformers.AutoModelForCausalLM, AutoLigerKernelForCausalLM)
    )
    assert FUSED in kinds(patched) and patched.state_dict().keys() == plain.state_dict().keys()
    for model in (plain, patched):
        model.requires_grad_(True)
    assert_same_step(patched, plain)


# --- single modules -----------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(8)), 1e-2

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class MLP(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.activation = activation

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def gelu(x):
    return nn.functional.gelu(x, approximate="tanh")


def test_single_modules():
    from liger_kernel.transformers import LigerSwiGLUMLP, monkey_patch

    x = torch.randn(3, 8)
    cases = (
        (Norm(), lambda m: monkey_patch._patch_rms_norm_module(m, 1.0, 1e-6, "gemma"), "LigerRMSNorm"),
        (nn.LayerNorm(8, 1e-2), monkey_patch._patch_layer_norm_module, "LigerLayerNorm"),
        (nn.LayerNorm(8, bias=False), monkey_patch._patch_layer_norm_module, "LigerLayerNorm"),
        (
            MLP(nn.functional.silu),
            lambda m: monkey_patch._patch_swiglu_module(m, LigerSwiGLUMLP),
            "LigerSwiGLUMLP",
        ),
        (MLP(gelu), monkey_patch._patch_geglu_module, "LigerGEGLUMLP"),
    )
    for module, patch, name in cases:
        expected = module(x)
        patch(module)
        module.activation = None  # the forward is another one
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
        assert module._get_name() == name


def test_experts_of_transformers():
    """The forward reads the parameters alone, so that it fits experts that transformers has made."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    if not hasattr(modeling, "MixtralExperts"):
        pytest.skip(f"transformers {transformers.__version__} stores each expert of Mixtral alone")
    from liger_kernel.transformers import LigerExperts
    from liger_kernel.transformers.monkey_patch import _patch_swiglu_module

    settings = tiny_models.config("Mixtral", num_local_experts=4)
    settings._experts_implementation = "eager"
    module, ours = modeling.MixtralExperts(settings), LigerExperts(settings)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    x, weights = torch.randn(6, 64), torch.rand(6, 2)
    index = torch.tensor([[0, 1], [3, 0], [1, 3], [0, 3], [1, 0], [3, 1]])
    expected = module(x, index, weights)
    ours.load_state_dict(module.state_dict())
    _patch_swiglu_module(module, LigerExperts)
    module.act_fn = None  # the forward is another one
    for replaced in (module, ours):
        torch.testing.assert_close(replaced(x, index, weights), expected, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x, index, weights).dtype == torch.float32
    for change, message in (
        ({"hidden_act": "gelu"}, "LigerExperts: the activation of the configuration is 'gelu'"),
        ({"num_local_experts": None}, "has no num_experts and no num_local_experts and no n_routed_experts"),
    ):
        fields = {
            "hidden_size": 8,
            "intermediate_size": 12,
            "hidden_act": "silu",
            "num_local_experts": 4,
        } | change
        given = type("Config", (), {name: value for name, value in fields.items() if value is not None})
        with pytest.raises(ValueError, match=message):
            LigerExperts(given())


def test_modules_that_peft_wraps():
    peft = pytest.importorskip("peft")
    from liger_kernel.transformers.monkey_patch import _patch_rms_norm_module

    model = peft.get_peft_model(
        tiny_models.make("llama"), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"])
    )
    norm = model.base_model.model.model.norm
    x = torch.randn(2, 3, 64)
    expected = norm(x)
    _patch_rms_norm_module(norm)
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-5)
    assert norm.modules_to_save["default"]._get_name() == norm.original_module._get_name() == "LigerRMSNorm"


def test_redirection_of_an_fsdp_forward(tmp_path):
    """``redirection(wrapper, method, x)`` runs the method inside the wrapper's forward, and only once."""
    from liger_kernel.transformers.trainer.orpo_trainer import _FSDPForwardRedirection
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel

    with pytest.raises(TypeError, match="was given a Linear, expected a FullyShardedDataParallel"):
        _FSDPForwardRedirection()(nn.Linear(2, 2), lambda: 0)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        inner = nn.Linear(2, 2)
        weight = inner.weight.detach().clone()
        wrapper = FullyShardedDataParallel(inner, device_id=torch.device("cpu"))
        x = torch.randn(3, 2)
        doubled = _FSDPForwardRedirection()(
            wrapper, lambda x, factor: factor * (x @ inner.weight.T), x, factor=2
        )
        torch.testing.assert_close(doubled, 2 * (x @ weight.T))
        assert torch.equal(wrapper(x), wrapper(x))
        with pytest.raises(RuntimeError, match="inside"):
            _FSDPForwardRedirection()(wrapper, lambda x: (_ for _ in ()).throw(RuntimeError("inside")), x)
        assert "forward" not in wrapper._fsdp_wrapped_module.__dict__
    finally:
        distributed.destroy_process_group()
