# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of every public callable against differences of its results, in float64."""

import pytest
import torch
from public_callables import CASES, arguments, differentiable_outputs, weighted_sum

# The clipped ratio is a constant factor of its gradient: the loss is not the antiderivative.
NOT_EXACT = {"losses.GRPO cispo"}


@pytest.mark.parametrize("name", sorted(CASES.keys() - NOT_EXACT))
def test_gradcheck(name, float64_device):
    given = arguments(name, float64_device, torch.float64)
    # Weights of experts are float32, in which differences are not exact enough.
    keys = [key for key in CASES[name].differentiable if given[key].dtype == torch.float64]
    assert keys

    def results(*tensors):
        found = differentiable_outputs(name, given | dict(zip(keys, tensors, strict=True)))
        # Each result alone, and all of them together, which a backward may treat in another way.
        return *found, weighted_sum(found)

    assert torch.autograd.gradcheck(
        results, [given[key] for key in keys], fast_mode=True, rtol=1e-5, atol=1e-6
    )
