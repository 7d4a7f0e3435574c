# SPDX-License-Identifier: BSD-3-Clause
"""Norms and activations: what a trial takes, what it leaves, and that the replacement computes the same."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import liger

pytest.importorskip("transformers")

from liger.transformers import patch_report
from liger.transformers.mlp import activations
from liger.transformers.norms import norm


class RMSNorm(nn.Module):
    """The plain form; classes below differ from it in one respect."""

    offset, exponent = 0.0, -0.5

    def __init__(self, weighted=True, eps=1e-6):
        super().__init__()
        self.eps = eps
        if weighted:
            self.weight = nn.Parameter(torch.randn(16))

    def scaled(self, y, x):
        weight = getattr(self, "weight", None)
        return (y if weight is None else y * (self.offset + weight.float())).to(x.dtype)

    def forward(self, x):
        wide = x.float()
        return self.scaled(wide * (wide.square().mean(-1, keepdim=True) + self.eps) ** self.exponent, x)


class ZeroCentredRMSNorm(RMSNorm):
    offset = 1.0


class UnusedWeightRMSNorm(RMSNorm):
    def __init__(self):
        super().__init__(weighted=False)
        self.weight = nn.Buffer(torch.randn(16))

    def scaled(self, y, x):
        return y.to(x.dtype)


class LayerNorm(nn.Module):
    """Without an attribute for eps, as in OLMo; parameters are optional."""

    literal = 1e-5

    def __init__(self, weight=None, bias=None):
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(torch.randn(16))
        self.bias = None if bias is None else nn.Parameter(torch.randn(16))

    def forward(self, x):
        y = F.layer_norm(x.float(), (16,), None, None, self.literal)
        y = y if self.weight is None else y * self.weight.float()
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


class LayerNorm1P(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


def randomised(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


TAKEN = {
    "rms": (RMSNorm, "rms_norm"),
    "weightless rms": (lambda: RMSNorm(weighted=False), "rms_norm"),
    "zero-centred rms": (ZeroCentredRMSNorm, "rms_norm"),
    "rms with an unused weight": (UnusedWeightRMSNorm, "rms_norm"),
    "torch rms": (lambda: nn.RMSNorm(16, eps=1e-5), "rms_norm"),
    "torch rms with the eps of float32": (lambda: nn.RMSNorm(16), "rms_norm"),
    "torch": (lambda: nn.LayerNorm(16), "layer_norm"),
    "torch without bias": (lambda: nn.LayerNorm(16, bias=False), "layer_norm"),
    "torch without weight": (lambda: nn.LayerNorm(16, elementwise_affine=False), "layer_norm"),
    "literal eps": (LayerNorm, "layer_norm"),
    "literal eps, weight, bias": (lambda: LayerNorm(True, True), "layer_norm"),
    "weight around zero": (lambda: LayerNorm1P(16), "layer_norm"),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_that_are_replaced(name, dtype, monkeypatch):
    make, kind = TAKEN[name]
    torch.manual_seed(2)
    plain = randomised(make()).to(dtype)
    reference = torch.nn.Module.__new__(type(plain))
    reference.__dict__.update(plain.__dict__)
    model = liger.patch(nn.ModuleList([plain]))
    assert patch_report(model).replaced == {"0": kind}
    calls, run = [], norm.NormRecipe.run
    monkeypatch.setattr(norm.NormRecipe, "run", lambda *args: calls.append(1) or run(*args))
    results = []
    for module in (model[0], reference):
        for shape in ((3, 16), (2, 3, 16), (2, 2, 3, 16)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
            y = module(x)
            upstream = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
            results.append(
                [y, *torch.autograd.grad(y, [x, *module.parameters()], upstream, allow_unused=True)]
            )
    assert len(calls) == 3
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, theirs in zip(results[:3], results[3:], strict=True):
        assert ours[0].dtype == theirs[0].dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    liger.unpatch(model)
    assert type(model[0]) is type(reference)


def hostile(base, **members):
    return type(base.__name__, (base,), members)


def _training_only(self, x):
    return LayerNorm.forward(self, x) * (1.001 if self.training else 1.0)


def _detached(self, x):
    scale = (x.float().square().mean(-1, keepdim=True) + self.eps).rsqrt().detach()
    return self.scaled(x.float() * scale, x)


def _by_dimensions(self, x):
    return LayerNorm.forward(self, x) if x.dim() == 3 else x


LEFT = {
    "eps outside": hostile(
        RMSNorm,
        forward=lambda s, x: s.scaled(x.float() / (x.float().square().mean(-1, True).sqrt() + s.eps), x),
    ),
    "clamp": hostile(RMSNorm, forward=lambda s, x: RMSNorm.forward(s, x.clamp(-9e3, 9e3))),
    "another exponent": hostile(RMSNorm, exponent=-0.501),
    "offset 2": hostile(RMSNorm, offset=2.0),
    "stopped gradient": hostile(RMSNorm, forward=_detached),
    "another literal": hostile(LayerNorm, literal=3e-6),
    "unbiased variance": hostile(
        LayerNorm, forward=lambda s, x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()
    ),
    "in training": hostile(LayerNorm, forward=_training_only),
    "number of dimensions": hostile(LayerNorm, forward=_by_dimensions),
    "second output": hostile(LayerNorm, forward=lambda s, x: (LayerNorm.forward(s, x), None)),
    "two dimensions": lambda: nn.LayerNorm((4, 16)),
    "another dimension": hostile(
        LayerNorm, forward=lambda s, x: F.layer_norm(x.transpose(-1, -2), x.shape[-2:-1]).transpose(-1, -2)
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_norms_that_are_left(name):
    module = LEFT[name]()
    assert isinstance(norm.norm(module), str)
    with pytest.raises(ValueError, match=r"left 1 as before: .*; looked for rope, rms_norm, rms_norm_gated,"):
        liger.patch(nn.ModuleList([module]))


class WideningRMSNorm(RMSNorm):
    """As Llama's: the weight in float32 makes the result float32."""

    def scaled(self, y, x):
        return self.weight * y.to(x.dtype)


