# SPDX-License-Identifier: BSD-3-Clause
"""Rules for every part that patching replaces: the model is copied, restored, checkpointed, compiled and
differentiated as before."""

import copy
import functools
import io
import pickle

import pytest
import torch

import liger

transformers = pytest.importorskip("transformers")

from combinations import lora  # noqa: E402
from tiny_models import assert_same_step, batch, enable_checkpointing, make, step, twin  # noqa: E402

from liger.transformers import patch_report  # noqa: E402

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QWEN_MOE = {"num_experts": 4, "moe_intermediate_size": 40, "num_experts_per_tok": 2}
ADAPTED_EXPERTS = {
    "family": "Mixtral", "model": {"num_local_experts": 4},
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}  # fmt: skip
FROM_LOGITS = {"cross_entropy": True, "fused_linear_cross_entropy": False}


def adapted(*targets, family="llama", model=(), **settings):
    pytest.importorskip("peft")
    return lora(make(family, **dict(model)), *targets, init_lora_weights=False, **settings)


# How the model is made, the options of the patch, and a kind that is replaced.
PARTS = {
    "llama": (functools.partial(make, "llama"), {}, "swiglu"),
    "mistral": (functools.partial(make, "mistral"), {}, "fused_linear_cross_entropy"),
    "qwen2": (functools.partial(make, "qwen2"), {}, "rope"),
    "norms and rotation": (functools.partial(make, "qwen3"), {}, "qk_norm_rope"),
    "recomputed": (functools.partial(make, "qwen3", num_hidden_layers=1), {"recompute": True}, "qk_norm_rope"),
    "tied": (functools.partial(make, "llama", tie_word_embeddings=True), {}, "fused_linear_cross_entropy"),
    "loss from logits": (functools.partial(make, "llama"), FROM_LOGITS, "cross_entropy"),
    "tiled": (functools.partial(make, "llama"), {"tiled_mlp": True, "tiled_mlp_num_shards": 3}, "tiled_mlp"),
    "left MLPs": (functools.partial(make, "llama", hidden_act="relu"), {}, "rms_norm"),
    "softcap": (functools.partial(make, "Gemma2"), {}, "geglu"),
    "scale": (functools.partial(make, "Granite", logits_scaling=3.0), {}, "fused_linear_cross_entropy"),
    "layer norms": (functools.partial(make, "StableLm"), {}, "layer_norm"),
    "weightless norms": (functools.partial(make, "NanoChat"), {}, "relu_squared"),
    "packed": (functools.partial(make, "Glm4"), {}, "swiglu"),
    "experts": (functools.partial(make, "Mixtral", num_local_experts=4), {}, "experts"),
    "biased experts": (functools.partial(make, "GptOss", num_local_experts=4), {}, "experts"),
    "experts of Qwen": (functools.partial(make, "Qwen3Moe", **QWEN_MOE), {}, "experts"),
    "adapters": (functools.partial(adapted, *LINEAR, model={"num_hidden_layers": 1}), {}, "lora_linear"),
    "adapters on the head": (functools.partial(adapted, "q_proj", "lm_head"), {}, "fused_linear_cross_entropy"),
    "adapters on experts": (functools.partial(adapted, "q_proj", **ADAPTED_EXPERTS), {}, "lora_linear"),
}  # fmt: skip


# The weights of these experts are parametrizations of torch, which break graphs and write in transforms.
TRACED = [name for name in PARTS if name != "adapters on experts"]


