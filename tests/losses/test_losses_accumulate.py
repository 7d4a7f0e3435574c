# SPDX-License-Identifier: BSD-3-Clause
"""Losses with accumulate_grad_weight=True: the gradient of the weight is added to main_grad by the
backward."""

import pytest
import torch
from losses_cases import BUDGETS, leaf, make
from test_losses_op import EVERY, call

import liger
from liger import losses


def parameter(weight):
    """A parameter with a sum of its gradients."""
    weight = torch.nn.Parameter(weight.clone())
    weight.main_grad = torch.zeros(weight.shape, device=weight.device)
    return weight


@pytest.mark.covering(2)
@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=["", "float32 logits"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", EVERY)
def test_micro_batches(device, name, budget, logits_dtype):
    """Two batches of different sizes, with an upstream gradient; the other results do not change."""
    make_module, options = EVERY[name]
    hidden, weight, target, bias = make(device, 10)
    options = {**options, "memory_budget": BUDGETS[budget], "logits_dtype": logits_dtype}
    summed, expected = parameter(weight), leaf(weight)
    for part in (slice(0, 6), slice(6, 10)):
        x, y = hidden[part], target[part].contiguous()
        results = []
        for accumulate, w in ((True, summed), (False, expected)):
            module = make_module(**options, accumulate_grad_weight=accumulate)
            leaves = leaf(x), leaf(bias)
            loss = call(module, leaves[0], w, y, leaves[1])
            (loss * 3.0).backward()
            results.append((loss.detach(), *(t.grad for t in leaves)))
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert summed.grad is None
    torch.testing.assert_close(summed.main_grad, expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_frozen_hidden_states(device, name):
    """Only the weight is trained."""
    make_module, options = EVERY[name]
    hidden, weight, target, bias = make(device)
    summed, expected = parameter(weight), leaf(weight)
    call(make_module(**options, accumulate_grad_weight=True), hidden, summed, target, bias).backward()
    call(make_module(**options), hidden, expected, target, bias).backward()
    torch.testing.assert_close(summed.main_grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_two_terms_over_one_weight(device):
    """Targets of the likelihood term that differ from the targets of the pair: log-probabilities of their
    own."""
    hidden, weight, target, bias = make(device)
    target[-1, :2] = 3
    nll_target = target.clone()
    nll_target[0, 0] = (target[0, 0] + 1) % 29
    summed, expected = parameter(weight), leaf(weight)
    for accumulate, w in ((True, summed), (False, expected)):
        module = losses.FusedLinearORPOLoss(accumulate_grad_weight=accumulate)
        module(leaf(hidden), w, target, bias, nll_target=nll_target)[0].backward()
    torch.testing.assert_close(summed.main_grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_no_sequences(device):
    hidden, weight, target, bias = make(device)
    summed = parameter(weight)
    module = losses.FusedLinearGRPOLoss(accumulate_grad_weight=True, beta=0.0)
    call(module, leaf(hidden), summed, torch.full_like(target, -100), bias).backward()
    call(module, leaf(hidden[:0]), summed, target[:0], bias).backward()
    assert not summed.main_grad.any()


def test_modules_of_cross_entropy(device):
    hidden, weight, target, _ = make(device)
    head = liger.nn.LMHeadLoss(
        hidden.shape[-1], weight.shape[0], bias=True, device=device, accumulate_grad_weight=True
    )
    head.weight.main_grad = torch.zeros_like(head.weight)
    head(hidden, target).backward()
    other = head.weight.detach().clone().requires_grad_()
    liger.nn.FusedLinearCrossEntropyLoss()(hidden, other, target, head.bias.detach()).backward()
    torch.testing.assert_close(head.weight.main_grad, other.grad, rtol=1e-5, atol=1e-6)
    assert head.weight.grad is None and head.bias.grad.any()


def test_bad_input():
    hidden, weight, target, bias = make("cpu")
    module = losses.FusedLinearSimPOLoss(accumulate_grad_weight=True)
    with pytest.raises(
        RuntimeError,
        match=r"FusedLinearSimPOLoss: accumulate_grad_weight with weight, the result of MulBackward0",
    ):
        call(module, hidden, leaf(weight) * 1.0, target, bias)
