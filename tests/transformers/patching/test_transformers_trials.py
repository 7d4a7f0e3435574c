# SPDX-License-Identifier: BSD-3-Clause
"""Trials look where a module may differ from the op: in training, with large and small numbers, in every
layout."""

import inspect

import pytest
import torch
from torch import nn

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import assert_same_step, batch, make, step, twin  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.attention import rotary  # noqa: E402
from liger.transformers.attention.rotary import Function, rotary_function  # noqa: E402
from liger.transformers.attention.rotations import Rotation  # noqa: E402
from liger.transformers.mlp import gated_mlp  # noqa: E402
from liger.transformers.recipe import trials  # noqa: E402

ROPE_NAME = "apply_rotary_pos_emb"

GATED = ("silu", "gelu_tanh", "gelu")


class MLP(nn.Module):
    """The plain form; the others below differ from it for some numbers or in some mode only."""

    def __init__(self, act_fn=None):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(*size, bias=False) for size in ((8, 6), (8, 6), (6, 8))
        )
        self.act_fn = act_fn or nn.SiLU()
        self.limit, self.dropout = 10.0, 0.1

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ClampedInputs(MLP):
    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=self.limit), self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(self.act_fn(gate) * up)


class ClampedActivation(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=self.limit) * self.up_proj(x))


class ClampedResult(MLP):
    def forward(self, x):
        return super().forward(x).clamp(-1000 * self.limit, 1000 * self.limit)


class Threshold(MLP):
    def forward(self, x):
        up = self.up_proj(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up.masked_fill(up.abs() < 1e-2, 0.0))


class Dropout(MLP):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), self.dropout, self.training)


class Noise(nn.SiLU):
    def forward(self, x):
        return super().forward(x) + (0.1 * torch.rand_like(x) if self.training else 0.0)


def test_a_plain_mlp_is_taken():
    assert not isinstance(gated_mlp.mlp(MLP(), GATED, True), str)


@pytest.mark.parametrize("make_mlp", [ClampedInputs, ClampedActivation, ClampedResult, Threshold])
@pytest.mark.parametrize("tiled", [False, True])
def test_an_mlp_that_differs_for_some_numbers_is_left(make_mlp, tiled):
    module = make_mlp()
    found = gated_mlp.mlp_to_tile(module, None) if tiled else gated_mlp.mlp(module, GATED, True)
    assert isinstance(found, str) and "it does not compute down(" in found


