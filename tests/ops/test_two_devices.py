# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of a GPU that is not the current one."""

import pytest
import torch
import torch.nn.functional as F
from cases import assert_as_exact_as_torch

import liger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_ops_run_where_their_tensors_are(device):
    with torch.cuda.device(0):
        x = torch.randn(64, 40000, device="cuda:1", requires_grad=True)
        target = torch.randint(40000, (64,), device="cuda:1")
        loss = liger.cross_entropy(x, target)
        (grad,) = torch.autograd.grad(loss, x)
        assert loss.device == grad.device == x.device and torch.cuda.current_device() == 0
        assert_as_exact_as_torch(loss, F.cross_entropy(x, target), F.cross_entropy(x.double(), target))
