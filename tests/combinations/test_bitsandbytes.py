# SPDX-License-Identifier: BSD-3-Clause
"""Layers that bitsandbytes quantises in 8 and in 4 bits, with LoRA adapters of PEFT (QLoRA)."""

import pytest
import torch

import liger

transformers = pytest.importorskip("transformers")
bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")

from combinations import (  # noqa: E402
    DEVICES,
    EXPERTS,
    TYPES,
    adapted,
    assert_replaced,
    assert_same_generation,
    assert_same_training,
    checkpoint,
    inputs_of,
    kinds,
    load,
    lora,
    loss_of,
    seeded_step,
    targets_of,
    tiny,
    types,
)
from tiny_models import assert_same_step  # noqa: E402

import liger.transformers as lt  # noqa: E402

BITS = (4, 8)
ORDERS = ("before quantisation", "before adapters", "after adapters")


def quantisation(bits, **settings):
    if bits == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True, **settings)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        **settings,
    )


def quantised(model_type, bits, device="cpu", **settings):
    return load(model_type, quantisation(bits, **settings), device)


def patched_when_created(model_type, bits, device="cpu", **options):
    """A quantised model of a type all of whose models are patched: before its layers are replaced."""
    lt.patch_future(model_type, **options)
    try:
        return quantised(model_type, bits, device)
    finally:
        lt.unpatch_future(model_type)


def qlora(model_type, bits, order=None, device="cpu", targets=None, options=(), **settings):
    """A quantised model with adapters, patched at some time or, by default, never."""
    if order == "before quantisation":
        model = patched_when_created(model_type, bits, device, **dict(options))
    else:
        model = quantised(model_type, bits, device)
    if order == "before adapters":
        liger.patch(model, **dict(options))
    model = lora(model, *(targets or targets_of(model_type)), init_lora_weights=False, **settings)
    return liger.patch(model, **dict(options)) if order == "after adapters" else model


