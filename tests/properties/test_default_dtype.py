# SPDX-License-Identifier: BSD-3-Clause
"""``torch.set_default_dtype`` changes no bit of any result or gradient: no intermediate gets its dtype from
there."""

from contextlib import contextmanager

import pytest
import torch
from cases import DTYPES
from public_callables import CASES, arguments, cases, outputs, weighted_sum

from liger import losses
from liger._core.runtime.environment import triton_interpreted

# The interpreter of Triton takes its time.
DEFAULTS = [torch.bfloat16] if triton_interpreted() else [torch.bfloat16, torch.float64]


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def copies(given):
    return {
        key: value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in given.items()
    }


def results_and_gradients(name, given):
    given = copies(given)
    results = outputs(name, given)
    wanted = [given[key] for key in CASES[name].differentiable]
    return [*results, *torch.autograd.grad(weighted_sum([r for r in results if r.requires_grad]), wanted)]


def assert_same_bits(found, expected):
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"result {i}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", cases())
def test_results_and_gradients_keep_their_bits(device, name, dtype):
    given = arguments(name, device, dtype)
    expected = results_and_gradients(name, given)
    for default in DEFAULTS:
        print("default", default)
        with default_dtype(default):
            found = results_and_gradients(name, given)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize("kind", losses.policy.GRPO_LOSS_TYPES)
def test_whole_numbers_per_token(device, kind, default):
    """Advantages, factors and counts that are integers."""
    given = arguments(f"losses.GRPO {kind}", device)
    per_token = torch.randint(-2, 3, given["mask"].shape, device=device)
    module = losses.FusedLinearGRPOLoss(loss_type=kind)

    def run(advantages):
        loss, metrics = module(**given | {
            "advantages": advantages, "vllm_is_ratio": per_token + 5,
            "denominator": torch.tensor(7, device=device),
        })  # fmt: skip
        return [loss, *torch.autograd.grad(loss, given["weight"]), metrics.kl, metrics.clip_ratio]

    for advantages in (per_token, per_token[:, 0]):
        expected = run(advantages.float())
        with default_dtype(default):
            found = run(advantages)
        assert_same_bits(found, expected)
