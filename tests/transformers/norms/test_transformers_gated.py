# SPDX-License-Identifier: BSD-3-Clause
"""RMS norms with a gate: which are replaced, which are left, and that the models compute the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import assert_same_step, batch, make, step, twin  # noqa: E402

from liger.transformers import patch_report  # noqa: E402
from liger.transformers.norms import gated  # noqa: E402
from liger.transformers.norms.gated import GatedNormRecipe  # noqa: E402

KIND = "rms_norm_gated"


class RMSNormGated(nn.Module):
    """The plain form; classes below differ from it in one respect."""

    activation = staticmethod(F.silu)

    def __init__(self, group_size=None):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(16)), 1e-6
        if group_size is not None:
            self.group_size = group_size

    def norm(self, x):
        rows = x.unflatten(-1, (-1, getattr(self, "group_size", x.shape[-1])))
        return (rows * (rows.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2)

    def forward(self, x, gate=None):
        y = self.norm(x.float()) * self.weight.float()
        return (y if gate is None else y * self.activation(gate.float())).to(x.dtype)


class GateFirst(RMSNormGated):
    def forward(self, x, gate=None):
        wide = x.float() if gate is None else x.float() * self.activation(gate.float())
        return (self.norm(wide) * self.weight.float()).to(x.dtype)


def named(base, **members):
    return type("RMSNormGated", (base,), members)


TAKEN = {
    "norm first": (RMSNormGated, {"norm_before_gate": True, "activation": "silu", "group": None}),
    "gate first": (named(GateFirst), {"norm_before_gate": False, "group": None}),
    "sigmoid": (named(RMSNormGated, activation=staticmethod(torch.sigmoid)), {"activation": "sigmoid"}),
    "groups": (lambda: RMSNormGated(8), {"norm_before_gate": True, "group": "group_size"}),
    "groups, gate first": (lambda: named(GateFirst)(8), {"norm_before_gate": False, "group": "group_size"}),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_that_are_replaced(name, dtype, monkeypatch):
    make_norm, expected = TAKEN[name]
    plain = make_norm().to(dtype)
    model = liger.patch(nn.ModuleList([twin(plain)]))
    assert patch_report(model).replaced == {"0": KIND}
    recipe = type(model[0])._liger_recipe
    assert {field: getattr(recipe, field) for field in expected} == expected
    calls, run = [], GatedNormRecipe.run
    monkeypatch.setattr(GatedNormRecipe, "run", lambda *args: calls.append(1) or run(*args))
    x, gate, upstream = (torch.randn(2, 3, 16).to(dtype) for _ in range(3))
    results = []
    for module in (model[0], plain):
        inputs = x.clone().requires_grad_(), gate.clone().requires_grad_()
        y = module(inputs[0], gate=inputs[1])
        results.append([y, *torch.autograd.grad(y, [*inputs, module.weight], upstream)])
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
    assert calls == [1]
    # Without a gate, or with one of another dtype, the code of the model runs.
    torch.testing.assert_close(model[0](x), plain(x))
    torch.testing.assert_close(model[0](x, gate.double()), plain(x, gate.double()))
    assert calls == [1]
    assert not patch_report(liger.patch(nn.ModuleList([nn.LayerNorm(16), plain]), rms_norm_gated=False)).left


def other_in_mixed(self, x, gate=None):
    y = RMSNormGated.forward(self, x, gate)
    return y if self.weight.dtype == x.dtype else 2 * y


@pytest.mark.parametrize("name", [*TAKEN, "another result"])
def test_activations_of_16_bits_beside_a_weight_in_float32(name, monkeypatch):
    """As under autocast."""
    taken = name in TAKEN
    plain = TAKEN[name][0]() if taken else named(RMSNormGated, forward=other_in_mixed)()
    model = liger.patch(nn.ModuleList([twin(plain)]))[0]
    calls, run = [], GatedNormRecipe.run
    monkeypatch.setattr(GatedNormRecipe, "run", lambda *args: calls.append(1) or run(*args))
    x, gate, upstream = (torch.randn(2, 3, 16).bfloat16() for _ in range(3))
    results = []
    for module in (model, plain):
        inputs = x.clone().requires_grad_(), gate.clone().requires_grad_()
        y = module(*inputs)
        results.append([y, *torch.autograd.grad(y, [*inputs, module.weight], upstream)])
    assert len(calls) == taken
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def _clamped(self, x, gate):
    return RMSNormGated.forward(self, x, gate.clamp(-50, 50))


def _dropping(self, x, gate):
    return F.dropout(RMSNormGated.forward(self, x, gate), 0.1, self.training)


def _stopped(self, x, gate):
    return RMSNormGated.forward(self, x, gate.detach())


def _shifted(self, x, gate):
    return RMSNormGated.forward(self, x, gate + 1e-3)


@pytest.mark.parametrize("forward", [_clamped, _dropping, _stopped, _shifted], ids=lambda f: f.__name__)
def test_norms_that_are_left(forward):
    assert isinstance(gated.gated_norm(named(RMSNormGated, forward=forward)()), str)


HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
ARCHITECTURES = {
    "Qwen3Next": (
        {
            **HYBRID,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        1,
    ),
    "FalconH1": ({**MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False}, 2),
    "Mamba2": (
        {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
        2,
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients(name):
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this transformers has no {name}")
    settings, count = ARCHITECTURES[name]
    plain = make(name, **settings)
    model = liger.patch(twin(plain))
    assert list(patch_report(model).replaced.values()).count(KIND) == count
    assert_same_step(step(model, **batch(), use_cache=False), step(plain, **batch(), use_cache=False))
    liger.unpatch(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
