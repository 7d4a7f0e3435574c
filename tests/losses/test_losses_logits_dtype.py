# SPDX-License-Identifier: BSD-3-Clause
"""Losses with logits_dtype=torch.float32: their log-probabilities agree with fused_linear_logprobs within
1e-5, and their gradients come from float32 probabilities."""

import copy

import pytest
import torch
from cases import DTYPES
from losses_cases import BUDGETS, LENGTH, VOCAB, leaf, make
from test_losses_op import EVERY, call

import liger
from liger import losses

PAIRS = [(dtype, weight) for dtype in DTYPES for weight in dict.fromkeys((dtype, torch.float32))]
# One sequence of logits does not fit: four products.
EACH_BUDGET = {**BUDGETS, "one row": VOCAB * 4}
names = lambda pair: "-".join(str(dtype).removeprefix("torch.") for dtype in pair)  # noqa: E731


def layer(device, dtypes, std=2.5):
    """A layer with logits of this standard deviation; every sequence has a token, as losses of odds need."""
    hidden, weight, target, bias = make(device)
    target[-1, :2] = 3
    weight = weight * 3 * std / hidden.shape[-1] ** 0.5
    return hidden.to(dtypes[0]), weight.to(dtypes[1]), target, bias.to(dtypes[1])


def results(module, tensors, level):
    leaves = [leaf(t) for t in (tensors[0], tensors[1], tensors[3])]
    loss = call(module, leaves[0], leaves[1], tensors[2], leaves[2], level)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("budget", EACH_BUDGET)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtypes", PAIRS, ids=names)
def test_against_float64(device, dtypes, name, budget):
    make_module, options = EVERY[name]
    tensors = layer(device, dtypes)
    wide = [t.cpu() if i == 2 else t.cpu().double() for i, t in enumerate(tensors)]
    module = make_module(**options, logits_dtype=torch.float32, memory_budget=EACH_BUDGET[budget])
    with liger.use_backend("torch"):
        exact = results(make_module(**options), wide, -4.0)
    mine = results(module, tensors, -4.0)
    # A policy's ratio and an odds ratio multiply the error of a log-probability.
    torch.testing.assert_close(mine[0].cpu().double(), exact[0], rtol=3e-5, atol=3e-5)
    for which, g, best, given in zip(
        ("hidden", "weight", "bias"), mine[1:], exact[1:], (*tensors[:2], tensors[3]), strict=True
    ):
        assert g.dtype == given.dtype
        roundings = torch.finfo(g.dtype).eps / 2
        if dtypes[0] == dtypes[1]:
            roundings += torch.finfo(dtypes[0]).eps / 2
        error = (g.cpu().double() - best).norm() / best.norm().clamp_min(1e-12)
        assert error < roundings + 2e-4, (which, error)


@pytest.mark.parametrize("dtypes", PAIRS, ids=names)
def test_ratio_of_the_sampled_policy_is_one(device, dtypes):
    """The log-probabilities of a sampling pass and of the loss agree, though their chunks differ."""
    hidden, weight, target, bias = layer(device, dtypes)
    sampled = liger.fused_linear_logprobs(
        hidden, weight, target, bias, logits_dtype=torch.float32, memory_budget=3 * VOCAB * 4
    )
    module = losses.FusedLinearGRPOLoss(
        beta=0.0, logits_dtype=torch.float32, memory_budget=2 * LENGTH * VOCAB * 6
    )
    advantages = torch.ones(target.shape[0], device=target.device)
    given = {"advantages": advantages, "old_per_token_logps": sampled}
    _, metrics = module(hidden, leaf(weight), target, bias, **given)
    ratio = (metrics.logprobs - sampled).exp()
    assert (ratio - 1).abs().max() < 1e-5


def test_reference_with_a_head_of_its_own(device):
    """A reference model in another dtype than the policy."""
    dtypes = (torch.float16, torch.float32)
    hidden, weight, target, bias = layer(device, dtypes)
    batch_args = {"ref_input": hidden, "ref_weight": weight.half(), "ref_bias": bias.half()}
    module = losses.FusedLinearDPOLoss(logits_dtype=torch.float32)
    loss = module(hidden, weight, target, bias, **batch_args)[0]
    exact = losses.FusedLinearDPOLoss()
    with liger.use_backend("torch"):
        expected = exact(
            hidden.cpu().double(), weight.cpu().double(), target.cpu(), bias.cpu().double(),
            **{n: t.cpu().double() for n, t in batch_args.items()},
        )[0]  # fmt: skip
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_autocast_casts_nothing(device):
    tensors = layer(device, (torch.float16, torch.float32))
    module = losses.FusedLinearSimPOLoss(logits_dtype=torch.float32)
    expected = call(module, tensors[0], tensors[1], *tensors[2:])
    with torch.autocast(device.type, torch.bfloat16):
        found = call(module, tensors[0], tensors[1], *tensors[2:])
    assert torch.equal(found, expected)


def test_bad_input():
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(
            ValueError, match=r"FusedLinearDPOLoss: logits_dtype is float.., expected float32 or None"
        ):
            losses.FusedLinearDPOLoss(logits_dtype=dtype)
    with pytest.raises(TypeError, match=r"logits_dtype is 'float32', expected a torch.dtype or None"):
        losses.FusedLinearDPOLoss(logits_dtype="float32")
    hidden, weight, target, bias = layer("cpu", (torch.float64,) * 2)
    module = copy.deepcopy(losses.FusedLinearSimPOLoss(logits_dtype=torch.float32))
    with pytest.raises(RuntimeError, match="input has dtype float64, expected float16, bfloat16 or float32"):
        call(module, hidden, weight, target, bias)
    with pytest.raises(
        RuntimeError, match="weight has dtype bfloat16, expected float32 or the dtype of input, float16"
    ):
        call(module, hidden.half(), weight.bfloat16(), target, bias.half())
