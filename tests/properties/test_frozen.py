# SPDX-License-Identifier: BSD-3-Clause
"""A tensor that requires no grad gets none, and the others get what they get where all require grad."""

import pytest
import torch
from public_callables import CASES, arguments, interpretable, outputs, weighted_sum


def gradients(name, given, wanted, used=None):
    """Those of the wanted tensors by name, from the sum of one result or of all."""
    leaves = {
        key: given[key].detach().clone().requires_grad_(key in wanted) for key in CASES[name].differentiable
    }
    results = outputs(name, given | leaves)
    results = [r for i, r in enumerate(results) if used in (None, i) and r.requires_grad]
    if results:
        weighted_sum(results).backward()
    return {key: leaf.grad for key, leaf in leaves.items()}


@pytest.mark.parametrize("name", interpretable())
def test_gradients_of_some_are_those_of_all(name, device):
    given = arguments(name, device)
    keys = CASES[name].differentiable
    number = len(outputs(name, given))
    for used in (None, *(range(number) if number > 1 else ())):
        whole = gradients(name, given, keys, used)
        for key in keys:
            for wanted in ({key}, set(keys) - {key}):
                for other, grad in gradients(name, given, wanted, used).items():
                    said = f"{other} of {used}, {wanted} trained"
                    assert grad is None or other in wanted, said
                    if other in wanted and whole[other] is not None:
                        grad = torch.zeros_like(whole[other]) if grad is None else grad
                        # A product alone and a part of a larger one may be summed in other orders.
                        torch.testing.assert_close(grad, whole[other], rtol=1e-5, atol=1e-6, msg=said)