@pytest.mark.parametrize("module", [Dropout(), MLP(Noise())], ids=["dropout", "activation"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_mlp_that_is_random_in_training_is_left(module, mode):
    found = gated_mlp.mlp(getattr(module, mode)(), GATED, True)
    assert isinstance(found, str) and "in training" in found
    assert module.act_fn.training == (mode == "train")


class WithDropout(MLP):
    """As in T5Gemma: a module before the last projection."""

    def __init__(self, rate):
        super().__init__()
        self.dropout = nn.Dropout(rate)

    def forward(self, x):
        return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


@pytest.mark.parametrize("tiled", [False, True])
def test_a_dropout_of_rate_zero(tiled):
    assert gated_mlp.mlp(WithDropout(0.5), GATED, True) == trials.IN_TRAINING
    model = liger.patch(nn.ModuleList([WithDropout(0.0)]), tiled_mlp=tiled)
    kind = "tiled_mlp" if tiled else "swiglu"
    assert lt.patch_report(model).replaced == {"0": kind}
    x = torch.randn(64, 8)
    expected = MLP.forward(model[0], x)
    torch.testing.assert_close(model[0](x), expected)
    model[0].dropout.p = 0.5
    assert not torch.allclose(model[0](x), expected)
    torch.testing.assert_close(model.eval()[0](x), expected)
    assert tiled or "dropout" in lt.patch_report(model).left["0"]


class WithStatistics(MLP):
    def forward(self, x):
        return super().forward(x), x.mean()


@pytest.mark.parametrize("tiled", [False, True])
def test_an_mlp_that_returns_more_is_left(tiled):
    module = WithStatistics()
    found = gated_mlp.mlp_to_tile(module, None) if tiled else gated_mlp.mlp(module, GATED, True)
    assert found == "it does not return one tensor"


class Stopped(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))


@pytest.mark.parametrize("tiled", [False, True])
def test_an_mlp_with_other_gradients_is_left(tiled):
    module = Stopped()
    found = gated_mlp.mlp_to_tile(module, None) if tiled else gated_mlp.mlp(module, GATED, True)
    assert found == "its gradients differ from the op's"


def test_a_flag_of_the_module_decides():
    module = ClampedInputs()
    module.limit = float("inf")
    assert not isinstance(gated_mlp.mlp(module, GATED, True), str)


@pytest.mark.parametrize("what", ["dropout", "clamp"])
def test_heads_with_other_logits_for_some_numbers_or_in_training_keep_their_loss(what):
    """Dropout before the head is the model's own code, which runs as ever; a trial that sees other logits is
    careful."""

    class Changed(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            hidden = self.model(input_ids, **kwargs)[0]
            if what == "dropout":
                hidden = nn.functional.dropout(hidden, 0.1, self.training)
            logits = self.lm_head(hidden)
            if what == "clamp":
                logits = logits.clamp(-1e4, 1e4)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=300)
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    report = lt.patch_report(liger.patch(Changed(make("llama").config)))
    assert "changes the logits" in report.left[""]


def test_a_forward_that_reads_more_from_its_backbone_is_tried():
    class Reading(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            outputs = self.model(input_ids, **kwargs)
            logits = self.lm_head(outputs.last_hidden_state)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=300)
            return transformers.modeling_outputs.CausalLMOutput(loss, logits, getattr(outputs, "own_states"))  # noqa: B009

    model = liger.patch(Reading(make("llama").config))
    assert lt.patch_report(model).replaced[""] == "fused_linear_cross_entropy"


def test_a_rotation_whose_sine_and_cosine_have_factors_of_their_own():
    def skewed(q, k, cos, sin, unsqueeze_dim=1):
        angle = torch.atan2(sin, cos)
        return rotate(q, k, angle.cos(), angle.sin(), unsqueeze_dim)

    rotate = inspect.getmodule(transformers.LlamaForCausalLM).apply_rotary_pos_emb
    assert rotary.recognise(rotate).form == Rotation()
    assert rotary.recognise(skewed) == "is not a rotation that liger computes"


def test_trials_take_no_random_numbers_of_dropout():
    model = make("llama")
    model.model.layers[0].mlp = Dropout()
    torch.manual_seed(5)
    liger.patch(model)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_an_error_of_one_scale_counts():
    exact = trials.Random().of_all_scales(3, 5)
    for scale in range(len(trials.SCALES)):
        wrong = exact.clone()
        wrong[scale] *= 1.001
        assert trials.error(exact, exact) == 0 and trials.error(wrong, exact) > 1
        wrong[scale, 0, 0] = torch.nan
        assert trials.error(wrong, exact) == float("inf")


# --- architectures of transformers that are so --------------------------------------------------------------


def test_dropout_of_seed_oss_is_kept():
    if not hasattr(transformers, "SeedOssConfig"):
        pytest.skip("this transformers has no SeedOss")
    plain = make("SeedOss", residual_dropout=0.3)
    model = liger.patch(twin(plain))
    assert not {"swiglu"} & set(lt.patch_report(model).replaced.values())
    results = []
    for m in (model, plain):
        torch.manual_seed(4)
        results.append(step(m, **batch()))
    assert_same_step(*results)


CLAMPING = {
    "deepseek_v4": ("DeepseekV4MLP", {"swiglu_limit": 10.0}, {}),
    "step3p7": ("Step3p7MLP", {"swiglu_limits_shared": [16.0]}, {"layer_idx": 0}),
    "glm5_next": ("Glm5NextTextMLP", {"swiglu_limit": 10.0}, {}),
}


@pytest.mark.parametrize("name", CLAMPING)
def test_mlps_of_transformers_that_clamp_are_left(name):
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    mlp, settings, arguments = CLAMPING[name]
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 6,
        "share_expert_dim": 6,
        "mlp_bias": False,
        "hidden_act": "silu",
    }
    module = getattr(modeling, mlp)(transformers.PretrainedConfig(**sizes, **settings), **arguments)
    assert "it does not compute down(" in gated_mlp.mlp(module, GATED, True)


# --- layouts of rotary embeddings ---------------------------------------------------------------------------


LAYOUTS = [
    (3, 1), (3, -3), (3, 2), (3, -2), (2, 0), (2, -3), (2, 1), (2, -2),
]  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dims", "unsqueeze_dim"), LAYOUTS)
def test_layouts_of_cosines_reach_the_op(dims, unsqueeze_dim, interleaved):
    """As many heads as tokens, so that shapes alone would not tell a wrong layout."""

    def theirs(q, k, cos, sin, unsqueeze_dim=1):
        calls.append(unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        if interleaved:
            turn = lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)  # noqa: E731
        else:
            turn = lambda x: torch.cat((-x[..., 4:], x[..., :4]), -1)  # noqa: E731
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    calls = []
    q, k = torch.randn(2, 2, 3, 3, 8)
    half = torch.randn(2, 2, 3, 4)
    cos, sin = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
    if dims == 2:
        cos, sin = cos[0], sin[0]
    expected = theirs(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    calls.clear()
    form = Rotation("interleaved" if interleaved else "halves")
    ours = rotary_function(theirs, Function(form))(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    assert not calls
    torch.testing.assert_close(ours, expected)


def test_pixtral_sees_images():
    config = getattr(transformers, "PixtralVisionConfig", None)
    if config is None:
        pytest.skip("this transformers has no Pixtral")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain = transformers.PixtralVisionModel(config(image_size=16, patch_size=4, **sizes))
    model = liger.patch(twin(plain))
    assert "rope" in lt.patch_report(model).replaced.values()
    pixels, upstream = torch.randn(1, 3, 16, 16), torch.randn(1, 16, 32)
    results = []
    for m in (model, plain):
        loss = (m(pixels, image_sizes=torch.tensor([[16, 16]]))[0] * upstream).sum().square()
        loss.backward()
        results.append(({"loss": loss}, {name: p.grad for name, p in m.named_parameters()}))
    assert_same_step(*results)
    assert ROPE_NAME in vars(inspect.getmodule(type(plain)))
