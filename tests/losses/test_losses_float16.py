# SPDX-License-Identifier: BSD-3-Clause
"""Losses in float16 under a loss scale: gradients of a mean over many rows keep their bits."""

import math

import pytest
import torch
from losses_cases import LENGTH, leaf

import liger
from liger import losses
from liger.losses import base

SEQUENCES, HIDDEN, VOCAB, LOSS_SCALE = 512, 16, 24, 4096.0
KINDS = {
    "dpo": (losses.FusedLinearDPOLoss, {"use_ref_model": False}),
    "orpo": (losses.FusedLinearORPOLoss, {}),
    "kto": (losses.FusedLinearKTOLoss, {"beta": 1.0}),
    "grpo": (losses.FusedLinearGRPOLoss, {"beta": 0.0}),
    "luspo": (losses.FusedLinearGRPOLoss, {"beta": 0.0, "loss_type": "luspo"}),
    "dapo with entropies": (
        losses.FusedLinearGRPOLoss,
        {"beta": 0.0, "loss_type": "dapo", "entropy_coef": 0.1},
    ),
}


@pytest.fixture
def batch(device):
    x = torch.randn(SEQUENCES, LENGTH, HIDDEN, device=device)
    # Small weights: gradients of the hidden states are below 2^-14, where float16 has no more than 10 bits.
    weight = 2e-3 * torch.randn(VOCAB, HIDDEN, device=device)
    target = torch.randint(VOCAB, (SEQUENCES, LENGTH), device=device)
    target[::3, 3:] = -100
    return x.half(), weight.half(), target


def gradients(kind, x, weight, target, dtype, **how):
    """(loss, gradients of x and the weight under a loss scale)"""
    cls, options = KINDS[kind]
    module = cls(**options, **how)
    x, weight = leaf(x, dtype), leaf(weight, dtype)
    if cls is losses.FusedLinearGRPOLoss:
        advantages = torch.linspace(-1, 1, SEQUENCES, device=x.device, dtype=dtype)
        loss, _ = module(x, weight, target, advantages=advantages)
    elif cls is losses.FusedLinearKTOLoss:
        labels = torch.arange(SEQUENCES, device=x.device) % 2
        reference = torch.full(target.shape, -math.log(VOCAB), device=x.device, dtype=dtype)
        loss, _ = module(x, weight, target, preference_labels=labels, ref_logps=reference)
    else:
        loss, _ = module(x, weight, target)
    (loss * LOSS_SCALE).backward()
    return loss.detach(), (x.grad, weight.grad)


def errors(kind, batch, **how):
    """Relative errors of both gradients against float64."""
    with liger.use_backend("torch"):
        exact_loss, exact = gradients(kind, *batch, torch.float64)
    loss, grads = gradients(kind, *batch, torch.float16, **how)
    torch.testing.assert_close(loss.double(), exact_loss, rtol=2e-3, atol=1e-5)
    return [float((g.double() - e).norm() / e.norm()) for g, e in zip(grads, exact, strict=True)]


@pytest.fixture
def without_factor(monkeypatch):
    def remove():
        monkeypatch.setattr(base, "float16_factor", lambda divisor, rows: torch.ones_like(divisor))

    return remove


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ({}, {"memory_budget": 4096}, {"memory_budget": 600}), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_scale_keeps_the_bits(batch, kind, how, without_factor):
    """One, many, and chunks smaller than a sequence."""
    assert max(errors(kind, batch, **how)) < 2e-3
    without_factor()
    assert max(errors(kind, batch, **how)) > 2e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_keeps_its_bits(batch, kind, without_factor):
    """The factor is a power of two."""
    loss, _ = gradients(kind, *batch, torch.float16)
    without_factor()
    assert torch.equal(loss, gradients(kind, *batch, torch.float16)[0])


def test_a_sum_has_no_factor(batch):
    """With a divisor of 1 a factor would make large gradients infinite."""
    x, weight, target = batch
    x = leaf(x)
    module = losses.FusedLinearGRPOLoss(beta=0.0, loss_type="luspo")
    advantages = torch.full((SEQUENCES,), 6e4, device=x.device)
    loss, _ = module(x, weight, target, advantages=advantages, denominator=1.0)
    loss.backward()
    assert x.grad.isfinite().all() and x.grad.abs().max() > 100
