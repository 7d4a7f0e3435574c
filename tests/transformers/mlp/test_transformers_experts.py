# SPDX-License-Identifier: BSD-3-Clause
"""Patched experts: recognised by trial, with the losses and gradients of the unpatched model, in less
memory."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import liger

transformers = pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")

from tiny_models import assert_same_step, batch, config, make, step, twin  # noqa: E402

from liger.transformers import patch_report  # noqa: E402
from liger.transformers.mlp import experts  # noqa: E402

if not hasattr(moe, "use_experts_implementation"):
    pytest.skip("this transformers has every expert as a module of its own", allow_module_level=True)

QWEN = {"num_experts": 4, "moe_intermediate_size": 40, "num_experts_per_tok": 2}
DEEPSEEK = {
    "n_routed_experts": 4, "moe_intermediate_size": 40, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
# Options, layers with experts.
MODELS = {
    "Mixtral": ({"num_local_experts": 4}, 2),
    "Qwen3Moe": (QWEN, 2),
    "GptOss": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 2),
    "DeepseekV3": (DEEPSEEK, 1),
    "GraniteMoe": ({"num_local_experts": 4}, 2),
    "Qwen2Moe": ({**QWEN, "shared_expert_intermediate_size": 24}, 2),
}


def model_of(name, device="cpu", dtype=torch.float32, **more):
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this transformers has no {name}")
    return make(name, device, dtype, **MODELS[name][0], **more)


def kinds(model):
    return list(patch_report(model).replaced.values())


def experts_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith("Experts")]


@pytest.fixture
def calls(monkeypatch):
    """The recipes of the calls of the op by patched experts."""
    seen, run = [], experts.ExpertsRecipe.run

    def watched(self, *arguments):
        seen.append(self)
        return run(self, *arguments)

    monkeypatch.setattr(experts.ExpertsRecipe, "run", watched)
    return seen


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_training_step(device, name, implementation, calls):
    plain, layers = model_of(name, device), MODELS[name][1]
    plain.set_experts_implementation(implementation)
    patched = liger.patch(twin(plain))
    assert kinds(patched).count("experts") == layers
    calls.clear()
    ours, theirs = step(patched, **batch(device)), step(plain, **batch(device))
    assert len(calls) == layers
    assert_same_step(ours, theirs)
    assert any(name.endswith("gate_up_proj") for name in ours[1])
    assert any("router" in name or "gate.weight" in name for name in ours[1])


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_the_loss_of_the_router_is_untouched(device, name):
    """The lm_head computes the other loss, also if the configuration asks for the loss of the router."""
    plain = model_of(name, device, output_router_logits=True)
    patched = liger.patch(twin(plain))
    assert patch_report(patched).left == {}
    ours, theirs = step(patched, **batch(device)), step(plain, **batch(device))
    assert ours[0].logits is None
    torch.testing.assert_close(ours[0].aux_loss, theirs[0].aux_loss)
    assert_same_step(ours, theirs)


def test_the_loss_of_the_router_in_the_configuration_of_the_text():
    if not hasattr(transformers, "Qwen3VLMoeConfig"):
        pytest.skip("this transformers has no Qwen3VLMoe")
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = config("Qwen3Moe", **QWEN, output_router_logits=True, rope_parameters=rope).to_dict()
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    settings = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    plain = transformers.Qwen3VLMoeForConditionalGeneration(settings).train()
    patched = liger.patch(twin(plain))
    ours, theirs = step(patched, **batch()), step(plain, **batch())
    assert ours[0].logits is None
    torch.testing.assert_close(ours[0].aux_loss, theirs[0].aux_loss)
    assert_same_step(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dtypes_and_autocast(device, dtype):
    """The result has the dtype of the original, and in bfloat16 the error is no larger."""
    plain = model_of("Mixtral", device, dtype)
    plain.set_experts_implementation("eager")
    module, patched = experts_of(plain)[0], experts_of(liger.patch(twin(plain)))[0]
    x = torch.randn(20, 64, device=device, dtype=dtype)
    index = torch.rand(20, 4, device=device).topk(2).indices
    weights = torch.rand(20, 2, device=device)
    exact = copy.deepcopy(module).double()(x.double(), index, weights.double())
    for enabled in (False, True):
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled), torch.no_grad():
            ours, theirs = (m(x, index, weights) for m in (patched, module))
        assert ours.dtype == theirs.dtype == dtype
        errors = [(y.double() - exact).abs().max().item() for y in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + 1e-6


def test_arguments_by_name_and_unusual_ones(device, calls):
    plain = model_of("GptOss", device)
    module, patched = experts_of(plain)[0], experts_of(liger.patch(twin(plain)))[0]
    x = torch.randn(6, 64, device=device)
    index, weights = torch.randint(4, (6, 2), device=device), torch.rand(6, 2, device=device)
    calls.clear()
    torch.testing.assert_close(
        patched(x, router_indices=index, routing_weights=weights), module(x, index, weights)
    )
    assert len(calls) == 1
    with pytest.raises(TypeError):
        patched(x, index, weights, weights)
    # The original takes mixed dtypes.
    assert torch.equal(patched(x.bfloat16(), index, weights), module(x.bfloat16(), index, weights))
    assert len(calls) == 1


def test_sentinels_of_expert_parallelism(device):
    plain = model_of("Mixtral", device)
    # The other implementations multiply uninitialised rows of sentinels by zero, unless the model is sharded.
    plain.set_experts_implementation("eager")
    module, patched = experts_of(plain)[0], experts_of(liger.patch(twin(plain)))[0]
    x = torch.randn(6, 64, device=device)
    index, weights = torch.randint(5, (6, 2), device=device), torch.rand(6, 2, device=device)
    index[0] = 4
    weights[index == 4] = 0.0
    # Eager experts read beyond the last one for a sentinel, which is an error on a GPU.
    expected = module(x, index.clamp(max=3), weights)
    torch.testing.assert_close(patched(x, index, weights), expected)


def saved_bytes(module, x, index, weights):
    known = {p.untyped_storage().data_ptr() for p in (*module.parameters(), x, index, weights)}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x, index, weights)
    del y
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_at_most_half_the_memory_of_eager(device, name):
    plain = model_of(name, device)
    plain.set_experts_implementation("eager")
    module, patched = experts_of(plain)[0], experts_of(liger.patch(twin(plain)))[0]
    x = torch.randn(128, 64, device=device, requires_grad=True)
    index = torch.rand(128, 4, device=device).topk(2).indices
    weights = torch.rand(128, 2, device=device, requires_grad=True)
    ours, eager = (saved_bytes(m, x, index, weights) for m in (patched, module))
    assert 0 < 2 * ours <= eager


def test_compiled_without_recompiles_for_another_routing(device):
    patched = experts_of(liger.patch(model_of("Mixtral", device, torch.bfloat16)))[0]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(patched, fullgraph=True, backend=counter)
    for shift in range(3):
        x = torch.randn(12, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        index, weights = (torch.arange(24, device=device).view(12, 2) ** 2 + shift) % 4, torch.rand(12, 2)
        weights = weights.to(device, torch.bfloat16)
        ours, theirs = compiled(x, index, weights), patched(x, index, weights)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(y.float().sum(), x)[0] for y in (ours, theirs)))
    assert counter.frame_count == 1


# --- experts_implementation="liger" -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_as_an_implementation_of_transformers(device, name, calls):
    plain = model_of(name, device)
    other = twin(plain)
    other.set_experts_implementation("liger")
    ours, theirs = step(other, **batch(device)), step(plain, **batch(device))
    assert len(calls) >= 2
    assert_same_step(ours, theirs)
    assert not patch_report(other).replaced


@pytest.mark.parametrize("warm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_implementation_compiles(warm):
    """Also if the first call is the compiled one, which then has no recipe yet."""
    if not warm and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("this torch ends the graph at a function that is assumed constant")
    torch._dynamo.reset()
    model = model_of("Mixtral")
    inputs = {name: value for name, value in batch().items() if name != "attention_mask"}
    expected = model(**inputs).loss
    model.set_experts_implementation("liger")
    if warm:
        model(**inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).loss, expected)


def test_options_select_experts_as_they_select_mlps():
    plain = model_of("Mixtral")
    assert "experts" in kinds(liger.patch(twin(plain), geglu=False))
    report = patch_report(liger.patch(twin(plain), swiglu=False))
    assert "experts" not in report.replaced.values()
    assert list(report.not_asked_for.values()).count("experts") == 2


def test_an_implementation_that_the_user_has_chosen_stays(monkeypatch):
    model = model_of("Mixtral")
    moe.ALL_EXPERTS_FUNCTIONS.register("own_experts", lambda *_: None)
    try:
        model.set_experts_implementation("own_experts")
        report = patch_report(liger.patch(model))
    finally:
        moe.ALL_EXPERTS_FUNCTIONS._global_mapping.pop("own_experts")
    assert "its experts_implementation is 'own_experts'" in report.left.values()
