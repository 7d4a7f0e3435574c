# SPDX-License-Identifier: BSD-3-Clause
"""A patched Hugging Face model computes what the unpatched one computes: logits, loss and every gradient."""

import pytest
import torch
from cases import DTYPES

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import FAMILIES, VOCAB, assert_same_step, batch, make, step, twin  # noqa: E402

from liger.transformers import patch_report  # noqa: E402

KINDS = {"rope": 2, "rms_norm": 5, "swiglu": 2, "fused_add_rms_norm": 2, "fused_linear_cross_entropy": 1}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def pair(family, device="cpu", **overrides):
    """(patched, plain) models with the same weights."""
    plain = make(family, device, **overrides)
    return liger.patch(twin(plain)), plain


def test_everything_is_replaced(family):
    report = patch_report(liger.patch(make(family)))
    kinds = list(report.replaced.values())
    expected = dict(KINDS)
    if family == "qwen3":
        expected.update(rms_norm=9, qk_norm_rope=expected.pop("rope"))
    assert {kind: kinds.count(kind) for kind in kinds} == expected
    assert report.left == {}


def test_training_step(device, family):
    patched, plain = pair(family, device)
    inputs = batch(device)
    ours, theirs = step(patched, **inputs), step(plain, **inputs)
    assert_same_step(ours, theirs)
    assert ours[0].logits is None and "logits" not in ours[0]
    logits = patched(**inputs, skip_logits=False).logits
    torch.testing.assert_close(logits, theirs[0].logits, rtol=1e-5, atol=1e-5)


def assert_as_exact_as_plain(ours, theirs, best, dtype):
    """Loss and gradients are no further from float32 than the unpatched model's in the same dtype.

    Thousands of roundings lie between an input and a gradient, and luck decides which of two equally exact
    models comes closer at one element, so the error is measured over each tensor.
    """
    pairs = {"loss": [result[0].loss for result in (ours, theirs, best)]}
    pairs |= {name: [result[1][name] for result in (ours, theirs, best)] for name in best[1]}
    for name, (value, usual_value, exact) in pairs.items():
        error, usual = (((v.float() - exact).norm() / exact.norm()).item() for v in (value, usual_value))
        assert error <= 2 * usual + torch.finfo(dtype).eps, f"{name}: error {error:.3g}, plain {usual:.3g}"


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_training_step_in_low_precision(device, family, dtype):
    plain = make(family, device, dtype)
    models = (liger.patch(twin(plain)), plain, twin(plain).float())
    assert_as_exact_as_plain(*(step(model, **batch(device)) for model in models), dtype)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kinds", [("rope",), ("rms_norm",), ("swiglu",), ("mlp",), ()], ids=str)
def test_each_part_alone(kinds, attention):
    plain = make("llama", attn_implementation=attention)
    asked = dict.fromkeys(("rope", "rms_norm", "fused_add_rms_norm", "swiglu", "geglu"), False)
    asked["fused_linear_cross_entropy"] = False
    asked |= dict.fromkeys(kinds, True)
    patched = liger.patch(twin(plain), **asked)
    assert set(patch_report(patched).replaced.values()) == {"swiglu" if k == "mlp" else k for k in kinds}
    assert_same_step(step(patched, **batch()), step(plain, **batch()))


def test_cross_entropy_alone_keeps_the_logits(family):
    plain = make(family)
    patched = liger.patch(twin(plain), cross_entropy=True, fused_linear_cross_entropy=False)
    ours, theirs = step(patched, **batch()), step(plain, **batch())
    assert_same_step(ours, theirs)
    torch.testing.assert_close(ours[0].logits, theirs[0].logits, rtol=1e-5, atol=1e-5)


