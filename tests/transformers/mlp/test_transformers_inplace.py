# SPDX-License-Identifier: BSD-3-Clause
"""Patched MLPs overwrite the outputs of their projections in the backward, unless something else reads
them."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import assert_same_step, batch, make, step, twin  # noqa: E402

from liger._core.modules.linear_layers import caller_owns_output  # noqa: E402
from liger.ops import gated  # noqa: E402
from liger.transformers.recipe import reuse  # noqa: E402


@pytest.fixture
def writes(monkeypatch):
    """One entry for each backward of an activation that overwrites gate and up."""
    seen = []

    def watch(form):
        write = form.backward_op_

        def watched(grad_out, *inputs):
            seen.append(form.name)
            return write(grad_out, *inputs)

        monkeypatch.setattr(form, "backward_op_", watched)

    for form in (value for value in vars(liger.ops.swiglu).values() if isinstance(value, gated._Form)):
        watch(form)
    return seen


class Ending(nn.Module):
    """A linear layer and then an operation, which saves its own output."""

    def __init__(self, layer, operation):
        super().__init__()
        self.layer, self.operation = layer, operation

    def forward(self, x):
        return self.operation(self.layer(x))


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_a_projection_whose_backward_reads_its_output(name, writes):
    plain = make("llama")
    for layer in plain.model.layers:
        setattr(layer.mlp, name, Ending(getattr(layer.mlp, name), torch.sigmoid))
    assert_same_step(step(liger.patch(twin(plain)), **batch()), step(plain, **batch()))
    assert not writes


def test_a_forward_of_the_instance_that_saves_its_output(writes):
    plain = make("llama")
    models = plain, liger.patch(twin(plain))
    for model in models:
        for layer in model.model.layers:
            gate = layer.mlp.gate_proj
            gate.forward = lambda x, gate=gate: type(gate).forward(gate, x).tanh()
    assert_same_step(step(models[1], **batch()), step(models[0], **batch()))
    assert not writes


def kept_outputs(model, register):
    """The tensors that a hook keeps in a forward, and copies of them from before the backward."""
    kept = []
    handle = register(lambda module, args, output: kept.append(output))
    loss = model(**batch()).loss
    handle.remove()
    kept = [t for t in kept if isinstance(t, torch.Tensor)]
    copies = [t.detach().clone() for t in kept]
    loss.backward()
    return kept, copies


def assert_unchanged(kept, copies):
    assert kept and all(map(torch.equal, kept, copies))


def test_outputs_that_a_global_hook_keeps(writes):
    model = liger.patch(make("llama"))
    assert_unchanged(*kept_outputs(model, register_module_forward_hook))
    assert not writes
    step(model, **batch())
    assert writes == ["swiglu"] * 2


def test_inputs_that_a_global_hook_keeps(monkeypatch):
    """The product is the input of down_proj."""
    monkeypatch.setattr(reuse, "WORTH_REUSING", 0)
    model, kept = liger.patch(make("llama")), []
    last = [layer.mlp.down_proj for layer in model.model.layers]
    handle = register_module_forward_pre_hook(
        lambda module, args: kept.append(args[0]) if module in last else None
    )
    loss = model(**batch()).loss
    handle.remove()
    copies = [x.detach().clone() for x in kept]
    loss.backward()
    assert len(kept) == 2
    assert_unchanged(kept, copies)


LORA = {"target_modules": ["gate_proj", "up_proj"], "init_lora_weights": False}


@pytest.mark.parametrize("state", ["active", "merged", "disabled"])
def test_outputs_of_the_base_layer_of_an_adapter(state, writes):
    peft = pytest.importorskip("peft")
    model = liger.patch(peft.get_peft_model(make("llama"), peft.LoraConfig(**LORA)))
    model.requires_grad_(True)
    if state == "merged":
        model.merge_adapter()
    with model.disable_adapter() if state == "disabled" else contextlib.nullcontext():
        model.requires_grad_(True)
        step(model, **batch())
        assert writes == ["swiglu"] * 2
        writes.clear()
        base = model.base_model.model.model.layers[0].mlp.gate_proj.base_layer
        assert_unchanged(*kept_outputs(model, base.register_forward_hook))
        assert writes == ["swiglu"]  # of the other layer


@pytest.mark.parametrize("kind", ["LoraConfig", "IA3Config", "LoHaConfig"])
def test_adapters_save_no_output(kind, writes):
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["gate_proj", "up_proj"]}
    if kind == "IA3Config":
        options["feedforward_modules"] = []
    models = []
    for patch in (lambda model: model, lambda model: liger.patch(model, lora_linear=False)):
        torch.manual_seed(5)
        models.append(patch(peft.get_peft_model(make("llama"), getattr(peft, kind)(**options))))
    assert_same_step(step(models[1], **batch()), step(models[0], **batch()))
    assert writes == ["swiglu"] * 2


def test_which_outputs_belong_to_the_caller():
    class Custom(nn.Linear):
        def forward(self, x):
            return super().forward(x).sigmoid()

    class Derived(nn.Linear):
        pass

    assert caller_owns_output(nn.Linear(3, 4)) and caller_owns_output(Derived(3, 4))
    for layer in (Custom(3, 4), nn.Identity(), nn.Sequential(nn.Linear(3, 4)), torch.nn.Bilinear(3, 3, 4)):
        assert not caller_owns_output(layer)
    layer = nn.Linear(3, 4)
    layer.register_forward_pre_hook(lambda module, args: None)
    layer.register_full_backward_hook(lambda module, inputs, outputs: None)
    assert caller_owns_output(layer)
    handle = layer.register_forward_hook(lambda module, args, output: None)
    assert not caller_owns_output(layer)
    handle.remove()
    assert caller_owns_output(layer)


def test_hooks_of_accelerate():
    hooks = pytest.importorskip("accelerate.hooks")
    layer = nn.Linear(3, 4)
    hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu"))
    assert caller_owns_output(layer)
    hooks.remove_hook_from_module(layer)
    assert caller_owns_output(layer)
    hooks.add_hook_to_module(layer, hooks.ModelHook())
    assert not caller_owns_output(layer)
