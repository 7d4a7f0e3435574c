# SPDX-License-Identifier: BSD-3-Clause
"""The GRPO family and PPO: each against its formula over all logits, in float64."""

import losses_reference as plain
import pytest
import torch
from losses_cases import BUDGETS, check, make, packed

from liger import losses
from liger.losses.policy import GRPO_LOSS_TYPES

IGNORED = -100


def logps(ref=None, old=None):
    return {"ref_per_token_logps": ref, "old_per_token_logps": old}


VARIANTS = {
    "plain": ({}, {}),
    "sequence": ({"importance_sampling_level": "sequence"}, {"level": "sequence"}),
    "two-sided": ({"delta": 1.3, "epsilon_high": 0.4}, {"delta": 1.3, "high": 0.4}),
    "corrected": ({"use_bias_correction_kl": True}, {"corrected": True}),
    "entropy": ({"entropy_coef": 0.1}, {"entropy_coef": 0.1}),
    "sequence and entropy": (
        {"importance_sampling_level": "sequence", "entropy_coef": 0.1},
        {"level": "sequence", "entropy_coef": 0.1},
    ),
    "temperature": ({"temperature": 0.6, "softcap": 4.0}, {"temperature": 0.6, "softcap": 4.0}),
}


def around(hidden, weight, target, bias, spread, **how):
    """Log-probabilities (S, L) near the policy's, with NaN where nothing counts."""
    rows = [plain.token_logprobs(x, weight, y, bias, **how)[0] for x, y in zip(hidden, target, strict=True)]
    exact = torch.stack(rows)
    return (exact + spread * torch.randn_like(exact)).where(target != IGNORED, torch.nan)


def batch(device, **how):
    hidden, weight, target, bias = make(device)
    shape = target.shape
    old, ref = (around(hidden, weight, target, bias, 0.3, **how) for _ in range(2))
    sampler = torch.rand(shape, device=device) + 0.5
    return hidden, weight, target, bias, torch.randn(shape[0], device=device), old, ref, sampler


@pytest.mark.covering(2)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", GRPO_LOSS_TYPES)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_grpo(device, kind, variant, budget, layout):
    ours, theirs = VARIANTS[variant]
    if kind == "vespo" and "importance_sampling_level" in ours:
        pytest.skip("vespo has weights of sequences already")
    if kind == "dr_grpo":
        ours, theirs = ours | {"max_completion_length": 9}, theirs | {"longest": 9}
    scale = {name: theirs[name] for name in ("temperature", "softcap") if name in theirs}
    hidden, weight, target, bias, advantages, old, ref, sampler = batch(device, **scale)
    module = losses.FusedLinearGRPOLoss(loss_type=kind, beta=0.1, memory_budget=BUDGETS[budget], **ours)
    ids, mask = target.clamp_min(0), (target != IGNORED).int()
    places = {}

    def mine(x, w, b):
        tensors = (x, ids, mask, ref, old, sampler)
        if layout == "packed":
            tensors, places["cu_seqlens"] = packed(tensors, target)
        x, y, m, r, o, s = tensors
        return module(
            x, w, y, b, advantages=advantages, mask=m, **logps(r, o), vllm_is_ratio=s, **places
        )[0]  # fmt: skip

    def other(x, w, b):
        spread = advantages[:, None].expand(target.shape)
        given = {"old": old.to(x.dtype), "ref": ref.to(x.dtype), "sampler": sampler.to(x.dtype)}
        given["advantages"] = spread.to(x.dtype)
        return plain.policy(x, w, target, kind=kind, beta=0.1, bias=b, **given, **theirs)

    check(mine, other, hidden, weight, bias)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_policy_that_sampled(device, level):
    """Without old log-probabilities the importance weights are 1, with a gradient; advantages and factors of
    the sampler may be per sequence or per token."""
    hidden, weight, target, bias, advantages, _, _, sampler = batch(device)
    module = losses.FusedLinearGRPOLoss(beta=0.0, loss_type="grpo", importance_sampling_level=level)
    spread = advantages[:, None].expand(target.shape).contiguous()
    per_sequence = sampler[:, 0]
    for given, factors in ((advantages, per_sequence), (spread, per_sequence[:, None])):
        check(
            lambda x, w, b, given=given, factors=factors: module(
                x, w, target, b, advantages=given, vllm_is_ratio=factors
            )[0],
            lambda x, w, b: plain.policy(
                x, w, target, spread, kind="grpo", bias=b, level=level,
                sampler=per_sequence[:, None].expand(target.shape),
            ),
            hidden, weight, bias,
        )  # fmt: skip


def test_ppo(device):
    hidden, weight, target, bias, _, old, _, _ = batch(device)
    advantages = torch.randn(target.shape, device=device)
    module = losses.FusedLinearPPOLoss(epsilon=0.1, entropy_coef=0.05)
    check(
        lambda x, w, b: module(x, w, target, b, advantages=advantages, old_per_token_logps=old)[0],
        lambda x, w, b: plain.policy(
            x, w, target, advantages.to(x.dtype), kind="bnpo", bias=b, old=old.to(x.dtype), low=0.1, high=0.1,
            entropy_coef=0.05,
        ),
        hidden, weight, bias,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["dapo", "cispo", "bnpo", "grpo", "sapo", "luspo", "vespo"])