LOSS_INPUTS = {
    "position_ids": lambda b: {"position_ids": torch.arange(11).flip(0).expand(2, 11)},
    "count": lambda b: {"num_items_in_batch": 37},
    "count_tensor": lambda b: {"num_items_in_batch": torch.tensor(37)},
    "ignore_index": lambda b: {"labels": b["labels"].masked_fill(b["labels"] == -100, 5), "ignore_index": 5},
    "shift_labels": lambda b: {"shift_labels": b["labels"].roll(-3, 1)},
    "inputs_embeds": lambda b: {"input_ids": None, "inputs_embeds": torch.randn(2, 11, 64)},
    "last_logits": lambda b: {"logits_to_keep": 4, "labels": b["labels"][:, -4:]},
    "no_cache": lambda b: {"use_cache": False},
    "hidden_states": lambda b: {"output_hidden_states": True},
    "no_mask": lambda b: {"attention_mask": None},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", LOSS_INPUTS)
def test_forward_arguments(family, name):
    patched, plain = pair(family)
    inputs = batch()
    inputs |= LOSS_INPUTS[name](inputs)
    ours, theirs = step(patched, **inputs), step(plain, **inputs)
    assert_same_step(ours, theirs)
    assert set(theirs[0]) - set(ours[0]) == {"logits"}


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"mlp_bias": True, "attention_bias": True},
        {"attn_implementation": "sdpa"},
        {"rms_norm_eps": 0.3},
        {"num_key_value_heads": 4},
        {"hidden_size": 40, "intermediate_size": 33},
    ],
    ids=str,
)
def test_configurations(overrides):
    patched, plain = pair("llama", **overrides)
    assert set(patch_report(patched).replaced.values()) == KINDS.keys()
    ours, theirs = step(patched, **batch()), step(plain, **batch())
    assert_same_step(ours, theirs)


def test_head_with_a_bias():
    plain = make("llama")
    plain.lm_head = torch.nn.Linear(64, VOCAB)
    patched = liger.patch(twin(plain))
    ours, theirs = step(patched, **batch()), step(plain, **batch())
    assert "lm_head.bias" in ours[1]
    assert_same_step(ours, theirs)


@pytest.mark.parametrize("frozen", ["head", "backbone", "norms"])
def test_frozen_parts(frozen):
    patched, plain = pair("llama")
    for model in (patched, plain):
        for name, parameter in model.named_parameters():
            kind = "head" if name.startswith("lm_head") else "norms" if parameter.dim() == 1 else "other"
            parameter.requires_grad_(kind == "head" if frozen == "backbone" else kind != frozen)
    assert_same_step(step(patched, **batch()), step(plain, **batch()))


def test_every_label_ignored():
    patched, plain = pair("llama")
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    assert torch.isnan(plain(**inputs).loss) and torch.isnan(patched(**inputs).loss)
    assert patched(**inputs, num_items_in_batch=5).loss == plain(**inputs, num_items_in_batch=5).loss == 0


def test_when_logits_are_returned():
    patched, plain = pair("llama")
    inputs = batch()
    expected = plain(**inputs)
    without_labels = {name: value for name, value in inputs.items() if name != "labels"}
    for output in (patched(**without_labels), patched(**inputs, skip_logits=False), patched.eval()(**inputs)):
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-5)
        if output.loss is not None:
            torch.testing.assert_close(output.loss, expected.loss)
    skipped = patched(**inputs, skip_logits=True)
    assert skipped.logits is None
    torch.testing.assert_close(skipped.loss, expected.loss)
    with pytest.raises(ValueError, match="skip_logits=True needs labels"):
        patched(**without_labels, skip_logits=True)


def test_tuple_output():
    patched, plain = pair("llama")
    ours, theirs = (model(**batch(), return_dict=False, use_cache=False) for model in (patched, plain))
    assert isinstance(ours, tuple) and len(ours) == len(theirs) - 1
    torch.testing.assert_close(ours[0], theirs[0])
    kept = patched(**batch(), return_dict=False, use_cache=False, skip_logits=False)
    torch.testing.assert_close(kept[1], theirs[1], rtol=1e-5, atol=1e-5)


def test_labels_by_position():
    patched, plain = pair("llama")
    inputs = batch()
    position = [inputs["input_ids"], inputs["attention_mask"], None, None, None, inputs["labels"]]
    torch.testing.assert_close(patched(*position).loss, plain(**inputs).loss)
    assert patched(*position).logits is None


def test_gradient_accumulation_over_unequal_micro_batches():
    patched, plain = pair("llama")
    inputs = batch(rows=5)
    inputs["labels"][2:, 3:] = -100
    count = (inputs["labels"][:, 1:] != -100).sum()
    whole = step(plain, **inputs)
    patched.zero_grad()
    total = 0.0
    for rows in (slice(0, 1), slice(1, 3), slice(3, 5)):
        loss = patched(**{k: v[rows] for k, v in inputs.items()}, num_items_in_batch=count).loss
        loss.backward()
        total += loss.detach()
    grads = {name: p.grad for name, p in patched.named_parameters()}
    assert_same_step(({"loss": total}, grads), whole)
