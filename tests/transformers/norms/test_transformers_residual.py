# SPDX-License-Identifier: BSD-3-Clause
"""Residual addition and norm in one op: which decoder layers are replaced, and what of a layer stays as it
was."""

import pytest
import torch
from torch import nn

import liger

pytest.importorskip("transformers")

from tiny_models import assert_same_step, batch, make, step, twin

from liger.transformers import patch_report
from liger.transformers.checkpointing import methods
from liger.transformers.norms import residual, residual_trial
from liger.transformers.norms.residual import AddNormRecipe

KIND = "fused_add_rms_norm"


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-6

    def forward(self, x):
        return self.weight * (x.float() * (x.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(
            x.dtype
        )


class Attention(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
        self.seen = []

    def forward(self, hidden_states, **kwargs):
        self.seen.append(kwargs)
        return super().forward(hidden_states), None


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x), torch.ones(2)


class DecoderLayer(nn.Module):
    """The plain form; classes below differ from it in one respect."""

    def __init__(self, mlp=nn.Linear):
        super().__init__()
        self.before, self.after = RMSNorm(), RMSNorm()
        self.attention, self.mlp = Attention(), mlp(16, 16)
        self.scale = 1.0

    def attend(self, x, mask=None, **kwargs):
        return self.attention(hidden_states=self.before(x), mask=mask, **kwargs)[0]

    def forward(self, x, mask=None, **kwargs):
        x = x + self.attend(x, mask=mask, **kwargs)
        return x + self.mlp(self.after(x))


class TupleLayer(DecoderLayer):
    def forward(self, x, mask=None, **kwargs):
        return (super().forward(x, mask, **kwargs),)


class ExpertsLayer(DecoderLayer):
    def forward(self, x, mask=None, **kwargs):
        x = x + self.attend(x, mask=mask, **kwargs)
        update = self.mlp(self.after(x))
        return x + (update[0] if isinstance(update, tuple) else update)


class RowsLayer(DecoderLayer):
    """As Llama 4's, whose experts return rows of tokens."""

    def forward(self, x, mask=None, **kwargs):
        x = x + self.attend(x, mask=mask, **kwargs)
        return x + self.mlp(self.after(x)).view(x.shape)


class Rows(nn.Linear):
    def forward(self, x):
        return super().forward(x).flatten(0, -2)


class FlagLayer(DecoderLayer):
    """As layers of transformers 4, which append the weights of the attention if they are asked to."""

    def forward(self, x, mask=None, output_attentions=False, **kwargs):
        x = x + self.attend(x, mask=mask, output_attentions=output_attentions, **kwargs)
        x = x + self.mlp(self.after(x))
        return (x, "weights") if output_attentions else (x,)


class LayerWithoutFirstNorm(DecoderLayer):
    def forward(self, x, mask=None, **kwargs):
        x = x + self.before(self.attention(x, mask=mask)[0])
        return x + self.mlp(self.after(x))


def run(layer, x, **kwargs):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    output = layer(x, **kwargs)
    output = output[0] if isinstance(output, tuple) else output
    output.square().sum().backward()
    return [output, x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize(
    "make_layer",
    [
        DecoderLayer,
        TupleLayer,
        ExpertsLayer,
        lambda: ExpertsLayer(Router),
        FlagLayer,
        RowsLayer,
        lambda: RowsLayer(Rows),
        LayerWithoutFirstNorm,
    ],
    ids=["plain", "tuple", "experts", "router", "flag", "rows", "flat experts", "without first norm"],
)
def test_layers_that_are_replaced(make_layer, monkeypatch):
    torch.manual_seed(3)
    plain = make_layer()
    layer = liger.patch(nn.ModuleList([twin(plain)]))[0]
    assert patch_report(layer).replaced[""] == KIND
    calls, op = [], residual.fused_add_rms_norm
    monkeypatch.setattr(residual, "fused_add_rms_norm", lambda *args: calls.append(1) or op(*args))
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(run(layer, x, mask=None), run(plain, x, mask=None), rtol=1e-5, atol=1e-5)
    assert calls == [1]


def changed(**members):
    return type("DecoderLayer", (DecoderLayer,), members)


def _scaled(self, x, mask=None, **kwargs):
    x = x + 0.99 * self.attend(x, mask=mask, **kwargs)
    return x + self.mlp(self.after(x))


def _normed_residual(self, x, mask=None, **kwargs):
    x = self.before(x)
    x = x + self.attention(hidden_states=x, mask=mask, **kwargs)[0]
    return x + self.mlp(self.after(x))


def _parallel(self, x, mask=None, **kwargs):
    return x + self.attend(x, mask=mask, **kwargs) + self.mlp(self.after(x))


def _dropping(self, x, mask=None, **kwargs):
    x = x + nn.functional.dropout(self.attend(x, mask=mask, **kwargs), 0.1, self.training)
    return x + self.mlp(self.after(x))


def _looking(self, x, mask=None, **kwargs):
    return DecoderLayer.forward(self, x if mask is None else x * mask, mask, **kwargs)


def _changing(self, x, mask=None, **kwargs):
    return DecoderLayer.forward(self, x, **kwargs, mask="none" if mask is None else mask)


def _detached(self, x, mask=None, **kwargs):
    x = x + self.attend(x, mask=mask, **kwargs)
    return x.detach() + self.mlp(self.after(x))


def _more(self, x, mask=None, **kwargs):
    return DecoderLayer.forward(self, x, mask, **kwargs), x


def _twice(self, x, mask=None, **kwargs):
    return DecoderLayer.forward(self, DecoderLayer.forward(self, x, mask, **kwargs), mask, **kwargs)


def _narrowing(self, x, mask=None, **kwargs):
    x = x + self.attend(x, mask=mask, **kwargs).to(x.dtype)
    return x + self.mlp(self.after(x))


def _clamping(self, x, mask=None, **kwargs):
    return DecoderLayer.forward(self, x, mask, **kwargs).clamp(-9e3, 9e3)


HOSTILE = [
    _scaled, _normed_residual, _parallel, _dropping, _looking, _changing, _detached, _more, _twice, _narrowing,
    _clamping,
]  # fmt: skip


@pytest.mark.parametrize("forward", HOSTILE, ids=lambda f: f.__name__)
def test_layers_that_are_left(forward):
    layer = changed(forward=forward)()
    liger.patch(nn.ModuleList([layer]))
    report = patch_report(layer)
    assert report.left == {"": residual_trial.OTHER_FORM}
    assert set(report.replaced.values()) == {"rms_norm"}


def test_a_layer_that_is_asked_for_more_runs_as_it_is():
    plain = FlagLayer()
    layer = liger.patch(nn.ModuleList([twin(plain)]))[0]
    x = torch.randn(2, 3, 16)
    for flag in (None, False, True):
        ours, theirs = (m(x, output_attentions=flag) for m in (layer, plain))
        assert len(ours) == len(theirs) == (2 if flag else 1)
        torch.testing.assert_close(ours[0], theirs[0])
        assert (
            layer.attention.seen[-1] == plain.attention.seen[-1] == {"mask": None, "output_attentions": flag}
        )


def test_a_layer_with_a_setting_is_tried_with_it():
    """Granite's multiplier of residuals is 1 in most models."""
    modules = [make("Granite", residual_multiplier=m).model.layers[0] for m in (1.0, 0.5)]
    assert isinstance(residual_trial.decoder_layer(modules[0]), AddNormRecipe)
    assert residual_trial.decoder_layer(modules[1]) == residual_trial.OTHER_FORM


def test_arguments_reach_the_attention():
    layer = liger.patch(nn.ModuleList([DecoderLayer()]))[0]
    mask, other, x = object(), object(), torch.randn(2, 3, 16)
    layer(x, mask, other=other)
    layer(mask=mask, x=x)
    assert layer.attention.seen == [{"mask": mask, "other": other}, {"mask": mask}]
    with pytest.raises(TypeError):
        layer()


@pytest.mark.parametrize("where", ["after", "all modules"])
def test_a_hook_of_the_norm_is_called(where):
    plain = DecoderLayer()
    layer, seen = liger.patch(nn.ModuleList([twin(plain)]))[0], []

    def hook(module, args):
        if module is layer.after:
            seen.append(args[0])

    if where == "after":
        handle = layer.after.register_forward_pre_hook(hook)
    else:
        handle = nn.modules.module.register_module_forward_pre_hook(hook)
    x = torch.randn(2, 3, 16)
    try:
        ours = run(layer, x)
    finally:
        handle.remove()
    assert len(seen) == 1
    torch.testing.assert_close(ours, run(plain, x), rtol=1e-5, atol=1e-5)


def test_a_norm_that_was_replaced_later_is_called():
    layer = liger.patch(nn.ModuleList([DecoderLayer()]))[0]
    layer.after = nn.Identity()
    x = torch.randn(2, 3, 16)
    update = layer.attention(layer.before(x))[0]
    torch.testing.assert_close(layer(x), x + update + layer.mlp(x + update))


def test_an_mlp_that_gives_another_dtype_is_added_as_before():
    plain = DecoderLayer()
    layer = liger.patch(nn.ModuleList([twin(plain)]))[0]
    x = torch.randn(2, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), plain(x))
        assert layer(x).dtype == plain(x).dtype


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "Gemma2"])
def test_checkpointing(name, reentrant):
    plain = make(name)
    model = liger.patch(twin(plain))
    assert list(patch_report(model).replaced.values()).count(KIND) == 2
    expected = step(plain, **batch(), use_cache=False)
    methods.enable(model, use_reentrant=reentrant)
    assert_same_step(step(model, **batch(), use_cache=False), expected)
    assert patch_report(liger.patch(model)).replaced["model.layers.0"] == KIND
    assert_same_step(step(model, **batch(), use_cache=False), expected)
    unfused = liger.patch(model, fused_add_rms_norm=False)
    assert KIND not in patch_report(unfused).replaced.values()
    assert_same_step(step(unfused, **batch(), use_cache=False), expected)


def test_equal_layers_share_a_trial_unless_they_look_at_their_submodules(monkeypatch):
    def looking(self, x, mask=None, **kwargs):
        return DecoderLayer.forward(self, x, mask, **kwargs) * self.attention.factor

    trials, run = [], residual_trial._LayerTrial.recipe
    monkeypatch.setattr(residual_trial._LayerTrial, "recipe", lambda self: trials.append(1) or run(self))
    layers = liger.patch(nn.ModuleList(DecoderLayer() for _ in range(3)))
    assert list(patch_report(layers).replaced.values()).count(KIND) == 3
    once = len(trials)
    liger.patch(nn.ModuleList([DecoderLayer()]))
    assert len(trials) == 2 * once
    cls = changed(forward=looking)
    different = nn.ModuleList(cls() for _ in range(2))
    different[0].attention.factor, different[1].attention.factor = 1.0, 2.0
    liger.patch(different)
    assert patch_report(different).replaced["0"] == KIND
    assert patch_report(different).left == {"1": residual_trial.OTHER_FORM}
