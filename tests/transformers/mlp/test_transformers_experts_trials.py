# SPDX-License-Identifier: BSD-3-Clause
"""Which experts are recognised by trial, and which are left alone."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")

from liger.transformers.mlp import experts  # noqa: E402

if not hasattr(moe, "use_experts_implementation"):
    pytest.skip("this transformers has every expert as a module of its own", allow_module_level=True)

ALL = ("silu", "gelu_tanh", "gelu")


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


class StoppedActivation(Experts):
    def gated(self, gate, up):
        return self.act_fn(gate).detach() * up


class StoppedWeights(Experts):
    def scaled(self, out, weights):
        return out * weights.detach()


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
        recipe = experts.experts(Experts(act_fn), ALL)
        assert (recipe.activation, recipe.limit, recipe.is_interleaved) == (activation, None, False)
    assert experts.experts(ClampedInputs(), ALL).limit == 10.0


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        (ClampedActivation, "an activation that liger has"),
        (Threshold, "an activation that liger has"),
        (PositiveWeights, "an activation that liger has"),
        (Unweighted, "an activation that liger has"),
        (OneMoreExpert, "an activation that liger has"),
        (lambda: Experts(nn.ReLU()), "an activation that liger has"),
        (StoppedActivation, "its gradients differ from the op's"),
        (StoppedWeights, "its gradients differ from the op's"),
        (Dropout, "in training it computes something else"),
        (OwnWeight, "other parameters than two projections"),
        (lambda: Experts(layout=(10, 8)), "its projections do not have the shapes"),
    ],
)
def test_variants_are_left_alone(variant, reason):
    assert reason in experts.experts(variant(), ALL)


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
    recipe = experts.experts(getattr(modeling, name)(Config()), ALL)
    found = (recipe.activation, recipe.is_transposed, recipe.is_interleaved, recipe.limit is not None)
    assert found == CLASSES[module, name]