def of_parts(*quick, names=PARTS):
    """The parts as parameters; a quick run has those in ``quick``."""
    values = [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("pair", values, indirect=True)


@pytest.fixture
def pair(request):
    """(patched, plain) models with the same weights, which stay where they are."""
    made, options, kind = PARTS[request.param]
    try:
        plain = made()
    except AttributeError as error:
        pytest.skip(f"this transformers lacks the model: {error}")
    model = twin(plain)
    memory = {name: t.data_ptr() for name, t in model.state_dict().items()}
    liger.patch(model, verbose=False, **options)
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == memory
    if "experts" in request.param and not any(hasattr(m, "gate_up_proj") for m in plain.modules()):
        pytest.skip("this transformers has every expert as a module of its own")
    assert kind in patch_report(model).replaced.values()
    return model, plain


def given():
    return {**batch(), "use_cache": False}


def assert_same_bits(found, expected):
    assert torch.equal(found[0].loss, expected[0].loss)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert torch.equal(found[1][name], grad), name


def contents(module):
    """The class of a module, and the names of what it has: attributes, tensors, hooks."""
    return type(module), {k: list(v) if isinstance(v, dict) else None for k, v in vars(module).items()}


@of_parts("llama", "norms and rotation", "tiled", "softcap", "experts", "adapters")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(pair, reentrant):
    for model in pair:
        enable_checkpointing(model, reentrant)
        model.enable_input_require_grads()
    assert_same_step(*(step(model, **given()) for model in pair))


@of_parts("norms and rotation", "recomputed", "left MLPs", "experts")
def test_copies(pair):
    model, plain = pair
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    expected = step(plain, **given())
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert patch_report(other) == patch_report(model)
        assert_same_step(step(other, **given()), expected)


@of_parts("weightless norms", "experts", "adapters", "adapters on the head")
def test_unpatch(pair):
    model, plain = pair
    assert liger.unpatch(model) is model
    assert list(map(contents, model.modules())) == list(map(contents, plain.modules()))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert_same_bits(*(step(m, **given()) for m in (model, plain)))
    assert not patch_report(model).replaced


@of_parts("recomputed", "tied", "adapters")
def test_backwards_add_up(pair):
    """Two of one graph, and one of another."""
    results = []
    for model in pair:
        loss = model(**given()).loss
        loss.backward(retain_graph=True)
        loss.backward()
        model(**given()).loss.backward()
        results.append(
            ({"loss": loss}, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        )
    assert_same_step(*results)


def assert_as_exact(ours, theirs, best):
    """Loss and gradients are no further from float32 than the unpatched model's: over each tensor,
    since luck decides which of two equally exact models comes closer at one element."""
    pairs = {"loss": [result[0].loss for result in (ours, theirs, best)]}
    pairs |= {name: [result[1][name] for result in (ours, theirs, best)] for name in best[1]}
    for name, (value, usual_value, exact) in pairs.items():
        error, usual = (((v.float() - exact).norm() / exact.norm()).item() for v in (value, usual_value))
        assert error <= 2 * usual + torch.finfo(torch.bfloat16).eps, (
            f"{name}: error {error:.3g}, plain {usual:.3g}"
        )


@of_parts(
    "norms and rotation", "scale", "weightless norms", "packed", "adapters on the head", "adapters on experts"
)
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bfloat16_is_as_exact_as_the_model(pair, how):
    exact = step(twin(pair[1]).float(), **given())
    results = []
    for model in pair:
        model = model.bfloat16() if how == "weights" else model
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            results.append(step(model, **given()))
    assert_as_exact(*results, exact)


GRAPHS = (
    "llama", "mistral", "qwen2", "recomputed", "tiled", "softcap", "layer norms", "weightless norms", "packed",
    "adapters",
)  # fmt: skip


@of_parts("recomputed", "weightless norms", "adapters", names=GRAPHS)
def test_one_graph(pair):
    model, plain = pair
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    # The second batch has another shape; a model of one layer is quick to compile for both.
    for inputs in (batch(), batch(rows=1, tokens=7))[: 3 - model.config.num_hidden_layers]:
        output, _ = step(compiled, **inputs, use_cache=False)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert_same_step((output, grads), step(plain, **inputs, use_cache=False))


@of_parts("norms and rotation", "recomputed", "tied", names=TRACED)
def test_functional_calls_and_transforms(pair):
    expected = step(pair[1], **given())
    trained = {name: p.detach() for name, p in pair[0].named_parameters() if p.requires_grad}

    def loss(parameters):
        return torch.func.functional_call(pair[0], parameters, kwargs=given()).loss

    grads, value = torch.func.grad_and_value(loss)(trained)
    assert_same_step(({"loss": value}, grads), expected)
    leaves = {name: p.clone().requires_grad_() for name, p in trained.items()}
    value = loss(leaves)
    grads = torch.autograd.grad(value, list(leaves.values()))
    assert_same_step(({"loss": value}, dict(zip(leaves, grads, strict=True))), expected)


@pytest.mark.parametrize("pair", ["llama", "tied"], indirect=True)
def test_gradients_of_embeddings_by_a_transform(pair):
    """The weights stay parameters, and only what is differentiated belongs to the transform."""
    embeddings, inputs = torch.randn(2, 11, 64), given()
    del inputs["input_ids"]
    found = [torch.func.grad(lambda e, m=m: m(inputs_embeds=e, **inputs).loss)(embeddings) for m in pair]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5 * found[1].abs().max().item())


@of_parts("llama", "mistral", "norms and rotation")
def test_generation(pair):
    prompt = {name: value for name, value in batch().items() if name != "labels"}
    for options in ({}, {"num_beams": 3}):
        options = {"do_sample": False, "max_new_tokens": 6, **options}
        assert torch.equal(*(model.eval().generate(**prompt, **options) for model in pair))
