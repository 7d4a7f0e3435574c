# SPDX-License-Identifier: BSD-3-Clause
"""LoRA layers that share an input are one node within a call of their module, and each its own outside."""

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import liger

pytest.importorskip("transformers")
pytest.importorskip("peft")

from test_lora_layers import HIDDEN, LINEAR, ROWS, assert_same, layer_of, pair, x_of
from tiny_models import batch, enable_checkpointing

import liger.transformers as lt
from liger.transformers.lora.recipe import group_layers


class Heads(nn.Module):
    """What an attention does before its kernel; ``between`` runs after the first projection."""

    def __init__(self, attention, between=None):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.between = between

    def forward(self, x):
        q = self.q_proj(x)
        if self.between is not None:
            self.between(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        return q, k, v


def heads_of(model, between=None):
    heads = Heads(layer_of(model).self_attn, between)
    group_layers(heads)
    return heads


def by_hand(attention, x):
    return [getattr(attention, name)(x) for name in LINEAR[:3]]


def test_one_node_for_q_k_and_v():
    ours, theirs = pair()
    x = x_of(torch.float32)
    q, k, v = heads_of(ours)(x)
    assert q.grad_fn is k.grad_fn is v.grad_fn
    torch.testing.assert_close([q, k, v], by_hand(layer_of(theirs).self_attn, x))


def test_one_node_in_each_attention_of_a_model():
    ours, _ = pair()
    attention, nodes = layer_of(ours).self_attn, []
    for name in LINEAR[:3]:
        getattr(attention, name).register_forward_hook(lambda _, args, y: nodes.append(y.grad_fn))
    ours(**batch())
    assert len(nodes) == 3 and nodes[0] is nodes[1] is nodes[2]


@pytest.mark.parametrize("name", ["mul_", "clone"])
def test_another_input_within_the_call(name):
    def between(x):
        with torch.no_grad():
            x.mul_(2)

    class Copied(Heads):
        def forward(self, x):
            q = self.q_proj(x)
            return q, self.k_proj(x), self.v_proj(x.clone())

    results, x = [], torch.randn(1, ROWS, HIDDEN)
    for model in pair():
        heads = heads_of(model, between) if name == "mul_" else Copied(layer_of(model).self_attn)
        group_layers(heads)
        results.append(heads(x.clone()))
    torch.testing.assert_close(*results)
    if name == "clone":
        q, k, v = results[0]
        assert q.grad_fn is k.grad_fn is not v.grad_fn


def test_an_output_without_a_gradient():
    results = []
    for model in pair():
        torch.manual_seed(2)
        x = x_of(torch.float32)
        q, _, v = heads_of(model)(x)
        (q.square().sum() + v.sum()).backward()
        results.append((x.grad, layer_of(model).self_attn.q_proj.lora_A["default"].weight.grad))
    torch.testing.assert_close(*results)


# --- calls by hand ------------------------------------------------------------------------------------------


def disabled(model):
    return model.disable_adapter()


@contextlib.contextmanager
def merged(model):
    model.merge_adapter()
    yield
    model.unmerge_adapter()


@contextlib.contextmanager
def stepped(model):
    with torch.no_grad():
        for parameter in layer_of(model).self_attn.k_proj.parameters():
            parameter.mul_(3)
    yield


@contextlib.contextmanager
def without_grad(model):
    with torch.no_grad():
        yield


@contextlib.contextmanager
def inference(model):
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("change", [disabled, merged, stepped, without_grad, inference])
def test_a_change_between_the_calls_of_q_and_k(change):
    results, x = [], x_of(torch.float32)
    for model in pair():
        attention = layer_of(model).self_attn
        attention.q_proj(x)
        with change(model):
            k = attention.k_proj(x)
        results.append((k.detach().clone(), k.requires_grad))
    assert results[0][1] == results[1][1]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)


def test_grad_after_no_grad():
    attention, x = layer_of(pair()[0]).self_attn, torch.randn(1, ROWS, HIDDEN)
    with torch.no_grad():
        attention.q_proj(x)
    assert attention.k_proj(x).requires_grad


def test_a_backward_between_the_calls_of_q_and_k():
    attention, x = layer_of(pair()[0]).self_attn, x_of(torch.float32)
    attention.q_proj(x).sum().backward()
    attention.k_proj(x).sum().backward()
    assert all(p.grad is not None for p in attention.k_proj.parameters() if p.requires_grad)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_after_a_call(fails):
    class Stop(Exception):
        pass

    def between(x):
        if fails:
            raise Stop

    ours, _ = pair()
    heads = heads_of(ours, between)
    x = x_of(torch.float32)
    with pytest.raises(Stop) if fails else contextlib.nullcontext():
        heads(x)
    layer_of(ours).self_attn.q_proj(x)
    reference = weakref.ref(x)
    del x
    gc.collect()
    assert reference() is None


# --- the rest of a program ----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["forward", "generate"])
def test_inference_mode(function):
    results = []
    for model in pair(target_modules=["q_proj", "k_proj", "v_proj", "up_proj", "gate_proj"]):
        model.eval()
        ids = batch()["input_ids"]
        with torch.inference_mode():
            if function == "forward":
                results.append(model(input_ids=ids).logits)
            else:
                results.append(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    twins = pair(lora_dropout=0.3)
    for model in twins:
        model.enable_input_require_grads()
        enable_checkpointing(model, reentrant)
    assert_same(*twins)


def test_compiled_without_a_break():
    ours, theirs = pair(options={"rope": False})
    torch._dynamo.reset()
    attention = torch.compile(heads_of(ours), backend="aot_eager", fullgraph=True)
    x = x_of(torch.float32)
    torch.testing.assert_close(list(attention(x)), by_hand(layer_of(theirs).self_attn, x))


def test_an_attention_that_is_not_patched_otherwise():
    ours, theirs = pair(options={"rope": False})
    attention = layer_of(ours).self_attn
    report = lt.patch_report(ours)
    (name,) = (n for n in report.not_asked_for if n.endswith("layers.0.self_attn"))
    assert report.not_asked_for[name] == "rope"
    for model in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same(model, theirs)
        nodes = []
        for layer in by_name(layer_of(model).self_attn):
            layer.register_forward_hook(lambda _, args, y, nodes=nodes: nodes.append(y.grad_fn))
        model(**batch())
        assert len(set(nodes)) == 1
    liger.unpatch(ours)
    assert type(attention) is type(layer_of(theirs).self_attn) and "_liger_groups" not in attention.__dict__


def by_name(attention):
    return [getattr(attention, name) for name in LINEAR[:3]]