def assert_same(ours, theirs, model_type, device="cpu", bits=4):
    """Training, generation and merging of two models; the layers of the CPU train only before they
    evaluate."""
    given = inputs_of(model_type, device)
    if bits == 8 and device == "cuda":
        # Activations are rounded to 8 bits, where a rounding may become a whole step.
        results = [seeded_step(model, given) for model in (ours, theirs)]
        torch.testing.assert_close(results[0][0]["loss"], results[1][0]["loss"], rtol=1e-3, atol=0)
        for name, expected in results[1][1].items():
            assert (results[0][1][name] - expected).norm() <= 0.05 * expected.norm(), name
    else:
        assert_same_training(ours, theirs, given)
        assert_same_generation(ours, theirs, given)
        # Merged weights are quantised again: a rounding of an adapter may become a whole step.
        for mine, other in zip(*(m.parameters() for m in (ours, theirs)), strict=True):
            if mine.requires_grad:
                mine.data.copy_(other)
        merged = [model.merge_and_unload() for model in (ours, theirs)]
        # In evaluation, layers of 8 bits round activations to 8 bits, where a rounding may become a whole
        # step.
        bound = 1e-3 if bits == 8 else 1e-5
        torch.testing.assert_close(*(loss_of(m, given) for m in merged), rtol=bound, atol=0)
    liger.unpatch(ours)
    assert not lt.patch_report(ours).replaced


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("model_type", TYPES)
def test_adapters_on_a_quantised_model(model_type, bits, device):
    ours = qlora(model_type, bits, "after adapters", device)
    assert_replaced(ours, like=liger.patch(tiny(model_type)))
    assert ours(**inputs_of(model_type, device)).logits is None
    assert_same(ours, qlora(model_type, bits, device=device), model_type, device, bits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("order", ORDERS[:2])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3", "mixtral"])
def test_patched_before(model_type, order, bits, device):
    ours = qlora(model_type, bits, order, device)
    assert_replaced(ours, like=liger.patch(tiny(model_type)))
    assert_same(ours, qlora(model_type, bits, device=device), model_type, device, bits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("model_type", types("qwen3", "mixtral", "gemma3"))
def test_checkpointing_after_prepare_model_for_kbit_training(model_type, use_reentrant, device):
    def make(patch):
        model = quantised(model_type, 4, device)
        if patch:
            liger.patch(model)
        model = peft.prepare_model_for_kbit_training(
            model, gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
        return lora(model, *targets_of(model_type), init_lora_weights=False, lora_dropout=0.2)

    ours = make(True)
    assert kinds(ours)["experts" if model_type in EXPERTS else "fused_linear_cross_entropy"]
    assert_same_training(ours, make(False), inputs_of(model_type, device))


@pytest.mark.parametrize("device", DEVICES)
def test_dora(device):
    ours, theirs = (qlora("qwen3", 4, order, device, use_dora=True) for order in ("after adapters", None))
    assert_replaced(ours, like=liger.patch(tiny("qwen3")))
    assert_same(ours, theirs, "qwen3", device)


@pytest.mark.parametrize("order", ORDERS)
def test_adapters_on_the_head_train_without_logits(order):
    ours, theirs = (qlora("llama", 4, o, targets=("q_proj", "lm_head")) for o in (order, None))
    assert ours(**inputs_of("llama")).logits is None and kinds(ours)["fused_linear_cross_entropy"]
    assert_same(ours, theirs, "llama")


@pytest.mark.parametrize("order", ORDERS)
def test_tiled_mlps(order):
    options = {"tiled_mlp": True, "tiled_mlp_num_shards": 3}
    ours, theirs = qlora("llama", 4, order, options=options), qlora("llama", 4)
    assert kinds(ours)["tiled_mlp"] == 2
    assert_same(ours, theirs, "llama")


@pytest.mark.parametrize("targets", [("q_proj",), ("q_proj", "lm_head")], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_a_quantised_head_returns_logits(bits, targets, caplog):
    def make():
        # The name of no module, because an empty list stands for the head.
        model = quantised("llama", bits, llm_int8_skip_modules=["none"])
        return lora(model, *targets, init_lora_weights=False)

    ours = liger.patch(make())
    (reason,) = (text for text in lt.patch_report(ours).left.values() if text.startswith("its head is"))
    assert f"Linear{'4bit' if bits == 4 else '8bitLt'}, not a plain linear layer" in reason
    assert "the loss is computed from full logits" in caplog.text
    assert_same_training(ours, make(), inputs_of("llama"))


def test_a_head_quantised_after_patching_is_reported(caplog):
    plain = tiny("llama")
    ours = liger.patch(tiny("llama"))
    for model in (ours, plain):
        head = bitsandbytes.nn.Linear4bit(64, model.lm_head.out_features, False, compute_dtype=torch.float32)
        head.weight = bitsandbytes.nn.Params4bit(model.lm_head.weight.detach(), requires_grad=False)
        model.lm_head = head.to("cpu")
    assert "Linear4bit" in lt.patch_report(ours).left[""]
    assert_same_training(ours, plain, inputs_of("llama"))
    assert "its head is a bitsandbytes.nn.modules.Linear4bit" in caplog.text


def test_a_trainer_of_trl_refuses_a_quantised_head():
    pytest.importorskip("trl")
    from liger.trl._head import call_head

    head = quantised("llama", 4, llm_int8_skip_modules=["none"]).lm_head
    with pytest.raises(RuntimeError, match=r"Linear4bit, expected a torch.nn.Linear.*no quantisation"):
        call_head(head, torch.randn(2, 64), lambda hidden, weight, bias: ())


@pytest.mark.parametrize("bits", BITS)
def test_saved_adapters_load_into_a_patched_model(bits, tmp_path):
    ours = qlora("qwen3", bits, "after adapters")
    given = inputs_of("qwen3")
    expected = loss_of(ours, given)
    ours.save_pretrained(tmp_path)
    fresh = peft.PeftModel.from_pretrained(liger.patch(quantised("qwen3", bits)), tmp_path)
    torch.testing.assert_close(loss_of(fresh, given), expected, rtol=1e-6, atol=0)
    plain = peft.PeftModel.from_pretrained(quantised("qwen3", bits), tmp_path)
    torch.testing.assert_close(loss_of(plain, given), expected, rtol=1e-5, atol=0)


def test_a_quantised_model_saves_the_same_files(tmp_path):
    plain = quantised("llama", 4)
    ours = liger.patch(quantised("llama", 4))
    assert ours.state_dict().keys() == plain.state_dict().keys()
    ours.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    assert type(again.model.layers[0].mlp.gate_proj).__name__ == "Linear4bit"
    given = inputs_of("llama")
    torch.testing.assert_close(loss_of(again, given), loss_of(plain, given), rtol=1e-6, atol=0)


def test_dequantize_keeps_the_patch():
    plain, ours = quantised("llama", 4), liger.patch(quantised("llama", 4))
    before = kinds(ours)
    plain, ours = plain.dequantize(), ours.dequantize()
    assert type(ours.model.layers[0].mlp.gate_proj) is torch.nn.Linear and kinds(ours) == before
    given = inputs_of("llama")
    assert_same_step(*(seeded_step(model.train(), given) for model in (ours, plain)))


def test_norms_in_float32_beside_bfloat16():
    """prepare_model_for_kbit_training casts norms and head to float32; quantised layers compute in
    bfloat16."""

    def make(dtype, patch):
        model = transformers.LlamaForCausalLM.from_pretrained(
            checkpoint("llama"),
            quantization_config=quantisation(4).__class__(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
            ),
            dtype=torch.bfloat16,
            device_map="cpu",
        )
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model = adapted(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        )
        return liger.patch(model) if patch else model

    given = inputs_of("llama")
    _, exact = seeded_step(make(torch.float32, False), given)
    errors = []
    for patch in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            _, found = seeded_step(make(torch.bfloat16, patch), given)
        errors.append(sum((found[n].float() - g).norm() ** 2 for n, g in exact.items()) ** 0.5)
    assert errors[0] <= 2 * errors[1]
