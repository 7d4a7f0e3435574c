# SPDX-License-Identifier: BSD-3-Clause
"""Weights that torchao quantises: the layers stay nn.Linear, and their weights become tensor subclasses."""

import pytest
import torch

import liger

transformers = pytest.importorskip("transformers")
pytest.importorskip("torchao")
pytest.importorskip("accelerate")

from combinations import (  # noqa: E402
    DEVICES,
    ORDERS,
    TYPES,
    assert_replaced,
    assert_same_generation,
    assert_same_training,
    inputs_of,
    kinds,
    load,
    lora,
    seeded_step,
    targets_of,
    tiny,
    types,
)
from tiny_models import assert_same_step  # noqa: E402
from torchao import quantization  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.mlp.experts import QUANTISED  # noqa: E402

CONFIGURATIONS = {
    "int8": quantization.Int8WeightOnlyConfig,
    "int4": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    "float8": quantization.Float8WeightOnlyConfig,
}


def quantise(model, name="int8", head=False):
    """Quantises linear layers, and freezes their weights."""

    def is_wanted(module, path):
        # nn.MultiheadAttention reads the weight of its out_proj, and multiplies by its transpose.
        is_read = path.endswith("attention.out_proj")
        return isinstance(module, torch.nn.Linear) and not is_read and (head or "lm_head" not in path)

    quantization.quantize_(model, CONFIGURATIONS[name](), filter_fn=is_wanted)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and type(module.weight) is not torch.nn.Parameter:
            module.weight.requires_grad_(False)
    return model


def made(model_type, order=None, device="cpu", options=(), wrap=quantise):
    """A tiny model, quantised by ``wrap``, patched before or after, or never."""
    model = tiny(model_type, device)
    if order == "patch first":
        liger.patch(model, **dict(options))
    model = wrap(model)
    return liger.patch(model, **dict(options)) if order == "patch last" else model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_other_weights_train(name, order, device):
    ours, theirs = (made("llama", o, device, wrap=lambda m: quantise(m, name)) for o in (order, None))
    assert type(ours.model.layers[0].mlp.gate_proj.weight) is not torch.nn.Parameter
    assert_replaced(ours, like=liger.patch(tiny("llama")))
    given = inputs_of("llama", device)
    assert ours(**given).logits is None
    assert_same_training(ours, theirs, given)
    assert_same_generation(ours, theirs, given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", TYPES)
def test_lora_on_quantised_weights(model_type, device):
    pytest.importorskip("peft")

    def wrap(model):
        return lora(quantise(model), *targets_of(model_type), init_lora_weights=False)

    ours, theirs = (made(model_type, o, device, wrap=wrap) for o in ("patch last", None))
    assert_replaced(ours, like=liger.patch(tiny(model_type)))
    given = inputs_of(model_type, device)
    assert_same_training(ours, theirs, given)
    assert_same_generation(ours, theirs, given)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_lora_layers_over_any_weights_are_nodes(name):
    pytest.importorskip("peft")

    def wrap(model):
        return lora(quantise(model, name), *targets_of("llama"), init_lora_weights=False)

    ours, theirs = (made("llama", o, wrap=wrap) for o in ("patch last", None))
    report, given = lt.patch_report(ours), inputs_of("llama")
    adapted = [module for module in theirs.modules() if hasattr(module, "lora_A")]
    assert list(report.replaced.values()).count("lora_linear") == len(adapted) and not report.left
    mlp = ours.get_base_model().model.layers[0].mlp
    x = torch.randn(1, 2, mlp.down_proj.base_layer.out_features, requires_grad=True)
    assert type(mlp(x).grad_fn).__name__ == "_LinearsBackward"  # of down_proj
    assert_same_step(*(seeded_step(model.train(), given) for model in (ours, theirs)))


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_quantised_head_returns_logits(order, name, caplog):
    ours, theirs = (made("llama", o, wrap=lambda m: quantise(m, name, head=True)) for o in (order, None))
    (reason,) = lt.patch_report(ours).left.values()
    assert "whose weight is a torchao" in reason and "full logits" in reason
    given = inputs_of("llama")
    assert_same_training(ours, theirs, given)
    assert "whose weight is a torchao" in caplog.text
    assert_same_generation(ours, theirs, given)


@pytest.mark.parametrize("order", ORDERS)
def test_lora_on_a_quantised_head(order):
    pytest.importorskip("peft")

    def wrap(model):
        return lora(quantise(model, head=True), "q_proj", "lm_head", init_lora_weights=False)

    ours, theirs = (made("llama", o, wrap=wrap) for o in (order, None))
    assert "TorchaoLoraLinear" in "".join(lt.patch_report(ours).left.values())
    assert_same_training(ours, theirs, inputs_of("llama"))


@pytest.mark.parametrize("order", ORDERS)
def test_tiled_mlps(order):
    options = {"tiled_mlp": True, "tiled_mlp_num_shards": 3}
    ours, theirs = (made("llama", o, options=options) for o in (order, None))
    assert kinds(ours)["tiled_mlp"] == 2
    assert_same_training(ours, theirs, inputs_of("llama"))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", types("mixtral", "qwen3_moe"))
def test_quantised_experts(model_type, order):
    """Those that are quantised after the patch run the code of the model."""

    def wrap(model):
        # The other implementations of transformers have no kernels for these weights.
        model.set_experts_implementation("eager")
        rules = {r"re:.*experts\.(gate_up_proj|down_proj)": quantization.Int8WeightOnlyConfig()}
        quantization.quantize_(model, quantization.FqnToConfig(rules), filter_fn=None)
        for layer in model.model.layers:
            layer.mlp.experts.requires_grad_(False)
        return model

    ours, theirs = (made(model_type, o, wrap=wrap) for o in (order, None))
    left = [] if order == "patch last" else [QUANTISED] * 2
    assert list(lt.patch_report(ours).left.values()) == left
    assert_same_training(ours, theirs, inputs_of(model_type))


@pytest.mark.parametrize("order", ["before quantisation", "after quantisation"])
def test_loaded_with_a_configuration(order):
    def quantised():
        return load("qwen3", transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig()))

    if order == "before quantisation":
        lt.patch_future("qwen3")
        try:
            ours = quantised()
        finally:
            lt.unpatch_future("qwen3")
    else:
        ours = liger.patch(quantised())
    theirs = quantised()
    for model in (ours, theirs):
        assert type(model.model.layers[0].mlp.gate_proj.weight) is not torch.nn.Parameter
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_(True)
        model.train()
    assert_replaced(ours, like=liger.patch(tiny("qwen3")))
    assert_same_training(ours, theirs, inputs_of("qwen3"))


