# SPDX-License-Identifier: BSD-3-Clause
"""Asking for the graph of a gradient changes nothing about the gradient, nor about what was given."""

import pytest
import torch
from public_callables import CASES, arguments, differentiable_outputs, weighted_sum


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
