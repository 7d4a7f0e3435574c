# SPDX-License-Identifier: BSD-3-Clause
"""Preference and policy losses of nothing: every divisor is at least 1, so that the loss is 0, never nan."""

import pytest
import torch
from losses_cases import HIDDEN, VOCAB, leaf

from liger import losses
from liger.losses.policy import GRPO_LOSS_TYPES

PAIRS = {
    "dpo": lambda: losses.FusedLinearDPOLoss(use_ref_model=False, compute_nll_loss=True),
    "ipo": lambda: losses.FusedLinearDPOLoss(use_ref_model=False, loss_type="ipo"),
    "orpo": losses.FusedLinearORPOLoss,
    "cpo": losses.FusedLinearCPOLoss,
    "simpo": losses.FusedLinearSimPOLoss,
}
POLICIES = {
    **{kind: lambda kind=kind: losses.FusedLinearGRPOLoss(beta=0.0, loss_type=kind) for kind in GRPO_LOSS_TYPES},
    "gspo": lambda: losses.FusedLinearGRPOLoss(beta=0.0, importance_sampling_level="sequence"),
    "entropy": lambda: losses.FusedLinearGRPOLoss(beta=0.0, entropy_coef=0.1),
    "ppo": losses.FusedLinearPPOLoss,
}  # fmt: skip
LAYOUTS = {
    "ignored": ((4, 3), None),
    "no sequences": ((0, 3), None),
    "no length": ((4, 0), None),
    "packed, without tokens": ((0,), [0, 0, 0, 0, 0]),
    "packed, without sequences": ((3,), [0]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*PAIRS, *POLICIES, "kto", "apo_zero_unpaired"])
def test_nothing_is_a_loss_of_zero(device, name, layout):
    shape, ends = LAYOUTS[layout]
    x = leaf(torch.randn(*shape, HIDDEN, device=device))
    weight = leaf(torch.randn(VOCAB, HIDDEN, device=device))
    target = torch.full(shape, -100, device=device)
    where = {} if ends is None else {"cu_seqlens": torch.tensor(ends, device=device), "max_length": 5}
    sequences = shape[0] if ends is None else len(ends) - 1
    if name in PAIRS:
        loss, metrics = PAIRS[name]()(x, weight, target, **where)
    elif name in POLICIES:
        advantages = torch.ones(sequences, device=device)
        loss, metrics = POLICIES[name]()(x, weight, target, advantages=advantages, **where)
    else:
        module = losses.FusedLinearKTOLoss(loss_type=name, use_ref_model=False)
        labels = torch.ones(sequences, device=device, dtype=torch.bool)
        loss, metrics = module(x, weight, target, preference_labels=labels, **where)
        ref_logps = torch.zeros(sequences, device=device)
        assert module.estimate_kl(x, weight, target, ref_logps=ref_logps, **where) == 0
    assert loss == 0 and all(torch.isfinite(m).all() for m in metrics if m is not None)
    for tensor, grad in zip((x, weight), torch.autograd.grad(loss, (x, weight)), strict=True):
        assert grad.shape == tensor.shape and not grad.any()
