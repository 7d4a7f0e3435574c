# SPDX-License-Identifier: BSD-3-Clause
"""liger.nn.TiledSwiGLUMLP and TiledGEGLUMLP."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger
import liger.nn


def config(**changes):
    return SimpleNamespace(**{"hidden_size": 16, "intermediate_size": 24, "hidden_act": "silu"} | changes)


MODULES = [
    (liger.nn.TiledSwiGLUMLP, config(), F.silu),
    (liger.nn.TiledSwiGLUMLP, config(mlp_bias=True), F.silu),
    (liger.nn.TiledGEGLUMLP, config(hidden_act="gelu"), F.gelu),
    (
        liger.nn.TiledGEGLUMLP,
        config(hidden_act="gelu", hidden_activation="gelu_pytorch_tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
]


@pytest.mark.parametrize(
    ("kind", "settings", "activation"), MODULES, ids=["silu", "bias", "gelu", "gelu_tanh"]
)
@pytest.mark.parametrize("num_shards", [None, 1, 3, 100])
def test_modules(device, kind, settings, activation, num_shards):
    module = kind.from_config(settings, num_shards=num_shards, device=device)
    x = torch.randn(2, 7, 16, device=device, requires_grad=True)
    y = module(x)
    expected = module.down_proj(activation(module.gate_proj(x)) * module.up_proj(x))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    wanted = [x, *module.parameters()]
    assert len(wanted) == (7 if hasattr(settings, "mlp_bias") else 4)
    for a, b in zip(torch.autograd.grad(y, wanted, y), torch.autograd.grad(expected, wanted, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_modules_take_the_state_of_hugging_face_ones():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP

    settings = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, mlp_bias=True, num_attention_heads=2
    )
    theirs, ours = LlamaMLP(settings), liger.nn.TiledSwiGLUMLP.from_config(settings, num_shards=2)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 16)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_modules_with_projections_that_are_not_plain(device, activation):
    """LoRA layers of PEFT, whose weight is the weight of the layer below them: the adapters must take
    part."""

    class Adapted(nn.Linear):
        def __init__(self, base):
            super().__init__(base.in_features, base.out_features, bias=False, device=device)
            self.weight = base.weight
            self.delta = nn.Parameter(torch.randn_like(base.weight))

        def forward(self, x):
            return F.linear(x, self.weight + self.delta)

    kind = liger.nn.TiledSwiGLUMLP if activation == "silu" else liger.nn.TiledGEGLUMLP
    module = kind.from_config(config(hidden_act=activation), num_shards=3, device=device)
    module.up_proj = Adapted(module.up_proj)
    function = {"silu": F.silu, "gelu": F.gelu}.get(activation, lambda x: F.gelu(x, approximate="tanh"))
    x = torch.randn(2, 5, 16, device=device, requires_grad=True)
    expected = module.down_proj(function(module.gate_proj(x)) * module.up_proj(x))
    y = module(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    wanted = [x, *module.parameters()]
    for a, b in zip(torch.autograd.grad(y, wanted, y), torch.autograd.grad(expected, wanted, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_pre_hook"])
def test_modules_whose_projections_have_hooks(device, register):
    """They are called, with one shard of tokens each time."""
    module = liger.nn.TiledSwiGLUMLP(16, 24, num_shards=3, device=device)
    x, rows = torch.randn(2, 5, 16, device=device, requires_grad=True), []
    wanted, upstream = [x, *module.parameters()], torch.randn_like(x)
    expected = torch.autograd.grad(module(x), wanted, upstream)

    def hook(module, values, output=None):
        rows.append((values[0] if output is None else output).shape[:-1].numel())

    handle = getattr(module.up_proj, register)(hook)
    found = torch.autograd.grad(module(x), wanted, upstream)
    # A forward runs again in the backward.
    assert rows == [4, 4, 2] * (2 if register == "register_forward_hook" else 1)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    handle.remove()
    rows.clear()
    module(x)
    assert not rows


def test_modules_with_a_projection_that_has_no_weight(device):
    module = liger.nn.TiledSwiGLUMLP(16, 24, num_shards=3, device=device)
    x = torch.randn(2, 5, 16, device=device)
    expected = module(x)
    module.gate_proj = nn.Sequential(module.gate_proj)
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


def test_modules_refuse_another_activation():
    with pytest.raises(
        ValueError, match="TiledSwiGLUMLP: the activation of the configuration is 'gelu', expected"
    ):
        liger.nn.TiledSwiGLUMLP.from_config(config(hidden_act="gelu"))
    with pytest.raises(
        ValueError, match="TiledGEGLUMLP: the activation of the configuration is 'silu', expected"
    ):
        liger.nn.TiledGEGLUMLP.from_config(config())
    with pytest.raises(
        ValueError, match="TiledSwiGLUMLP: num_shards is 0, expected a positive integer or None"
    ):
        liger.nn.TiledSwiGLUMLP.from_config(config(), num_shards=0)
