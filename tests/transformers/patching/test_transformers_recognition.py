# SPDX-License-Identifier: BSD-3-Clause
"""What patching takes for the layers that it knows, what it leaves alone, and the reason that it gives."""

import inspect

import pytest
import torch

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import VOCAB, assert_same_step, batch, config, make, step, twin  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.head.causal_lm import CHANGED, READS  # noqa: E402
from liger.transformers.mlp.recipe import MLPRecipe  # noqa: E402


def test_other_activation_is_left_alone():
    report = lt.patch_report(liger.patch(make("llama", hidden_act="relu")))
    assert not {"swiglu", "geglu"} & set(report.replaced.values())
    reasons = [reason for name, reason in report.left.items() if name.endswith("mlp")]
    assert len(reasons) == 2 and all("ReLU" in reason for reason in reasons)


def test_a_norm_that_computes_something_else_is_left_alone(monkeypatch):
    plain = make("llama")
    cls = type(plain.model.norm)
    monkeypatch.setattr(cls, "forward", lambda self, x: self.weight * x)
    model = liger.patch(twin(plain))
    assert "rms_norm" not in lt.patch_report(model).replaced.values()
    assert len(lt.patch_report(model).left) == 5
    assert_same_step(step(model, **batch()), step(plain, **batch()))


def test_an_mlp_and_a_rotation_that_differ_are_left_alone(monkeypatch):
    plain = make("llama")
    mlp = type(plain.model.layers[0].mlp)
    modeling = inspect.getmodule(mlp)
    rotate = modeling.apply_rotary_pos_emb
    monkeypatch.setattr(mlp, "forward", lambda s, x: s.down_proj(s.gate_proj(x) * s.act_fn(s.up_proj(x))))
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, cos, sin: rotate(q, k, cos, sin.abs()))
    model = liger.patch(twin(plain))
    assert set(lt.patch_report(model).replaced.values()) == {
        "rms_norm",
        "fused_add_rms_norm",
        "fused_linear_cross_entropy",
    }
    reasons = lt.patch_report(model).left.values()
    for words in ("is not a rotation", "down(silu(gate) or gelu(gate) * up)"):
        assert sum(words in reason for reason in reasons) == 2
    assert_same_step(step(model, **batch()), step(plain, **batch()))


def llama_with(transform):
    """A Llama whose logits pass through a function between head and loss."""

    class Transforming(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            logits = transform(self.lm_head(self.model(input_ids, **kwargs)[0]))
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    return Transforming(config("llama"))


@pytest.mark.parametrize(
    "transform",
    [lambda x: x + 0.1 * x**3, lambda x: x.clamp(-1e3, 1e3), lambda x: -x, lambda x: x.flip(-1), torch.tanh],
    ids=["cubic", "clamped", "negative", "flipped", "tanh"],
)
def test_a_forward_that_changes_its_logits_keeps_its_loss(transform):
    plain = llama_with(transform)
    model = liger.patch(twin(plain))
    if transform is torch.tanh:  # a softcap of 1
        assert not lt.patch_report(model).left
    else:
        assert set(lt.patch_report(model).left.values()) <= {CHANGED, READS}
        assert len(lt.patch_report(model).left) == 1
    assert_same_step(step(model, **batch()), step(plain, **batch()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("scale", [1 / 3, 1.0, 16.0])
def test_scaled_and_capped_logits_are_fused(scale, softcap, bias):
    def transform(x):
        x = x * scale
        return x if softcap is None else softcap * torch.tanh(x / softcap)

    plain = llama_with(transform)
    if bias:
        plain.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB))
    model = liger.patch(twin(plain))
    assert lt.patch_report(model).replaced[""] == "fused_linear_cross_entropy"
    ours, theirs = step(model, **batch()), step(plain, **batch())
    assert ours[0].logits is None
    assert_same_step(ours, theirs)
    plain.eval(), model.eval()
    torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss)


def test_classes_that_a_model_cuts_off_get_no_gradient():
    plain = llama_with(lambda x: x[..., : VOCAB - 10])
    model = liger.patch(twin(plain))
    assert lt.patch_report(model).replaced[""] == "fused_linear_cross_entropy"
    inputs = batch()
    inputs["labels"] = inputs["labels"].clamp(max=VOCAB - 11)
    ours, theirs = step(model, **inputs), step(plain, **inputs)
    assert ours[0].logits is None and not ours[1]["lm_head.weight"][-10:].any()
    assert_same_step(ours, theirs)


@pytest.mark.parametrize("loss_type", ["own", "later"])
def test_a_loss_function_of_the_user_is_used(loss_type):
    def count_logits(logits, labels, **_):
        return logits.square().mean()

    plain = make("llama")
    model = twin(plain)
    plain.loss_function = count_logits
    if loss_type == "own":
        model.loss_function = count_logits
        liger.patch(model)
        assert "loss function of its own" in lt.patch_report(model).left[""]
    else:
        liger.patch(model).loss_function = count_logits
    assert_same_step(step(model, **batch()), step(plain, **batch()))


def test_a_forward_set_on_the_instance_is_left_alone():
    model = make("llama")
    model.model.norm.forward = lambda x: x * 2
    liger.patch(model)
    assert lt.patch_report(model).left == {"model.norm": "its forward was replaced on the instance"}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("hidden_act", "activation"),
    [("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu_new", "gelu_tanh")],
)
def test_mlps_with_gelu(device, hidden_act, activation, inplace, monkeypatch):
    seen, run = [], MLPRecipe.run
    monkeypatch.setattr(MLPRecipe, "run", lambda *args: seen.append(args[0].activation) or run(*args))
    plain = make("llama", device, hidden_act=hidden_act)
    model = liger.patch(twin(plain), inplace=inplace)
    seen.clear()
    assert_same_step(step(model, **batch(device)), step(plain, **batch(device)))
    assert seen == [activation] * 2
    assert list(lt.patch_report(model).replaced.values()).count("geglu") == 2


def test_packed_mlps_with_gelu(device):
    plain = make("Phi3", device, hidden_act="gelu_pytorch_tanh")
    model = liger.patch(twin(plain))
    assert list(lt.patch_report(model).replaced.values()).count("geglu") == 2
    assert_same_step(step(model, **batch(device)), step(plain, **batch(device)))


@pytest.mark.parametrize("hidden_act", ["silu", "gelu"])
@pytest.mark.parametrize(
    ("options", "patched"),
    [
        ({"swiglu": False}, {"gelu"}),
        ({"geglu": False}, {"silu"}),
        ({"mlp": False}, set()),
        ({"mlp": True}, {"silu", "gelu"}),
    ],
)
def test_each_kind_of_mlp_alone(hidden_act, options, patched):
    report = lt.patch_report(liger.patch(make("llama", hidden_act=hidden_act), **options))
    assert bool({"swiglu", "geglu"} & set(report.replaced.values())) == (hidden_act in patched)
    kind = "swiglu" if hidden_act == "silu" else "geglu"
    assert report.not_asked_for.get("model.layers.0.mlp") == (None if hidden_act in patched else kind)
    assert not report.left


def test_models_without_a_language_model_head():
    for name in ("LlamaModel", "LlamaForSequenceClassification"):
        plain = getattr(transformers, name)(config("llama")).eval()
        model = liger.patch(twin(plain))
        assert set(lt.patch_report(model).replaced.values()) == {
            "rope",
            "rms_norm",
            "swiglu",
            "fused_add_rms_norm",
        }
        ids = batch()["input_ids"]
        torch.testing.assert_close(model(ids)[0], plain(ids)[0], rtol=1e-5, atol=1e-5)
