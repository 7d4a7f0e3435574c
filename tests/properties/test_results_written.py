# SPDX-License-Identifier: BSD-3-Clause
"""Results may be written in place, as results of torch: a residual that is added to them, a dropout."""

import pytest
import torch
from public_callables import CASES, arguments, cases, differentiable_outputs, weighted_sum

# Their backward reads a result, as the backward of torch.softmax does.
READ_BY_THE_BACKWARD = ["softmax", "nn.Softmax", "fused_add_rms_norm"]


@pytest.mark.parametrize("name", cases(differentiable=True))
def test_gradients_after_a_write(device, name):
    given = arguments(name, device)
    leaves = [given[key] for key in CASES[name].differentiable]
    expected = torch.autograd.grad(weighted_sum(differentiable_outputs(name, given)), leaves)
    results = differentiable_outputs(name, given)
    for result in results:
        result.add_(1.0)
    if name in READ_BY_THE_BACKWARD:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(weighted_sum(results), leaves)
        return
    for a, b in zip(torch.autograd.grad(weighted_sum(results), leaves), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
