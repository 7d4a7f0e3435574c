"""``torch.set_default_dtype`` changes no bit of any result or gradient: no intermediate gets its dtype from there."""

from contextlib import contextmanager

import pytest
import torch
from cases import DTYPES
from public_callables import arguments, cases, outputs, weighted_sum

from liger import losses

DEFAULTS = [torch.bfloat16, torch.float64]


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def results_and_gradients(name, given):
    results = outputs(name, given)
    wanted = [t for t in given.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    return [*results, *torch.autograd.grad(weighted_sum([r for r in results if r.requires_grad]), wanted)]


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", cases())
def test_results_and_gradients_keep_their_bits(device, name, dtype):
    given = arguments(name, device, dtype)
    expected = results_and_gradients(name, given)
    for default in DEFAULTS:
        with default_dtype(default):
            found = results_and_gradients(name, given)
        assert_same_bits(found, expected)
