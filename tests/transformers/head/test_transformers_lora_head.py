# SPDX-License-Identifier: BSD-3-Clause
"""LoRA on the lm_head: the adapters and the weight train through the fused loss."""

import copy

import pytest
import torch

import liger

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from live_bytes import LiveBytes  # noqa: E402
from tiny_models import VOCAB, assert_same_step, batch, make, step  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.head.lora import low_rank_ce  # noqa: E402
from liger.transformers.head.loss_call import warn_about_head  # noqa: E402


def adapted(model, **settings):
    """The model with adapters whose B is not zero, the same at every call."""
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "lm_head"], init_lora_weights=False, **settings
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return peft.get_peft_model(model, config)


def both_steps(ours, theirs, **inputs):
    results = []
    for model in (ours, theirs):
        torch.manual_seed(4)
        results.append(step(model, **{**batch(), **inputs}))
    return results


SETTINGS = [
    {}, {"lora_dropout": 0.3}, {"use_rslora": True}, {"lora_bias": True}, {"bias": "lora_only"},
]  # fmt: skip


@pytest.mark.parametrize("order", ["patch first", "patch last"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
def test_adapters_train_without_logits(settings, order):
    plain = adapted(make("llama"), **settings)
    if order == "patch first":
        model = adapted(liger.patch(make("llama")), **settings)
    else:
        model = liger.patch(copy.deepcopy(plain))
    ours, theirs = both_steps(model, plain, num_items_in_batch=9)
    assert ours[0].logits is None
    assert sum("lm_head.lora" in name for name in ours[1]) == 2 + ("lora_bias" in settings)
    assert_same_step(ours, theirs)
    # A layer whose adapter has a bias is PEFT's; the loss takes such a head.
    assert not any(name.endswith("lm_head") or not name for name in lt.patch_report(model).left)


def test_a_weight_that_trains_and_a_bias():
    plain = make("llama")
    plain.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB))
    plain = adapted(plain)
    plain.base_model.model.lm_head.base_layer.requires_grad_(True)
    model = liger.patch(copy.deepcopy(plain))
    ours, theirs = both_steps(model, plain)
    assert ours[0].logits is None
    trained = {name.rpartition("lm_head.")[2] for name in ours[1] if "lm_head" in name}
    assert trained == {
        "base_layer.weight",
        "base_layer.bias",
        "lora_A.default.weight",
        "lora_B.default.weight",
    }
    assert_same_step(ours, theirs)


@pytest.mark.parametrize("family", ["Gemma2", "Granite"])
def test_softcap_and_scale_reach_the_adapters(family):
    settings = {"logits_scaling": 3.0} if family == "Granite" else {"final_logit_softcapping": 5.0}
    plain = adapted(make(family, **settings))
    model = liger.patch(copy.deepcopy(plain))
    ours, theirs = both_steps(model, plain)
    assert ours[0].logits is None
    assert_same_step(ours, theirs)


def test_two_adapters_and_none():
    plain = adapted(make("llama"))
    plain.add_adapter("second", peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    plain.base_model.set_adapter(["default", "second"])
    model = liger.patch(copy.deepcopy(plain))
    ours, theirs = both_steps(model, plain)
    assert ours[0].logits is None
    assert_same_step(ours, theirs)
    with model.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss)
    torch.testing.assert_close(model.eval()(**batch()).logits, plain.eval()(**batch()).logits)


def test_merged_adapters():
    plain = adapted(make("llama"))
    model = liger.patch(copy.deepcopy(plain))
    expected = plain(**batch()).loss
    torch.testing.assert_close(model.merge_adapter() or model(**batch()).loss, expected)
    model.unmerge_adapter()
    torch.testing.assert_close(model.merge_and_unload()(**batch()).loss, expected)


def test_dora_is_computed_from_full_logits(caplog):
    warn_about_head.cache_clear()  # the reason is logged once
    plain = adapted(make("llama"), use_dora=True)
    model = liger.patch(copy.deepcopy(plain))
    assert "full logits" in " ".join(lt.patch_report(model).left.values())
    first = adapted(liger.patch(make("llama")), use_dora=True)
    for m in (model, first):
        ours, theirs = both_steps(m, plain)
        assert_same_step(ours, theirs)
    assert "the loss is computed from full logits" in caplog.text


@pytest.mark.parametrize("need_weight", [False, True])
@pytest.mark.parametrize("budget", [None, 2048])
def test_gradients_against_float64(need_weight, budget):
    """In several chunks and in one."""
    shapes = [(37, 16), (50, 16), (37, 3), (50, 3), (50,)]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    target = torch.randint(50, (37,))
    target[5:9] = -100
    for t in tensors:
        t.requires_grad_(need_weight or t is not tensors[1])
    x, weight, down, up, bias = tensors
    logits = 3 * torch.tanh((x @ weight.T + down @ up.T + bias) / 3)
    expected = torch.nn.functional.cross_entropy(logits, target, reduction="sum") / 7
    wanted = torch.autograd.grad(2 * expected, [t for t in tensors if t.requires_grad])
    narrow = [t.detach().float().requires_grad_(t.requires_grad) for t in tensors]
    x, weight, down, up, bias = narrow
    loss = low_rank_ce(x, weight, down, up, target, bias, 7, softcap=3.0, memory_budget=budget)
    found = torch.autograd.grad(2 * loss, [t for t in narrow if t.requires_grad], retain_graph=True)
    again = torch.autograd.grad(2 * loss, [t for t in narrow if t.requires_grad])
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for ours, repeated, theirs in zip(found, again, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
        assert torch.equal(ours, repeated)


def test_memory_of_a_frozen_weight():
    """No tensor as large as the weight or the logits is allocated."""
    rows, hidden, vocab, rank = 256, 64, 20000, 4
    x, down = torch.randn(rows, hidden, requires_grad=True), torch.randn(rows, rank, requires_grad=True)
    weight, up = torch.randn(vocab, hidden), torch.randn(vocab, rank, requires_grad=True)
    target = torch.randint(vocab, (rows,))
    budget = 16 * vocab * 4
    with LiveBytes(x, down, weight, up, target) as memory:
        low_rank_ce(x, weight, down, up, target, memory_budget=budget).backward()
    assert memory.peak < 2 * budget + 4 * up.nbytes < weight.nbytes
