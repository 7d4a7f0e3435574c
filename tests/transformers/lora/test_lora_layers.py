# SPDX-License-Identifier: BSD-3-Clause
"""LoRA layers of PEFT in a patched model: the same training, fewer saved bytes, and what runs PEFT's code."""

import contextlib
import copy
import pickle
import statistics

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import liger

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from cases import assert_as_exact_as_torch  # noqa: E402
from tiny_models import assert_same_step, batch, enable_checkpointing, make, step  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger._core.modules.quantised import is_quantised  # noqa: E402
from liger.transformers.lora import layer as lora_layer  # noqa: E402

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PER_LAYER = len(LINEAR)


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


def seeded_step(model, **given):
    torch.manual_seed(4)
    return step(model, **{**batch(next(model.parameters()).device), **given})


def assert_same(ours, theirs):
    assert_same_step(seeded_step(ours), seeded_step(theirs))


def fused(model):
    return sum(kind == "lora_linear" for kind in lt.patch_report(model).replaced.values())


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
        for parameters in zip(*(m.parameters() for m in (exact, ours, theirs)), strict=True):
            if parameters[0].requires_grad:
                value = 0.3 * torch.randn_like(parameters[0]) / parameters[0].shape[1] ** 0.5
                for parameter in parameters:
                    parameter.data.copy_(value)
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


# --- what is saved and computed -----------------------------------------------------------------------------


def saved_bytes(function, module):
    """Bytes of the tensors that autograd saves in a forward, each memory once, without parameters."""
    known = {p.untyped_storage().data_ptr() for p in module.parameters() if not is_quantised(p)}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    assert result.requires_grad
    return sum(storage.nbytes() for storage in found.values())


ROWS, HIDDEN, WIDE, KV, RANK = 64, 64, 96, 32, 8


def x_of(dtype):
    return torch.randn(1, ROWS, HIDDEN, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("recompute", [False, True])
def test_an_mlp_saves_its_input_gate_and_up(recompute, dropout):
    ours, theirs = pair(
        dtype=torch.bfloat16, options={"recompute": recompute}, cast=False, lora_dropout=dropout
    )
    mlps, x = [layer_of(model).mlp for model in (ours, theirs)], x_of(torch.bfloat16)
    found, before = (saved_bytes(lambda m=m: m(x), m) for m in mlps)
    # First products of three adapters; A of gate and up side by side; the scaled factors B.
    low = 2 * (ROWS * 3 * RANK + 2 * RANK * HIDDEN + RANK * (2 * WIDE + HIDDEN))
    masks = ROWS * (2 * HIDDEN + WIDE) if dropout else 0
    assert found == 2 * ROWS * (HIDDEN + 2 * WIDE) + low + masks
    assert found < 0.75 * before


def test_q_k_and_v_save_their_input_once_and_no_copies():
    """Float32 adapters of a bfloat16 model: PEFT saves the input in float32 as well."""
    ours, theirs = pair(dtype=torch.bfloat16)
    x = x_of(torch.bfloat16)

    def run(attention):
        q, k, v = (getattr(attention, name)(x) for name in LINEAR[:3])
        return q.sum() + k.sum() + v.sum()

    found, before = (saved_bytes(lambda m=m: run(layer_of(m).self_attn), m) for m in (ours, theirs))
    factors = 3 * RANK * HIDDEN + RANK * (HIDDEN + 2 * KV)
    sums = 3 * 8  # Autograd keeps nothing of the sums but their shapes; the allowance is a few scalars.
    # The first products and the factors are float32.
    assert found <= 2 * ROWS * HIDDEN + 4 * (ROWS * 3 * RANK + factors) + sums
    assert found < 0.8 * before


class Products(TorchDispatchMode):
    """Counts the multiplications of GEMMs. FlopCounterMode has global hooks, which an MLP takes for the
    user's."""

    GEMMS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket in self.GEMMS:
            a, b = args[-2:]
            self.count += a.shape[0] * a.shape[1] * b.shape[1]
        return op(*args, **(kwargs or {}))


def products_of(function):
    with Products() as counter:
        function()
    return counter.count


def test_frozen_weights_take_no_gemm():
    ours, _ = pair()
    mlp, x = layer_of(ours).mlp, x_of(torch.float32)
    base, low = 3 * HIDDEN * WIDE, 3 * RANK * (HIDDEN + WIDE)
    # Forward and the gradient of the input; of the adapters also the gradients of both factors.
    assert products_of(lambda: mlp(x).sum().backward()) == ROWS * (2 * base + 3 * low)
    assert mlp.gate_proj.base_layer.weight.grad is None


def test_one_node_for_q_k_and_v():
    ours, _ = pair()
    attention, x = layer_of(ours).self_attn, x_of(torch.float32)
    q, k, v = (getattr(attention, name)(x) for name in LINEAR[:3])
    assert q.grad_fn is k.grad_fn is v.grad_fn
    # Another tensor with the same values, and a call out of turn, compute their own result.
    assert attention.k_proj(x).grad_fn is not q.grad_fn
    again = attention.q_proj(x)
    other = attention.k_proj(x.clone())
    assert other.grad_fn is not again.grad_fn
    torch.testing.assert_close(other, k)


def test_an_output_without_a_gradient():
    ours, theirs = pair()
    results = []
    for model in (ours, theirs):
        attention = layer_of(model).self_attn
        torch.manual_seed(2)
        x = x_of(torch.float32)
        q, _, v = (getattr(attention, name)(x) for name in LINEAR[:3])
        (q.square().sum() + v.sum()).backward()
        results.append((x.grad, attention.q_proj.lora_A["default"].weight.grad))
    torch.testing.assert_close(*results)


def test_an_input_that_is_written_is_not_taken_for_the_old_one():
    ours, theirs = pair()
    x, results = torch.randn(1, ROWS, HIDDEN), []
    for model in (ours, theirs):
        attention, given = layer_of(model).self_attn, x.clone()
        with torch.no_grad():
            attention.q_proj(given)
            given.mul_(2)
            results.append(attention.k_proj(given))
    torch.testing.assert_close(*results)


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


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, dropout):
    ours, theirs = pair(lora_dropout=dropout)
    for model in (ours, theirs):
        enable_checkpointing(model, reentrant)
        model.enable_input_require_grads()
    assert_same(ours, theirs)


