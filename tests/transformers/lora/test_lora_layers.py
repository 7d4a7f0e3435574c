# SPDX-License-Identifier: BSD-3-Clause
"""LoRA layers of PEFT in a patched model: the same training, fewer saved bytes, and what runs PEFT's code."""

import contextlib
import copy
import pickle
import statistics

import pytest
import torch

import liger

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from cases import assert_as_exact_as_torch  # noqa: E402
from tiny_models import assert_same_step, batch, make, step  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.lora import layer as lora_layer  # noqa: E402

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PER_LAYER = len(LINEAR)
ROWS, HIDDEN, WIDE, KV, RANK = 64, 64, 96, 32, 8


def adapted(model, cast=True, **settings):
    """The model with adapters whose B is not zero, the same at every call with the same arguments."""
    settings = {"r": 8, "lora_alpha": 6, "target_modules": LINEAR, "init_lora_weights": False, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        config = peft.LoraConfig(**settings)
        return peft.get_peft_model(model, config, autocast_adapter_dtype=cast).train()


def pair(device="cpu", dtype=torch.float32, options=(), family="llama", **settings):
    """(patched, unpatched) twins."""
    plain = adapted(make(family, device, dtype), **settings)
    return liger.patch(copy.deepcopy(plain), verbose=False, **dict(options)), plain


def draw_adapters(*twins):
    """The same random values for the adapters of all twins."""
    for parameters in zip(*(model.parameters() for model in twins), strict=True):
        if parameters[0].requires_grad:
            value = 0.3 * torch.randn_like(parameters[0]) / parameters[0].shape[1] ** 0.5
            for parameter in parameters:
                parameter.data.copy_(value)


def seeded_step(model, **given):
    torch.manual_seed(4)
    return step(model, **{**batch(next(model.parameters()).device), **given})


def assert_same(ours, theirs):
    assert_same_step(seeded_step(ours), seeded_step(theirs))


def fused(model):
    return sum(kind == "lora_linear" for kind in lt.patch_report(model).replaced.values())


def x_of(dtype):
    return torch.randn(1, ROWS, HIDDEN, dtype=dtype).requires_grad_()


def layer_of(model):
    return model.base_model.model.model.layers[0]


SETTINGS = {
    "all": {},
    "rank 1": {"r": 1, "lora_alpha": 1},
    "rank 256": {"r": 256},
    "dropout": {"lora_dropout": 0.3},
    "rsLoRA": {"use_rslora": True},
    "attention": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
    "gate": {"target_modules": ["gate_proj"]},
    "down": {"target_modules": ["down_proj"], "lora_dropout": 0.2},
    "biases": {"bias": "all"},
}


@pytest.mark.parametrize(
    "options", [{}, {"recompute": True}, {"swiglu": False}, {"tiled_mlp": True}], ids=str
)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.covering(1)
def test_same_training(name, options, device):
    ours, theirs = pair(device, options=options, **SETTINGS[name])
    if name == "biases":
        for model in (ours, theirs):
            for at, module in enumerate(model.modules()):
                if isinstance(module, torch.nn.Linear) and module.out_features > 256:
                    module.bias = torch.nn.Parameter(
                        torch.ones(module.out_features, device=device) / (at + 1)
                    )
    assert_same(ours, theirs)
    found = [name for name, kind in lt.patch_report(ours).replaced.items() if kind == "lora_linear"]
    assert len(found) == 2 * len(SETTINGS[name].get("target_modules", LINEAR))
    assert lt.patch_report(ours).left == {}


def test_biases_of_all_projections(device):
    plain = make("qwen2", device)
    plain = adapted(plain, bias="all")
    ours = liger.patch(copy.deepcopy(plain), verbose=False)
    results = [seeded_step(model) for model in (ours, plain)]
    assert any(name.endswith("q_proj.base_layer.bias") for name in results[0][1])
    assert_same_step(*results)


@pytest.mark.parametrize("cast", [True, False], ids=["float32 adapters", "bfloat16 adapters"])
def test_bfloat16_is_as_exact_as_peft(cast, device):
    """Against float64: the mean error of all gradients, over models with other adapters."""
    errors = [[], []]
    for seed in range(4):
        ours, theirs = pair(device, torch.bfloat16, cast=cast)
        exact = copy.deepcopy(theirs)
        torch.manual_seed(seed)
        draw_adapters(exact, ours, theirs)
        expected = step(exact.double(), **batch(device))[1]
        for model, found in zip((ours, theirs), errors, strict=True):
            for name, grad in step(model, **batch(device))[1].items():
                found.append(((grad.double() - expected[name]).norm() / expected[name].norm()).item())
    assert statistics.median(errors[0]) <= 2 * statistics.median(errors[1])
    assert statistics.mean(errors[0]) <= 2 * statistics.mean(errors[1])


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_gradient_of_a_layer_is_as_exact_as_peft(dtype, dropout, rank, device):
    """Float32 adapters: PEFT computes their products in float32, where the error is 1e-7."""
    ours, theirs = pair(device, dtype, r=rank, lora_dropout=dropout)
    layers = [layer_of(model).self_attn.q_proj for model in (ours, theirs)]
    for name, part in layers[1].named_parameters():
        part.data.copy_(torch.randn_like(part) / part.shape[1] ** 0.5)
        dict(layers[0].named_parameters())[name].data.copy_(part)
    exact = copy.deepcopy(layers[1]).double()
    x, upstream = (torch.randn(1, ROWS, HIDDEN, device=device).to(dtype) for _ in range(2))
    results = []
    for layer in (*layers, exact):
        given = x.to(layer.base_layer.weight.dtype).requires_grad_()
        torch.manual_seed(3)
        if layer is exact and dropout:
            # The mask that is drawn for float32, and not the one for float64.
            mask = torch.nn.functional.dropout(torch.ones_like(x, dtype=torch.float32), dropout)
            layer.lora_dropout["default"] = torch.nn.Identity()
            drop = (mask != 0).double() / (1 - dropout)
            layer.lora_A["default"].register_forward_pre_hook(lambda _, args, drop=drop: args[0] * drop)
        y = layer(given)
        factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        results.append([y.detach(), *torch.autograd.grad(y, [given, *factors], upstream.to(y.dtype))])
    for name, our, their, expected in zip(("y", "x", "A", "B"), *results, strict=True):
        assert our.dtype == their.dtype
        assert_as_exact_as_torch(our, their, expected, name)


# --- adapters that change -----------------------------------------------------------------------------------


def test_several_adapters_and_the_choice_of_one():
    ours, theirs = pair()
    for model in (ours, theirs):
        torch.manual_seed(3)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "other"])
    assert_same(ours, theirs)
    assert set(lt.patch_report(ours).left.values()) == {lora_layer.SEVERAL}
    for model in (ours, theirs):
        model.set_adapter("other")
    assert_same(ours, theirs)
    assert lt.patch_report(ours).left == {} and fused(ours) == 2 * PER_LAYER


