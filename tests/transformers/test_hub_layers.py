# SPDX-License-Identifier: BSD-3-Clause
"""The layers of the folder hub/, as transformers and kernels take them from a local path."""

import hub_layers
import pytest
import tiny_models
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
kernels = pytest.importorskip(
    "kernels", "0.17", reason="the layers of hub/ are loaded by the package kernels"
)

TRAINING, INFERENCE = kernels.Mode.TRAINING, kernels.Mode.INFERENCE


@pytest.fixture(scope="module")
def layers():
    return kernels.get_local_kernel(hub_layers.HUB).layers


def mapping(*names, mode=TRAINING, layer=None):
    def repository(name):
        return kernels.LocalLayerRepository(hub_layers.HUB, layer_name=layer or hub_layers.LAYERS[name])

    return {name: {"cpu": {mode: repository(name)}} for name in names}


def kernelized(module, *names, mode=TRAINING):
    """The module with its layers of these names replaced; a layer that cannot be loaded is an error."""
    with kernels.use_kernel_mapping(mapping(*names, mode=mode), inherit_mapping=False):
        return kernels.kernelize(module, device="cpu", mode=mode, use_fallback=False)


def assert_same(ours, theirs, *inputs):
    """Equal outputs, and equal gradients of inputs and parameters."""
    results = []
    for module in (ours, theirs):
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        output = module(*given)
        outputs = output if isinstance(output, tuple) else (output,)
        wanted = [x for x in given if x.requires_grad] + list(module.parameters())
        grads = torch.autograd.grad(sum((o * o.detach().cos()).sum() for o in outputs), wanted)
        results.append((*outputs, *grads))
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_every_name_is_a_layer_without_state(layers):
    assert {*hub_layers.LAYERS.values(), "LigerTiledSwiGLUMLP", "LigerTiledGEGLUMLP"} == {
        name for name, value in vars(layers).items() if isinstance(value, type)
    }
    members = set(dir(nn.Module)) | {"can_torch_compile", "has_backward"}
    for name in hub_layers.LAYERS.values():
        layer = getattr(layers, name)
        assert set(dir(layer)) <= members and layer.__init__ is nn.Module.__init__
        assert layer.can_torch_compile and layer.has_backward


