# SPDX-License-Identifier: BSD-3-Clause
"""Backwards over a batch of upstream gradients: is_grads_batched, which jacobian(vectorize=True) uses."""

import pytest
import torch
from public_callables import CASES, arguments, differentiable_outputs

BATCH = 3
# The last one frees the graph.
HOW = {"retain_graph": True}, {"create_graph": True}, {}


@pytest.mark.parametrize("name", CASES)
def test_batched_gradients_are_those_of_each(name, device):
    given = arguments(name, device)
    wanted = [given[key] for key in CASES[name].differentiable]
    results = differentiable_outputs(name, given)
    upstream = [torch.randn(BATCH, *r.shape, dtype=r.dtype, device=device) for r in results]
    each = [
        torch.autograd.grad(results, wanted, [u[i] for u in upstream], retain_graph=True)
        for i in range(BATCH)
    ]
    for how in HOW:
        batched = torch.autograd.grad(results, wanted, upstream, is_grads_batched=True, **how)
        for i in range(BATCH):
            for grad, expected in zip(batched, each[i], strict=True):
                torch.testing.assert_close(grad[i], expected, rtol=1e-5, atol=1e-5)
