# SPDX-License-Identifier: BSD-3-Clause
"""fused_linear_ce and autograd: work only for what is trained, second backwards, no second buffer,
autocast."""

import itertools

import pytest
import torch
from cases import DTYPES
from cross_entropy_reference import leaves, random_layer
from torch.nn.functional import linear

import liger

REDUCTIONS = ["mean", "sum", "none"]


def call_forward(x, weight, target, bias, needs, reduction="mean"):
    """The op under the composite, with a choice of the gradients to make in the forward."""
    options = (None, None, None, -100, 0.0, 0.0, None, reduction, None, None)
    return torch.ops.liger.fused_linear_ce_forward(x, weight, target, bias, *options, *[False] * 5, *needs)


def test_gradients_not_asked_for_are_not_made(device):
    x, weight, bias, target = random_layer(9, 8, 33, device)
    for needs in itertools.product([False, True], repeat=3):
        grads = call_forward(x, weight, target, bias, needs)[-3:]
        full = [t.shape if need else (0,) for t, need in zip((x, weight, bias), needs, strict=True)]
        assert [g.shape for g in grads] == full
        assert all(g.is_contiguous() and g.dtype == x.dtype for g in grads)
    assert call_forward(x, weight, target, None, (True,) * 3)[-1].shape == (0,)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_not_made_in_the_forward_are_made_in_the_backward(device, reduction):
    """As in a graph that was traced without grad mode and is run with it."""
    x, weight, bias, target = random_layer(9, 8, 33, device)
    grads = []
    for needs in ((True, True, True), (False, False, False), (True, False, False)):
        copies = leaves(x, weight, bias)
        loss = call_forward(copies[0], copies[1], target, copies[2], needs, reduction)[0]
        grads.append(torch.autograd.grad(1.5 * loss.sum(), copies))
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_backward_needs_no_second_weight_gradient(device):
    """The gradient made in the forward becomes .grad itself."""
    x, weight, bias, target = random_layer(9, 8, 33, device)
    copies = leaves(x, weight, bias)
    loss = liger.fused_linear_ce(copies[0], copies[1], target, copies[2])
    made = [t.data_ptr() for t in loss.grad_fn.saved_tensors]
    loss.backward()
    assert [leaf.grad.data_ptr() for leaf in copies] == made


def test_a_new_step_does_not_change_an_old_gradient(device):
    x, weight, bias, target = random_layer(9, 8, 33, device)
    copies = leaves(x, weight, bias)
    liger.fused_linear_ce(copies[0], copies[1], target, copies[2]).backward()
    old = [leaf.grad for leaf in copies]
    kept = [g.clone() for g in old]
    for leaf in copies:
        leaf.grad = None
    (2 * liger.fused_linear_ce(copies[0], copies[1], target, copies[2])).backward()
    for leaf, g, value in zip(copies, old, kept, strict=True):
        assert torch.equal(g, value) and torch.equal(leaf.grad, 2 * value)


def test_a_changed_gradient_of_the_forward_is_noticed(device):
    x, weight, bias, target = random_layer(9, 8, 33, device)
    copies = leaves(x, weight)
    loss, *_, grad_weight, _ = call_forward(*copies, target, bias, (True, True, False))
    grad_weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weight_that_is_computed(device):
    """A low-rank update of a frozen head: the gradient goes on through the weight."""
    x, weight, _, target = random_layer(9, 8, 33, device)
    down, up = leaves(torch.randn(2, 8, device=device), torch.randn(33, 2, device=device))
    ours = torch.autograd.grad(liger.fused_linear_ce(x, weight + up @ down, target), [down, up])
    logits = linear(x, weight + up @ down)
    theirs = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, target), [down, up])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_autocast_casts_as_linear_does(device, dtype, reduction):
    x, weight, bias, target = random_layer(9, 8, 33, device)
    copies, low = leaves(x, weight, bias), leaves(*(t.to(dtype) for t in (x, weight, bias)))
    with torch.autocast(device.type, dtype):
        loss = liger.fused_linear_ce(copies[0], copies[1], target, copies[2], reduction=reduction)
    expected = liger.fused_linear_ce(low[0], low[1], target, low[2], reduction=reduction)
    assert torch.equal(loss, expected)
    loss.sum().backward()
    expected.sum().backward()
    for leaf, other in zip(copies, low, strict=True):
        assert leaf.grad.dtype == torch.float32 and torch.equal(leaf.grad, other.grad.float())