@pytest.mark.parametrize("head", [False, True], ids=["head as before", "head too"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["float8 training", "quantisation-aware training", "int8 training"])
def test_layers_that_train_quantised(kind, order, head):
    def is_wanted(module, path):
        return isinstance(module, torch.nn.Linear) and (head or "lm_head" not in path)

    def wrap(model):
        if kind == "float8 training":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig(emulate=True)
            return convert_to_float8_training(model, config=config, module_filter_fn=is_wanted)
        if kind == "int8 training":
            from torchao.prototype.quantized_training import int8_weight_only_quantized_training

            quantization.quantize_(model, int8_weight_only_quantized_training(), filter_fn=is_wanted)
            return model
        from torchao.quantization.qat import QATConfig

        config = QATConfig(quantization.IntxWeightOnlyConfig(), step="prepare")
        quantization.quantize_(model, config, filter_fn=is_wanted)
        return model

    ours, theirs = (made("llama", o, wrap=wrap) for o in (order, None))
    given = inputs_of("llama")
    assert bool(lt.patch_report(ours).left) == head
    # Later steps would round weights to another value.
    assert_same_step(seeded_step(ours, given), seeded_step(theirs, given))


def test_compiled():
    ours = made("llama", "patch last", wrap=lambda m: quantise(m, head=True)).eval()
    given = inputs_of("llama")
    expected = ours(**given, skip_logits=True).loss
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(ours, backend="aot_eager", fullgraph=True)(**given, skip_logits=True)
    torch.testing.assert_close(found.loss, expected.detach(), rtol=1e-6, atol=0)


def test_a_trainer_of_trl_refuses_a_quantised_head():
    pytest.importorskip("trl")
    from liger.trl._head import call_head

    head = quantise(tiny("llama"), head=True).lm_head
    with pytest.raises(RuntimeError, match=r"liger\.trl: the head is a .*Linear, expected .*no quantisation"):
        call_head(head, torch.randn(2, 64), lambda hidden, weight, bias: ())
