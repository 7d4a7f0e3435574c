# SPDX-License-Identifier: BSD-3-Clause
"""First derivatives of every public callable: against differences of its results in float64, and unchanged by
a request for their graph."""

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


@pytest.mark.parametrize("name", CASES)
def test_first_derivative_with_create_graph(name, device):
    given = arguments(name, device)
    wanted = [given[key] for key in CASES[name].differentiable]

    def gradients(**how):
        total = weighted_sum(differentiable_outputs(name, given))
        return torch.autograd.grad(total, wanted, **how)

    before = [w.detach().clone() for w in wanted]
    expected = gradients()
    assert not any(grad.requires_grad for grad in expected)
    for retain in (True, False):
        for grad, plain in zip(gradients(create_graph=True, retain_graph=retain), expected, strict=True):
            assert torch.equal(grad, plain) and grad.stride() == plain.stride(), f"retain_graph={retain}"
    assert all(map(torch.equal, before, wanted))


@pytest.mark.parametrize("name", CASES)
def test_a_kept_graph_gives_the_same_again(name, device):
    given = arguments(name, device)
    wanted = [given[key] for key in CASES[name].differentiable]
    total = weighted_sum(differentiable_outputs(name, given))
    first = torch.autograd.grad(total, wanted, create_graph=True)
    second = torch.autograd.grad(total, wanted, retain_graph=True)
    last = torch.autograd.grad(total, wanted)
    for a, b, c in zip(first, second, last, strict=True):
        assert torch.equal(a, b) and torch.equal(b, c)
