"""Patched experts: recognised by trial, with the losses and gradients of the unpatched model, in less memory."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import liger

transformers = pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")

from tiny_models import assert_same_step, batch, make, step, twin  # noqa: E402

from liger.transformers import _experts, patch_report  # noqa: E402

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
    seen, run = [], _experts.ExpertsRecipe.run

    def watched(self, *arguments):
        seen.append(self)
        return run(self, *arguments)

    monkeypatch.setattr(_experts.ExpertsRecipe, "run", watched)
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


def test_the_loss_of_the_router_is_untouched(device):
    plain = model_of("Mixtral", device, output_router_logits=True)
    patched = liger.patch(twin(plain))
    ours, theirs = step(patched, **batch(device)), step(plain, **batch(device))
    torch.testing.assert_close(ours[0].aux_loss, theirs[0].aux_loss)
    assert_same_step(ours, theirs)


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_gradient_checkpointing(device, name):
    plain = model_of(name, device)
    patched = liger.patch(twin(plain))
    for model in (plain, patched):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_step(step(patched, **batch(device)), step(plain, **batch(device)))


def test_unpatch_copy_and_pickle(device):
    plain = model_of("Qwen3Moe", device)
    patched = liger.patch(twin(plain))
    expected = step(plain, **batch(device))
    for again in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert kinds(again).count("experts") == 2
        assert_same_step(step(again, **batch(device)), expected)
    restored = liger.unpatch(patched)
    assert [type(m) for m in experts_of(restored)] == [type(m) for m in experts_of(plain)]
    assert restored.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(step(restored, **batch(device))[0]["loss"], expected[0]["loss"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dtypes_and_autocast(device, dtype):
    """The dtype of the result is that of the original, and in bfloat16 the error is no larger."""
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
    module, patched = experts_of(plain)[0], experts_of(liger.patch(twin(plain)))[0]
    x = torch.randn(6, 64, device=device)
    index, weights = torch.randint(5, (6, 2), device=device), torch.rand(6, 2, device=device)
    index[0] = 4
    weights[index == 4] = 0.0
    torch.testing.assert_close(patched(x, index, weights), module(x, index, weights))


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


# --- experts_implementation="liger" ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_as_an_implementation_of_transformers(device, name, calls):
    plain = model_of(name, device)
    other = twin(plain)
    other.set_experts_implementation("liger")
    ours, theirs = step(other, **batch(device)), step(plain, **batch(device))
    assert len(calls) >= 2
    assert_same_step(ours, theirs)
    assert not patch_report(other).replaced


@pytest.mark.parametrize("warm", [False, True])
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


# --- trials ---------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """The plain form; the others below differ from it for some numbers or in some mode only."""

    def __init__(self, act_fn=None, layout=(12, 8)):
        super().__init__()
        self.num_experts, self.limit = 3, 10.0
        self.gate_up_proj = nn.Parameter(torch.randn(3, *layout))
        self.down_proj = nn.Parameter(torch.randn(3, 8, 6))
        self.act_fn = act_fn or nn.SiLU()

    def gated(self, gate, up):
        return self.act_fn(gate) * up

    def scaled(self, out, weights):
        return out * weights

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            gate, up = (hidden_states[token] @ self.gate_up_proj[expert].t()).chunk(2, -1)
            out = self.gated(gate, up) @ self.down_proj[expert].t()
            y.index_add_(0, token, self.scaled(out, top_k_weights[token, choice, None]))
        return y


ALL = ("silu", "gelu_tanh", "gelu")


class ClampedActivation(Experts):
    def gated(self, gate, up):
        return self.act_fn(gate).clamp(max=self.limit) * up


class Threshold(Experts):
    def gated(self, gate, up):
        return self.act_fn(gate) * up.masked_fill(up.abs() < 1e-2, 0.0)


class Dropout(Experts):
    def gated(self, gate, up):
        return nn.functional.dropout(self.act_fn(gate) * up, 0.1, self.training)


class PositiveWeights(Experts):
    def scaled(self, out, weights):
        return out * weights.abs()


class Unweighted(Experts):
    def scaled(self, out, weights):
        return out


class OneMoreExpert(Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights) + hidden_states


class OwnWeight(Experts):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class ClampedInputs(Experts):
    def gated(self, gate, up):
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def test_the_plain_form():
    for act_fn, activation in (
        (None, "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
    ):
        recipe = _experts.experts(Experts(act_fn), ALL)
        assert (recipe.activation, recipe.limit, recipe.is_interleaved) == (activation, None, False)
    assert _experts.experts(ClampedInputs(), ALL).limit == 10.0


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        (ClampedActivation, "an activation that liger has"),
        (Threshold, "an activation that liger has"),
        (PositiveWeights, "an activation that liger has"),
        (Unweighted, "an activation that liger has"),
        (OneMoreExpert, "an activation that liger has"),
        (lambda: Experts(nn.ReLU()), "an activation that liger has"),
        (Dropout, "in training it computes something else"),
        (OwnWeight, "other parameters than two projections"),
        (lambda: Experts(layout=(10, 8)), "the shapes of its projections"),
    ],
)
def test_variants_are_left_alone(variant, reason):
    assert reason in _experts.experts(variant(), ALL)


def test_an_implementation_that_cannot_run_says_so():
    @moe.use_experts_implementation
    class Other(Experts):
        def __init__(self, config):
            super().__init__(nn.ReLU())

    config = transformers.LlamaConfig()
    config._experts_implementation = "liger"
    with pytest.raises(
        ValueError, match=r'experts_implementation="liger" cannot run Other: its experts do not'
    ):
        Other(config)(torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def test_options_select_experts_as_they_select_mlps():
    plain = model_of("Mixtral")
    assert "experts" in kinds(liger.patch(twin(plain), geglu=False))
    report = patch_report(liger.patch(twin(plain), swiglu=False))
    assert "experts" not in report.replaced.values()
    assert list(report.not_looked_at.values()).count("experts") == 2


def test_an_implementation_that_the_user_has_chosen_stays(monkeypatch):
    model = model_of("Mixtral")
    moe.ALL_EXPERTS_FUNCTIONS.register("own_experts", lambda *_: None)
    try:
        model.set_experts_implementation("own_experts")
        report = patch_report(liger.patch(model))
    finally:
        moe.ALL_EXPERTS_FUNCTIONS._global_mapping.pop("own_experts")
    assert "its experts_implementation is 'own_experts'" in report.left.values()


class Config:
    """A configuration with a small number for every size."""

    _experts_implementation = "eager"

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        for part, value in (
            ("act", "silu"), ("limit", 7.0), ("alpha", 1.702), ("intermediate", 12), ("latent", None),
            ("hidden", 16), ("expert", 4),
        ):  # fmt: skip
            if part in name:
                return value
        return 4


# (module, class) -> activation, is_transposed, is_interleaved, whether it clamps.
CLASSES = {
    ("aria", "AriaExperts"): ("silu", True, False, False),
    ("deepseek_v2", "DeepseekV2Experts"): ("silu", False, False, False),
    ("deepseek_v4", "DeepseekV4Experts"): ("silu", False, False, True),
    ("ernie4_5_moe", "Ernie4_5_MoeExperts"): ("silu", False, False, False),
    ("glm4_moe", "Glm4MoeExperts"): ("silu", False, False, False),
    ("hunyuan_v1_moe", "HunYuanMoEV1Experts"): ("silu", False, False, False),
    ("minimax_m3_vl", "MiniMaxM3VLExperts"): ("gpt_oss", False, False, True),
    ("olmoe", "OlmoeExperts"): ("silu", False, False, False),
    ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"): ("gpt_oss", True, False, True),
    ("qwen3_next", "Qwen3NextExperts"): ("silu", False, False, False),
}


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=lambda part: part)
def test_classes_of_transformers(module, name):
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    if not hasattr(modeling, name):
        pytest.skip(f"this transformers has no {name}")
    if not hasattr(getattr(modeling, name), "_apply_gate"):
        pytest.skip("in this transformers it has a form of its own")
    recipe = _experts.experts(getattr(modeling, name)(Config()), ALL)
    found = (recipe.activation, recipe.is_transposed, recipe.is_interleaved, recipe.limit is not None)
    assert found == CLASSES[module, name]
