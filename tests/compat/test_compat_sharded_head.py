# SPDX-License-Identifier: BSD-3-Clause
"""LigerFusedLinearScaledCrossEntropyTPFunction as verl calls it, on two processes that share the
vocabulary."""

import torch
from processes import needs_gloo, on_processes, part_of
from torch.distributed import group

from liger.compat.names import MODULES, loaded

NAMES = MODULES["liger_kernel.ops"]


def apply(name, *args, **kwargs):
    return loaded(NAMES[name], name).apply(*args, **kwargs)


def _agrees(rank, world):
    hidden, weight = torch.randn(9, 8).requires_grad_(), torch.randn(12, 8).requires_grad_()
    labels = torch.randint(12, (9,))
    labels[3] = -100
    tensors = hidden, weight, labels
    whole = apply("LigerFusedLinearScaledCrossEntropyFunction", *tensors, 0.7, return_entropy=True)
    expected = torch.autograd.grad(whole[0].sum() + whole[1].square().sum(), (hidden, weight))

    part, hidden = part_of(weight, rank, world), hidden.detach().requires_grad_()
    nll, entropy = apply(
        "LigerFusedLinearScaledCrossEntropyTPFunction",
        hidden,
        part,
        labels,
        group.WORLD,
        temperature=0.7,
        ignore_index=-100,
        return_entropy=True,
    )
    torch.testing.assert_close((nll, entropy), whole, rtol=1e-5, atol=1e-5)
    (nll.sum() + entropy.square().sum()).backward()
    torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(part.grad, expected[1].chunk(world)[rank], rtol=1e-4, atol=1e-5)


@needs_gloo
def test_two_processes(tmp_path):
    on_processes(tmp_path, _agrees)
