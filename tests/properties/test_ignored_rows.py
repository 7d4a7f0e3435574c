"""What is ignored leaves no trace, whatever is there: NaN or infinities in its place change no bit of any result or
gradient, and its own gradient is exactly zero."""

import pytest
import torch
from cases import DTYPES
from public_callables import CASES, arguments, cases, outputs, weighted_sum

import liger

WITH_IGNORED = [name for name in cases() if CASES[name].ignored is not None]
POISONS = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def differentiable(name, given):
    return [given[key] for key in CASES[name].differentiable]


def results_and_gradients(name, given):
    results = outputs(name, given)
    loss = weighted_sum([r for r in results if r.requires_grad])
    return [*results, *torch.autograd.grad(loss, differentiable(name, given))]


def masks(name, given):
    found = CASES[name].ignored(given)
    assert any(mask.any() for mask in found.values()), f"{name} has nothing that is ignored"
    return found


def poisoned(name, given, value):
    """The same arguments with ``value`` in everything that is ignored."""
    changed = dict(given)
    for key, mask in masks(name, given).items():
        tensor = given[key].detach().clone()
        tensor[mask] = value
        changed[key] = tensor.requires_grad_(given[key].requires_grad)
    return changed


def assert_same(found, expected, exactly):
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        # A token that counts has the same products and sums; only torch may take another way to them.
        assert torch.equal(a, b) if exactly else torch.allclose(a, b, rtol=0, atol=0, equal_nan=True), i


def assert_zero_gradients(name, given, gradients):
    of = dict(zip(CASES[name].differentiable, gradients, strict=True))
    for key, mask in masks(name, given).items():
        if key in of:
            assert not of[key][mask].any(), key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WITH_IGNORED)
def test_whatever_is_ignored_leaves_no_trace(device, name, dtype):
    given = arguments(name, device, dtype)
    expected = results_and_gradients(name, given)
    for poison, value in POISONS.items():
        changed = poisoned(name, given, value)
        found = results_and_gradients(name, changed)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert a.dtype == b.dtype and torch.equal(a, b), f"{poison}: result {i}"
        assert_zero_gradients(name, changed, found[-len(CASES[name].differentiable) :])
