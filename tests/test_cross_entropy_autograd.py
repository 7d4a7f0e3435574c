"""cross_entropy and autograd: what is written and what never is, second backwards, the in-place form."""

import pytest
import torch
from cases import DTYPES
from cross_entropy_reference import RETURN_ALL, options, random_logits

import liger

REDUCTIONS = ["mean", "sum", "none"]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("grad_mode", [False, True])
def test_forward_writes_nothing(device, inplace, grad_mode):
    logits, target = random_logits(8, 33, device)
    before, version = logits.clone(), logits._version
    with torch.set_grad_enabled(grad_mode):
        liger.cross_entropy(logits, target, inplace=inplace, **RETURN_ALL)
    assert torch.equal(logits, before) and logits._version == version


def test_backward_writes_nothing_and_repeats(device):
    logits, target = random_logits(8, 33, device)
    leaf = logits.clone().requires_grad_()
    version = leaf._version
    loss = 3 * liger.cross_entropy(leaf, target)
    first = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    second = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    first.zero_()
    third = torch.autograd.grad(loss, leaf)[0]
    assert torch.equal(second, third) and second.any()
    assert torch.equal(leaf, logits) and leaf._version == version
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


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
        assert torch.equal(logits, values)
        upstream = []
        logits.register_hook(upstream.append)
        loss.sum().backward()
        assert (upstream[0].data_ptr() == logits.data_ptr()) == inplace
        grads.append(leaf.grad)
    assert torch.equal(*grads)


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


def test_inplace_with_a_kept_graph_writes_nothing(device):
    leaf, target = random_logits(8, 33, device)
    logits = leaf.requires_grad_() * 1
    kept = logits.detach().clone()
    loss = liger.cross_entropy(logits, target, inplace=True)
    first = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    assert torch.equal(logits, kept)
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], first)


def test_the_op_that_writes_refuses_autograd(device):
    logits, target = random_logits(3, 9, device)
    lse, one = logits.logsumexp(-1), torch.ones((), device=device)
    arguments = (target, lse, one, None, None, -100, 0.0, 0.0, None)
    expected = torch.ops.liger.cross_entropy_backward(one, logits, *arguments)
    with pytest.raises(RuntimeError, match="cross_entropy_backward_ writes over its arguments"):
        torch.ops.liger.cross_entropy_backward_(one, logits.clone().requires_grad_(), *arguments)
    version = logits._version
    torch.ops.liger.cross_entropy_backward_(one, logits, *arguments)
    assert torch.equal(logits, expected) and logits._version > version


def test_no_second_derivative(device):
    logits, target = random_logits(3, 9, device)
    leaf = logits.requires_grad_()
    grad = torch.autograd.grad(liger.cross_entropy(leaf, target), leaf, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="cross_entropy has no second derivative"):
        grad.square().sum().backward()


def test_same_bits_twice(device):
    logits, target = random_logits(130, 1000, device)
    leaf = logits.requires_grad_()
    runs = []
    for _ in range(2):
        output = liger.cross_entropy(leaf, target, label_smoothing=0.1, lse_square_scale=1e-3, **RETURN_ALL)
        runs.append([*output, *torch.autograd.grad(output.loss, leaf)])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_block_size_changes_no_bit(monkeypatch):
    logits, target = random_logits(29, 40, "cpu")
    leaf = logits.requires_grad_()
    runs = []
    for size in (1 << 22, 100):
        monkeypatch.setattr("liger.ops._rows._CPU_BLOCK", size)
        output = liger.cross_entropy(leaf, target, label_smoothing=0.1, **RETURN_ALL)
        runs.append([*output, *torch.autograd.grad(output.loss, leaf)])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
