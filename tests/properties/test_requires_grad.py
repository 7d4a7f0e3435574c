# SPDX-License-Identifier: BSD-3-Clause
"""A result requires grad exactly where it depends on something that does."""

import pytest
import torch
from public_callables import CASES, arguments, outputs, weighted_sum

# The number of first results that have a gradient, of those whose others are metrics.
WITH_METRICS = {"cross_entropy metrics": 1, "fused_linear_ce metrics": 1, "fused_linear_logprobs metrics": 2}
WITH_METRICS |= {name: 1 for name, case in CASES.items() if case.public.startswith("losses.")}


@pytest.mark.parametrize("name", CASES)
def test_results_require_grad_where_they_depend_on_it(name, device):
    for key in CASES[name].differentiable:
        given = arguments(name, device, requires_grad=False)
        before = outputs(name, given)
        x = given[key].clone().requires_grad_()
        after = outputs(name, {**given, key: given[key] + torch.randn_like(x)})
        results = outputs(name, {**given, key: x})
        for i, (result, old, new) in enumerate(zip(results, before, after, strict=True)):
            metric = i >= WITH_METRICS.get(name, len(results))
            assert result.requires_grad == (not metric and not torch.equal(old, new)), key
            if result.requires_grad:
                (grad,) = torch.autograd.grad(weighted_sum([result]), x, retain_graph=True)
                assert grad.abs().max() > 0, key


@pytest.mark.parametrize("name", CASES)
def test_nothing_requires_grad_where_nothing_does(name, device):
    given = arguments(name, device, requires_grad=False)
    assert not any(result.requires_grad for result in outputs(name, given))
    given = arguments(name, device)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not any(result.requires_grad for result in outputs(name, given))