def extensible(cls, name):
    """A subclass whose forward kernelize may replace, as transformers decorates its classes."""
    return kernels.use_kernel_forward_from_hub(name)(type(cls.__name__, (cls,), {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    x = torch.randn(3, 5, 16)
    for cls, name in ((LlamaRMSNorm, "RMSNorm"), (Qwen3NextRMSNorm, "RMSNormZeroCentered")):
        norm = cls(16, eps=1e-3)
        nn.init.normal_(norm.weight)
        replaced = kernelized(extensible(cls, name)(16, eps=1e-3), name)
        replaced.load_state_dict(norm.state_dict())
        assert replaced.forward.__func__ is not cls.forward
        assert_same(replaced, norm, x)
        if dtype is torch.bfloat16:
            # Activations in bfloat16 beside weights in float32, as with autocast.
            y, expected = replaced(x.bfloat16()), norm(x.bfloat16())
            assert y.dtype == expected.dtype
            torch.testing.assert_close(y, expected)


# The classes of transformers 5.23 that KernelConfig maps by the name RMSNormGated, with the activations of
# their gates.
GATED_NORMS = [
    ("bailing_hybrid", "BailingHybridRMSNormGated", "sigmoid"),
    ("glm5_next", "Glm5NextTextRMSNormGated", "sigmoid"),
    ("kimi_linear", "KimiLinearRMSNormGated", "sigmoid"),
    ("olmo_hybrid", "OlmoHybridRMSNormGated", "silu"),
    ("qwen3_5", "Qwen3_5RMSNormGated", "silu"),
    ("qwen3_5_moe", "Qwen3_5MoeRMSNormGated", "silu"),
    ("qwen3_next", "Qwen3NextRMSNormGated", "silu"),
    ("qwen4_exp", "Qwen4ExpTextRMSNormGated", "silu"),
    ("qwen4_exp", "Qwen4ExpTextRMSNormGated", "swish"),
    ("qwen4_exp", "Qwen4ExpTextRMSNormGated", "sigmoid"),
]


@pytest.mark.parametrize("model_type, name, activation", GATED_NORMS)
def test_gated_norms(model_type, name, activation):
    module = f"transformers.models.{model_type}.modeling_{model_type}"
    cls = getattr(pytest.importorskip(module, exc_type=ImportError), name)
    norm = cls(16, eps=1e-3, activation=activation)
    assert norm.activation == activation
    nn.init.normal_(norm.weight)
    replaced = extensible(cls, "RMSNormGated")(16, eps=1e-3, activation=activation)
    kernelized(replaced, "RMSNormGated")
    replaced.load_state_dict(norm.state_dict())
    assert replaced.forward.__func__ is not cls.forward
    x, gate = torch.randn(2, 3, 5, 16)
    assert_same(replaced, norm, x, gate)
    # Activations in bfloat16 beside weights in float32, as with autocast; all in bfloat16; a gate in float32.
    # In the last case, and with the sigmoid of qwen4_exp, the layer rounds less often.
    for weights, gates in (("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")):
        norm.to(getattr(torch, weights))
        replaced.to(getattr(torch, weights))
        given = x.bfloat16(), gate.to(getattr(torch, gates))
        y, expected = replaced(*given), norm(*given)
        assert y.dtype == expected.dtype == torch.bfloat16
        fewer = gates == "float32" or (model_type, activation) == ("qwen4_exp", "sigmoid")
        torch.testing.assert_close(y, expected, rtol=2**-6 if fewer else 2**-8, atol=1e-6)


def test_a_gated_norm_with_another_activation():
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNormGated as cls

    norm = kernelized(extensible(cls, "RMSNormGated")(16, activation="gelu"), "RMSNormGated")
    with pytest.raises(ValueError, match="rms_norm_gated: activation is 'gelu', expected"):
        norm(*torch.randn(2, 3, 16))


@pytest.mark.parametrize(
    "name, act, layer",
    [
        ("SwiGLUMLP", "silu", "LigerSwiGLUMLP"),
        ("GeGLUMLP", "gelu_pytorch_tanh", "LigerGEGLUMLP"),
        ("SwiGLUMLP", "silu", "LigerTiledSwiGLUMLP"),
        ("GeGLUMLP", "gelu_pytorch_tanh", "LigerTiledGEGLUMLP"),
    ],
)
def test_mlps(name, act, layer):
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = tiny_models.config("llama", hidden_act=act, mlp_bias=True)
    mlp = LlamaMLP(config)
    replaced = extensible(LlamaMLP, name)(config)
    replaced.load_state_dict(mlp.state_dict())
    with kernels.use_kernel_mapping(mapping(name, layer=layer), inherit_mapping=False):
        kernels.kernelize(replaced, device="cpu", mode=TRAINING, use_fallback=False)
    assert_same(replaced, mlp, torch.randn(2, 5, 64))


def test_linear():
    linear = nn.Linear(8, 5)
    replaced = extensible(nn.Linear, "Linear")(8, 5)
    replaced.load_state_dict(linear.state_dict())
    assert_same(kernelized(replaced, "Linear"), linear, torch.randn(3, 8))


def test_the_loss():
    from transformers.loss.loss_utils import ForCausalLMLoss

    class Loss(nn.Module):
        def forward(
            self,
            logits,
            labels,
            vocab_size,
            num_items_in_batch=None,
            ignore_index=-100,
            shift_labels=None,
            **kwargs,
        ):
            return ForCausalLMLoss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )

    logits, labels = torch.randn(2, 6, 11), torch.randint(0, 11, (2, 6))
    some = labels.clone()
    some[0, 2:4] = -100
    loss = kernelized(extensible(Loss, "ForCausalLMLoss")(), "ForCausalLMLoss")
    for target, options in (
        (some, {}),
        (some, {"num_items_in_batch": torch.tensor(7)}),
        (some, {"shift_labels": some}),
        (labels, {"ignore_index": 3}),
    ):
        results = []
        for module in (loss, Loss()):
            x = logits.clone().requires_grad_()
            value = module(x, target, 11, **options)
            results.append((value, *torch.autograd.grad(value, x)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- whole models -------------------------------------------------------------------------------------------


@pytest.fixture
def model(monkeypatch):
    """A tiny Llama with extensible norms and rotary embeddings.

    transformers makes them so itself, but only with the versions of kernels that it accepts.
    """
    from transformers.models.llama import modeling_llama as llama

    if not hasattr(llama.LlamaRMSNorm, "kernel_layer_name"):
        rotary = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(llama.apply_rotary_pos_emb)
        attention = kernels.use_kernelized_func(rotary)(type("LlamaAttention", (llama.LlamaAttention,), {}))
        monkeypatch.setattr(llama, "apply_rotary_pos_emb", rotary)
        monkeypatch.setattr(llama, "LlamaAttention", attention)
        monkeypatch.setattr(llama, "LlamaRMSNorm", extensible(llama.LlamaRMSNorm, "RMSNorm"))
    return tiny_models.make("llama")


def step(model):
    loss = model(**tiny_models.batch()).loss
    return loss, *torch.autograd.grad(loss, list(model.parameters()))


def assert_replaced(model, rope_calls):
    norm = model.model.layers[0].input_layernorm
    assert norm.forward.__func__ is not type(norm).forward
    assert len(rope_calls) == len(model.model.layers)


@pytest.fixture
def rope_calls(monkeypatch):
    """A list that grows with every call of liger.rope."""
    import liger

    calls, rope = [], liger.rope
    monkeypatch.setattr(liger, "rope", lambda *args: (calls.append(1), rope(*args))[1])
    return calls


@pytest.fixture
def cpu_kernels(monkeypatch):
    """KernelConfig accepts models on the CPU."""
    from transformers.utils import kernel_config

    if not hasattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES"):
        pytest.skip("this version of transformers has no list of devices to extend")
    devices = [*kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES, "cpu"]
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", devices)


@pytest.mark.parametrize("mode", [TRAINING, TRAINING | kernels.Mode.TORCH_COMPILE, INFERENCE])
def test_a_model(model, rope_calls, mode):
    expected = step(model)
    assert not rope_calls
    kernelized(model, "RMSNorm", "rotary_pos_emb", mode=mode)
    for a, b in zip(step(model), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert_replaced(model, rope_calls)


def test_kernel_config(model, rope_calls, cpu_kernels):
    """The mapping that transformers makes of KernelConfig with the path of the folder."""
    config = transformers.KernelConfig(
        {name: f"{hub_layers.HUB}:{hub_layers.LAYERS[name]}" for name in ("RMSNorm", "rotary_pos_emb")},
        use_local_kernel=True,
    )
    expected = step(model)
    config.sanitize_kernel_mapping(model)
    config.create_compatible_mapping(model)
    with kernels.use_kernel_mapping(config.kernel_mapping, inherit_mapping=False):
        kernels.kernelize(model, device="cpu", mode=TRAINING, use_fallback=False)
    for a, b in zip(step(model), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert_replaced(model, rope_calls)


def test_set_use_kernels(model, cpu_kernels):
    """transformers' one call, where it accepts the installed kernels."""
    if not transformers.utils.is_kernels_available():
        pytest.skip(f"transformers {transformers.__version__} does not accept kernels {kernels.__version__}")
    config = transformers.KernelConfig(
        {"RMSNorm": f"{hub_layers.HUB}:{hub_layers.LAYERS['RMSNorm']}"}, use_local_kernel=True
    )
    expected = step(model)
    model.set_use_kernels(True, config)
    for a, b in zip(step(model), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_patching_of_an_extensible_model(model):
    """liger.patch replaces norms and rotary embeddings that kernelize could replace."""
    from liger.transformers import patch, patch_report

    expected = step(model)
    kinds = set(patch_report(patch(model)).replaced.values())
    assert {"rms_norm", "rope"} <= kinds
    for a, b in zip(step(model), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_mlp_whose_gate_has_another_reader(layers):
    """A hook that keeps the output, and a layer whose backward reads its own output."""
    mlp = layers.LigerSwiGLUMLP()
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = nn.Linear(16, 12), nn.Linear(16, 12), nn.Linear(12, 16)
    x, kept = torch.randn(2, 5, 16), []
    handle = mlp.gate_proj.register_forward_hook(lambda module, args, output: kept.append(output))
    loss = mlp(x).sum()
    before = kept[0].detach().clone()
    loss.backward()
    assert torch.equal(kept[0], before)
    handle.remove()
    mlp.gate_proj = nn.Sequential(mlp.gate_proj, nn.Tanh())
    mlp(x).sum().backward()


def test_fullgraph(layers):
    """The layers compile as one graph, with their backward."""
    torch._dynamo.reset()
    norm = layers.LigerRMSNorm()
    norm.weight, norm.variance_epsilon = nn.Parameter(torch.randn(16)), 1e-5
    gated = layers.LigerRMSNormGated()
    gated.weight, gated.variance_epsilon, gated.activation = nn.Parameter(torch.randn(16)), 1e-5, "silu"
    mlp = layers.LigerSwiGLUMLP()
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = nn.Linear(16, 12), nn.Linear(16, 12), nn.Linear(12, 16)
    half = torch.randn(2, 5, 4)
    tables = tuple(torch.cat((t, t), -1) for t in (half.cos(), half.sin()))
    target = torch.randint(0, 16, (2, 5))
    for layer, arguments in (
        (norm, (torch.randn(2, 5, 16),)),
        (gated, tuple(torch.randn(2, 2, 5, 16))),
        (mlp, (torch.randn(2, 5, 16),)),
        (layers.LigerRotaryPosEmb(), (torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), *tables)),
        (layers.LigerForCausalLMLoss(), (torch.randn(2, 5, 16), target, 16)),
    ):
        x = arguments[0].requires_grad_()
        results = []
        for function in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):
            output = function(*arguments)
            first = output[0] if isinstance(output, tuple) else output
            results.append((first, *torch.autograd.grad((first * first.detach().cos()).sum(), x)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