def test_checkpointing_does_not_repeat_down_proj():
    counts = []
    for options in ({}, {"swiglu": False, "lora_linear": False}):
        ours, _ = pair(options=options)
        enable_checkpointing(ours)
        counts.append(products_of(lambda model=ours: seeded_step(model)))
    # In two layers.
    assert counts[1] - counts[0] == 2 * batch()["input_ids"].numel() * HIDDEN * WIDE


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


def test_accumulation_and_a_retained_graph():
    ours, theirs = pair()
    grads = []
    for model in (ours, theirs):
        model.zero_grad()
        loss = model(**batch()).loss
        loss.backward(retain_graph=True)
        loss.backward()
        model(**batch()).loss.backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


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
            followers = layer_of(model).self_attn.q_proj.__dict__["_liger_followers"]
            assert followers[0] is layer_of(model).self_attn.k_proj


def test_compiled():
    ours, theirs = pair()
    compiled = torch.compile(layer_of(ours), backend="aot_eager", fullgraph=True)
    x = x_of(torch.float32)
    position = theirs.base_model.model.model.rotary_emb(x, torch.arange(ROWS)[None])
    results = []
    for layer in (compiled, layer_of(theirs)):
        y = layer(x, position_embeddings=position)
        y = y[0] if isinstance(y, tuple) else y
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# --- quantised base layers ----------------------------------------------------------------------------------


def in_four_bits(model):
    """The model with layers of bitsandbytes in place of the linear layers of the decoder."""
    nn = pytest.importorskip("bitsandbytes").nn
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                dtype, sizes = child.weight.dtype, (child.in_features, child.out_features)
                made = nn.Linear4bit(*sizes, bias=False, compute_dtype=dtype, quant_type="nf4")
                made.weight = nn.Params4bit(child.weight.detach(), requires_grad=False, quant_type="nf4")
                setattr(module, name, made.to(child.weight.device))
    model.is_loaded_in_4bit = True
    return model


def in_eight_bits(model):
    """The same with weights of torchao in int8."""
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("quantise", [in_four_bits, in_eight_bits])
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")
def test_quantised_weights_are_not_saved(quantise, device):
    models = []
    for is_patched in (True, False):
        model = adapted(quantise(make("llama", device)))
        models.append(liger.patch(model, verbose=False) if is_patched else model)
    ours, theirs = models
    assert fused(ours) == 2 * PER_LAYER and lt.patch_report(ours).left == {}
    assert_same(ours, theirs)
    mlp, x = layer_of(ours).mlp, torch.randn(1, ROWS, HIDDEN, device=device).requires_grad_()
    low = ROWS * 3 * RANK + 2 * RANK * HIDDEN + RANK * (2 * WIDE + HIDDEN)
    assert saved_bytes(lambda: mlp(x), mlp) == 4 * (ROWS * (HIDDEN + 2 * WIDE) + low)
    assert type(mlp(x).grad_fn).__name__ == "_GatedLoraBackward"