def test_merge_unmerge_disable_and_unload():
    ours, theirs = pair()
    for change in ("merge_adapter", "unmerge_adapter"):
        for model in (ours, theirs):
            getattr(model, change)()
        torch.testing.assert_close(ours(**batch()).loss, theirs(**batch()).loss, rtol=1e-5, atol=0)
    assert_same_step(seeded_step(ours), seeded_step(theirs))
    with ours.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(ours(**batch()).loss, theirs(**batch()).loss, rtol=1e-6, atol=0)
    ours, theirs = ours.merge_and_unload(), theirs.merge_and_unload()
    torch.testing.assert_close(ours(**batch()).loss, theirs(**batch()).loss, rtol=1e-5, atol=0)
    assert fused(ours) == 0


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"use_dora": True}, lora_layer.VARIANT),
        pytest.param(
            {"lora_bias": True},
            lora_layer.BIASED,
            marks=pytest.mark.filterwarnings("ignore:`lora_bias=True`"),
        ),
    ],
    ids=str,
)
def test_variants_run_the_code_of_peft(settings, reason):
    ours, theirs = pair(**settings)
    assert list(lt.patch_report(ours).left.values()) == [reason] * (2 * PER_LAYER)
    assert_same(ours, theirs)


def test_a_base_weight_that_trains():
    ours, theirs = pair()
    for model in (ours, theirs):
        for name in ("q_proj", "down_proj"):
            for module in model.modules():
                if hasattr(module, name):
                    getattr(module, name).base_layer.weight.requires_grad_(True)
    assert_same(ours, theirs)
    assert list(lt.patch_report(ours).left.values()) == [lora_layer.TRAINS] * 4


