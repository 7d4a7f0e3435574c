# SPDX-License-Identifier: BSD-3-Clause
"""Losses in float64 are float64 throughout: no option, count or weight is rounded to float32 on its way."""

import losses_reference as plain
import pytest
import torch
from losses_cases import make

import liger
from liger import losses
from liger.losses.policy import GRPO_LOSS_TYPES
from liger.losses.unpaired import KTO_LOSS_TYPES


@pytest.fixture(autouse=True)
def _torch_backend():
    with liger.use_backend("torch"):
        yield


def wide(**how):
    """A batch of which every sequence has a token, as losses of odds need."""
    hidden, weight, target, bias = make("cpu", dtype=torch.float64, **how)
    target[-1, :2] = 3
    return hidden, weight, target, bias


def assert_exact(actual, expected):
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", KTO_LOSS_TYPES)
def test_kto(kind):
    hidden, weight, target, bias = wide()
    labels = torch.tensor([True, False, True, False, False, True])
    reference = make("cpu", dtype=torch.float64)[:2]
    module = losses.FusedLinearKTOLoss(beta=0.1, loss_type=kind, desirable_weight=1.3, undesirable_weight=0.7)
    kl = 0.3 if kind == "kto" else 0.0
    given = {"preference_labels": labels, "ref_input": reference[0], "ref_weight": reference[1]}
    loss = module(hidden, weight, target, bias, kl=kl, **given)[0]
    assert_exact(loss, plain.kto(hidden, weight, target, labels, reference, 0.1, kl, bias, (1.3, 0.7)))


def test_orpo():
    hidden, weight, target, bias = wide()
    loss = losses.FusedLinearORPOLoss(beta=0.1)(hidden, weight, target, bias)[0]
    pair = lambda c, r, *_: plain.orpo_pair(c, r, 0.1)  # noqa: E731
    assert_exact(loss, plain.pairs(pair, hidden, weight, target, bias, None, True, 1.0))


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("kind", GRPO_LOSS_TYPES)
def test_grpo(kind, entropy_coef):
    hidden, weight, target, bias = wide()
    advantages = torch.randn(target.shape, dtype=torch.float64)
    old, ref = -3 + torch.rand(2, *target.shape, dtype=torch.float64)
    module = losses.FusedLinearGRPOLoss(loss_type=kind, beta=0.1, entropy_coef=entropy_coef)
    logps = {"ref_per_token_logps": ref, "old_per_token_logps": old}
    loss = module(hidden, weight, target, bias, advantages=advantages, **logps)[0]
    assert_exact(
        loss,
        plain.policy(
            hidden, weight, target, advantages, kind=kind, beta=0.1, bias=bias, old=old, ref=ref,
            entropy_coef=entropy_coef,
        ),
    )  # fmt: skip