def test_denominator(device, kind):
    """Two micro-batches with the count of both give the loss of the whole."""
    hidden, weight, target, bias, advantages, old, ref, _ = batch(device)
    module = losses.FusedLinearGRPOLoss(loss_type=kind)
    sequences = kind in ("grpo", "sapo", "luspo")
    count = torch.tensor(len(target)) if sequences else (target != IGNORED).sum()

    def loss(rows):
        given = {"advantages": advantages[rows], **logps(ref[rows], old[rows])}
        return module(hidden[rows], weight, target[rows], bias, denominator=count, **given)[0]

    whole = module(hidden, weight, target, bias, advantages=advantages, **logps(ref, old))[0]
    torch.testing.assert_close(loss(slice(0, 2)) + loss(slice(2, None)), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["dapo", "grpo"])
def test_less_than_one_item_per_process(device, kind):
    """The global number over the number of processes may be below 1; no items at all are no division by 0."""
    hidden, weight, target, bias, advantages, old, ref, _ = batch(device)
    module = losses.FusedLinearGRPOLoss(loss_type=kind)

    def loss(items, target=target):
        given = {"advantages": advantages, **logps(ref, old)}
        return module(hidden, weight, target, bias, denominator=items, **given)[0]

    torch.testing.assert_close(loss(0.25), 4 * loss(1.0))
    assert loss(torch.tensor(0.0, device=device), torch.full_like(target, IGNORED)) == 0


@pytest.mark.parametrize("kind", GRPO_LOSS_TYPES)
def test_clip_ratio(device, kind):
    """The share of tokens whose importance weight is clipped, so that their gradient is zero; two kinds clip
    none."""
    hidden, weight, target, bias, _, _, _, _ = batch(device)
    advantages = torch.randn(target.shape, device=device)
    old = around(hidden, weight, target, bias, 0.6)
    module = losses.FusedLinearGRPOLoss(
        beta=0.0, loss_type=kind, epsilon_high=1.2 if kind == "cispo" else 0.2
    )
    _, metrics = module(hidden, weight, target, bias, advantages=advantages, old_per_token_logps=old)
    live = target != IGNORED
    ratio, advantages = (metrics.logprobs - old).exp()[live], advantages[live]
    above, below = ratio > 1.2, ratio < 0.8
    clipped = {
        "cispo": above & (advantages > 0),
        "sapo": torch.zeros_like(above),
        "vespo": torch.zeros_like(above),
    }.get(kind, (above & (advantages > 0)) | (below & (advantages < 0)))
    torch.testing.assert_close(metrics.clip_ratio, clipped.float().mean())
    assert (metrics.clip_ratio > 0) == (kind not in ("sapo", "vespo"))


@pytest.mark.parametrize("corrected", [False, True])
def test_metrics_and_reference_model(device, corrected):
    hidden, weight, target, bias, advantages, old, ref, _ = batch(device)
    module = losses.FusedLinearGRPOLoss(
        entropy_coef=0.1, epsilon_low=0.1, epsilon_high=0.2, use_bias_correction_kl=corrected
    )
    live = target != IGNORED
    metrics = module(hidden, weight, target, bias, advantages=advantages, **logps(ref, old))[1]
    rows = [plain.token_logprobs(x, weight, y, bias) for x, y in zip(hidden, target, strict=True)]
    logprobs, entropy = (torch.stack(values)[live] for values in zip(*rows, strict=True))
    gap = (ref[live] - logprobs).double()
    ratio, sign = (logprobs - old[live]).exp(), advantages[:, None].expand(target.shape)[live] > 0
    clipped = torch.where(sign, ratio > 1.2, ratio < 0.9).float()
    assert 0 < clipped.mean() < 1
    torch.testing.assert_close(metrics.logprobs[live], logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(metrics.mean_entropy, entropy.mean(), rtol=1e-5, atol=1e-5)
    kl = (gap.exp() - gap - 1) * (ratio.double() if corrected else 1.0)
    torch.testing.assert_close(metrics.kl.double(), kl.mean(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics.clip_ratio, clipped.mean())
    assert not metrics.logprobs.requires_grad
    ref_hidden, ref_weight, *_ = make(device)
    given = {"advantages": advantages, "old_per_token_logps": old}
    by_model = module(hidden, weight, target, bias, ref_input=ref_hidden, ref_weight=ref_weight, **given)[0]
    tokens = around(ref_hidden, ref_weight, target, None, 0.0)
    by_logps = module(hidden, weight, target, bias, ref_per_token_logps=tokens, **given)[0]
    torch.testing.assert_close(by_model, by_logps, rtol=1e-5, atol=1e-6)
