# SPDX-License-Identifier: BSD-3-Clause
"""Every public callable is covered by the property tests, and every case runs and differentiates."""

import pytest
import torch
from public_callables import CASES, EXEMPT, arguments, differentiable_outputs, public_names, weighted_sum


def test_every_public_callable_has_a_case():
    covered = {case.public for case in CASES.values()}
    missing = set(public_names()) - covered - set(EXEMPT)
    assert not missing, f"no case in a module of tests/support/api/public_callables: {sorted(missing)}"
    superfluous = set(EXEMPT) - (set(public_names()) - covered)
    assert not superfluous, f"in EXEMPT, and with a case or not public: {sorted(superfluous)}"
    assert covered <= set(public_names()), f"not public: {sorted(covered - set(public_names()))}"


@pytest.mark.parametrize("name", CASES)
def test_case_runs_and_has_gradients(name, device):
    given = arguments(name, device)
    wanted = [given[key] for key in CASES[name].differentiable]
    grads = torch.autograd.grad(weighted_sum(differentiable_outputs(name, given)), wanted)
    for key, grad in zip(CASES[name].differentiable, grads, strict=True):
        assert torch.isfinite(grad).all() and grad.abs().max() > 0, key