class OtherInMixedRMSNorm(RMSNorm):
    def scaled(self, y, x):
        return super().scaled(y, x) * (1 if self.weight.dtype == x.dtype else 2)


MIXED = {"narrow": RMSNorm, "narrow, zero-centred": ZeroCentredRMSNorm, "wide": WideningRMSNorm}
MIXED["layer norm"] = functools.partial(LayerNorm, True, True)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_activations_of_16_bits_beside_a_weight_in_float32(name, dtype, monkeypatch):
    """As under autocast: the result has the dtype that the code of the model gives."""
    torch.manual_seed(2)
    plain = MIXED[name]()
    model = liger.patch(nn.ModuleList([copy.deepcopy(plain)]))[0]
    calls, run = [], norm.NormRecipe.run
    monkeypatch.setattr(norm.NormRecipe, "run", lambda *args: calls.append(1) or run(*args))
    x, upstream = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    results = []
    for module in (model, plain):
        leaf = x.to(dtype).requires_grad_()
        y = module(leaf)
        results.append([y, *torch.autograd.grad(y, [leaf, *module.parameters()], upstream.to(y.dtype))])
    assert len(calls) == 1
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_a_weight_of_another_dtype_keeps_the_code_of_the_model():
    """Where the op does not give its result. A layer norm of torch returns the wider dtype in autocast."""
    plain = nn.ModuleList([OtherInMixedRMSNorm(), nn.LayerNorm(16)])
    model = liger.patch(copy.deepcopy(plain))
    x = torch.randn(2, 3, 16, dtype=torch.bfloat16)
    assert torch.equal(model[0](x), plain[0](x))
    assert model[1](x).dtype == plain[1](x).dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert model[1](x).dtype == plain[1](x).dtype
    wide = copy.deepcopy(model[0]).to(torch.bfloat16)
    assert torch.equal(wide(x.float()), OtherInMixedRMSNorm.forward(wide, x.float()))


def test_a_weight_that_was_partitioned_during_the_trial():
    """ZeRO-3 leaves an empty vector of a weight of any shape; it is gathered for the forward."""
    module = RMSNorm()
    shape = nn.Parameter(torch.randn(4, 16))
    module.weight = nn.Parameter(torch.empty(0))
    model = liger.patch(nn.ModuleList([module]))
    assert patch_report(model).replaced == {"0": "rms_norm"}
    module.weight = shape
    plain = RMSNorm()
    plain.weight = shape
    x = torch.randn(2, 4, 16)
    torch.testing.assert_close(model[0](x), plain(x))


class SquaredReLU(nn.Module):
    def forward(self, x):
        return F.relu(x) ** 2


class GELUWrittenOut(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("cls", "kind"), [(SquaredReLU, "relu_squared"), (GELUWrittenOut, "gelu")])
def test_activations_that_are_replaced(cls, kind):
    model = liger.patch(nn.ModuleList([cls()]), rope=False)
    assert patch_report(model).replaced == {"0": kind}
    x = torch.randn(5, 7, requires_grad=True)
    ours, theirs = model[0](x), cls()(x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)))
    assert model[0](torch.ones(2, dtype=torch.int64)).dtype == cls()(torch.ones(2, dtype=torch.int64)).dtype
    off = liger.patch(model, **{kind: False, "rope": False, "layer_norm": True}, **COMMON_OFF)
    assert not patch_report(off).replaced


COMMON_OFF = dict.fromkeys(("rms_norm", "swiglu", "geglu", "fused_linear_cross_entropy"), False)

HOSTILE_ACTIVATIONS = {
    "leaky": hostile(SquaredReLU, forward=lambda s, x: F.leaky_relu(x, 1e-2) ** 2),
    "clamped": hostile(SquaredReLU, forward=lambda s, x: F.relu(x).clamp(max=9e3) ** 2),
    "noisy": hostile(
        SquaredReLU, forward=lambda s, x: F.relu(x) ** 2 + (torch.rand_like(x) if s.training else 0)
    ),
    "stopped": hostile(SquaredReLU, forward=lambda s, x: F.relu(x) * F.relu(x).detach()),
    "sigmoid": hostile(GELUWrittenOut, forward=lambda s, x: x * torch.sigmoid(1.702 * x)),
}


@pytest.mark.parametrize("name", HOSTILE_ACTIVATIONS)
def test_activations_that_are_left(name):
    assert isinstance(activations.activation(HOSTILE_ACTIVATIONS[name](), ("relu_squared", "gelu")), str)


def test_gelu_of_torch_is_not_looked_at():
    model = liger.patch(nn.ModuleList([nn.GELU(), nn.LayerNorm(16)]))
    report = patch_report(model)
    assert report.not_looked_at == {"0": "GELU of torch"}
    assert "torch computes it in one kernel" in str(report)
