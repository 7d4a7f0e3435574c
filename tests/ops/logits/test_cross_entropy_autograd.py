# SPDX-License-Identifier: BSD-3-Clause
"""cross_entropy and autograd: what is written and what never is, second backwards, the in-place form."""

import gc
import weakref

import pytest
import torch
from cases import DTYPES, made_in_forward
from cross_entropy_reference import ALL_METRICS, options, random_logits

import liger

REDUCTIONS = ["mean", "sum", "none"]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("grad_mode", [False, True])
def test_logits_without_a_gradient_are_never_written(device, inplace, grad_mode):
    logits, target = random_logits(8, 33, device)
    before, version = logits.clone(), logits._version
    with torch.set_grad_enabled(grad_mode):
        liger.cross_entropy(logits, target, inplace=inplace, **ALL_METRICS)
    assert torch.equal(logits, before) and logits._version == version


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_kept_for_the_backward(device, dtype, reduction):
    """The gradient or the logits, never both."""
    leaf, target = random_logits(8, 33, device, dtype)
    logits = leaf.requires_grad_() * 1
    alive = weakref.ref(logits)
    loss = liger.cross_entropy(logits, target, reduction=reduction)
    del logits
    gc.collect()
    assert (alive() is None) == made_in_forward(dtype, reduction)
    assert loss.sum().requires_grad


def test_float16_gradients_are_scaled_before_they_are_rounded(device):
    """A loss scale is there to lift gradients that float16 cannot hold."""
    logits, target = random_logits(4, 500, device, torch.float16)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    (liger.cross_entropy(leaf, target, denominator=1e6) * 65536).backward()
    (torch.nn.functional.cross_entropy(exact, target, reduction="sum") * 65536 / 1e6).backward()
    assert (exact.grad.abs() / 65536 < 6e-8).double().mean() > 0.9
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2e-3, atol=6e-8)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inplace_gives_the_same_gradient_over_the_logits(device, dtype, reduction, name):
    chosen = options(name, 8, 33, device, reduction)
    values, target = random_logits(8, 33, device, dtype, chosen.get("ignore_index", -100))
    grads = []
    for inplace in (False, True):
        leaf = values.clone().requires_grad_()
        logits = leaf * 1
        loss = liger.cross_entropy(logits, target, inplace=inplace, **chosen)
        written = inplace and made_in_forward(dtype, reduction)
        assert torch.equal(logits, values) != written and (logits._version > 0) == written
        upstream = []
        logits.register_hook(upstream.append)
        (-2.5 * loss.sum()).backward()
        assert (upstream[0].data_ptr() == logits.data_ptr()) == inplace
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("producer", [torch.tanh, torch.exp])
def test_inplace_makes_a_producer_that_needs_the_logits_raise(device, producer):
    values, target = random_logits(8, 33, device)
    loss = liger.cross_entropy(producer(values.requires_grad_()), target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_inplace_twice_on_the_same_logits_raises(device, reduction):
    values, target = random_logits(8, 33, device)
    logits = values.requires_grad_() * 1
    losses = [liger.cross_entropy(logits, target, inplace=True, reduction=reduction) for _ in range(2)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(loss.sum() for loss in losses).backward()


def test_inplace_makes_a_later_use_of_the_logits_raise(device):
    values, target = random_logits(8, 33, device)
    leaf = values.requires_grad_()
    logits = leaf * 1
    other = logits.square().sum()
    liger.cross_entropy(logits, target, inplace=True).backward(retain_graph=False, inputs=[logits])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_inplace_does_not_write_strangers(device):
    """Logits that overlap themselves, and the rest of a larger tensor, stay as they are."""
    leaf = torch.randn(6, 1, device=device, requires_grad=True)
    target = torch.arange(6, device=device)
    plain = liger.cross_entropy((leaf * 1).expand(6, 10), target)
    shared = liger.cross_entropy((leaf * 1).expand(6, 10), target, inplace=True)
    assert torch.equal(*(torch.autograd.grad(loss, leaf)[0] for loss in (plain, shared)))

    for part in (slice(1, 7), (slice(0, 6), slice(2, 12))):
        whole = torch.randn(9, 13, device=device, requires_grad=True) * 1
        before, inside = whole.detach().clone(), torch.zeros(9, 13, dtype=torch.bool, device=device)
        inside[part] = True
        liger.cross_entropy(whole[part], target, inplace=True).backward()
        assert torch.equal(whole != before, inside)


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.view(2, 4, 33)])
def test_inplace_refuses_a_leaf(device, view):
    logits, target = random_logits(8, 33, device)
    leaf = logits.requires_grad_()
    with pytest.raises(RuntimeError, match="logits is a leaf that requires grad"):
        liger.cross_entropy(view(leaf), target.view(view(leaf).shape[:-1]), inplace=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_inplace_with_a_kept_graph_writes_nothing_in_the_backward(device, reduction):
    leaf, target = random_logits(8, 33, device)
    logits = leaf.requires_grad_() * 1
    loss = 2 * liger.cross_entropy(logits, target, inplace=True, reduction=reduction).sum()
    kept, version = logits.detach().clone(), logits._version
    first = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    assert torch.equal(logits, kept) and logits._version == version
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], first) and first.any()


@pytest.mark.parametrize("name", ["ce_weight", "token_weight", "denominator"])
def test_inplace_refuses_weights_that_require_grad_before_it_writes(device, name):
    values, target = random_logits(4, 4, device)
    logits = values.requires_grad_() * 1
    weight = torch.ones((1,) if name == "denominator" else (4,), device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"cross_entropy: {name} requires grad"):
        liger.cross_entropy(logits, target, inplace=True, **{name: weight})
    assert torch.equal(logits, values)


def test_the_forward_op_without_its_gradient_is_differentiable(device):
    """A graph that was traced without grad mode lacks the gradient: the backward makes it from the logits."""
    values, target = random_logits(6, 21, device)
    grads = []
    for need_grad in (False, True):
        leaf = values.clone().requires_grad_()
        arguments = (leaf, target, None, None, None, -100, 0.0, 0.0, None, "mean", *(False,) * 5, need_grad)
        (3 * torch.ops.liger.cross_entropy_forward(*arguments)[0]).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


def test_block_size_changes_no_bit(monkeypatch):
    logits, target = random_logits(29, 40, "cpu")
    leaf = logits.requires_grad_()
    runs = []
    for size in (1 << 22, 100):
        monkeypatch.setattr("liger._core.math.row_blocks._CPU_BLOCK", size)
        output = liger.cross_entropy(leaf, target, label_smoothing=0.1, **ALL_METRICS)
        runs.append([*output, *torch.autograd.grad(output.loss, leaf)])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