@pytest.mark.parametrize("part", ["base_layer", "lora_A.default", "lora_B.default", "lora_dropout.default"])
@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj"])
def test_hooks_on_a_part_are_called(name, part):
    ours, theirs = pair()
    for model in (ours, theirs):
        module = layer_of(model).get_submodule(f"{name}.{part}")
        module.register_forward_hook(lambda module, args, output: 2 * output)
    assert_same(ours, theirs)
    assert list(lt.patch_report(ours).left.values()) == [lora_layer.HOOKED]


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj"])
def test_hooks_on_the_layer_are_called(name):
    ours, theirs = pair()
    for model in (ours, theirs):
        layer_of(model).get_submodule(name).register_forward_hook(lambda module, args, output: 2 * output)
    assert_same(ours, theirs)


def test_adapters_after_the_patch():
    """The patched MLP finds them; the other layers run the code of PEFT until the next patch."""
    ours = adapted(liger.patch(make("llama"), verbose=False))
    assert_same(ours, adapted(make("llama")))
    assert fused(ours) == 0
    assert type(layer_of(ours).mlp(x_of(torch.float32)).grad_fn).__name__ == "_GatedLoraBackward"
    assert fused(liger.patch(ours, verbose=False)) == 14


def test_a_projection_that_was_replaced():
    ours, theirs = pair()
    new = torch.nn.Linear(HIDDEN, KV, bias=False)
    for model in (ours, theirs):
        layer_of(model).self_attn.k_proj = copy.deepcopy(new)
    assert_same(ours, theirs)


def test_mixed_adapters_of_one_batch():
    """``adapter_names`` chooses an adapter per sequence."""
    ours, theirs = pair()
    for model in (ours, theirs):
        model.eval()
    given = {**batch(), "adapter_names": ["default", "__base__"]}
    with torch.no_grad():
        torch.testing.assert_close(ours(**given).loss, theirs(**given).loss, rtol=1e-6, atol=0)


def test_the_option_and_unpatch():
    ours, theirs = pair(options={"lora_linear": False})
    assert fused(ours) == 0 and list(lt.patch_report(ours).not_asked_for.values()) == ["lora_linear"] * 14
    assert_same(ours, theirs)
    liger.unpatch(liger.patch(ours, verbose=False))
    modules = [m for m in ours.modules() if isinstance(m, peft.tuners.lora.Linear)]
    assert {type(m) for m in modules} == {peft.tuners.lora.Linear} and len(modules) == 14


# --- the rest of a training program -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype, device):
    ours, theirs = pair(device, dtype, lora_dropout=0.2)
    exact, results = copy.deepcopy(theirs).double(), []
    for model in (ours, theirs, exact):
        within = (
            torch.autocast(device.type, torch.bfloat16) if model is not exact else contextlib.nullcontext()
        )
        with within:
            results.append(seeded_step(model))
    assert results[0][1].keys() == results[1][1].keys()
    errors = [
        [((r[1][n].double() - g).norm() / g.norm()).item() for n, g in results[2][1].items()]
        for r in results[:2]
    ]
    assert all(g.dtype == torch.float32 for g in results[0][1].values())
    assert statistics.mean(errors[0]) <= 2 * statistics.mean(errors[1])


def test_a_second_backward_and_a_second_derivative_raise():
    ours, _ = pair()
    mlp, attention = layer_of(ours).mlp, layer_of(ours).self_attn
    for module in (mlp, attention.o_proj):
        x = x_of(torch.float32)
        y = module(x).square().sum()
        y.backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()
        (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.sum().backward()


def test_evaluation_copies_and_pickles():
    ours, theirs = pair(lora_dropout=0.3)
    with torch.no_grad():
        expected = theirs.eval()(**batch()).loss
        for model in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            torch.testing.assert_close(model.eval()(**batch()).loss, expected, rtol=1e-6, atol=0)
            attention = layer_of(model).self_attn
            assert attention.__dict__["_liger_groups"][attention.q_proj][0] is attention.k_proj
