# SPDX-License-Identifier: BSD-3-Clause
"""Tensor-parallel tiled MLPs on two processes of the CPU."""

import pytest
import torch
from processes import in_processes

import liger.nn


@in_processes(2, slow=False)
def test_tensor_parallel(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole, split = (liger.nn.TiledSwiGLUMLP(8, 12, bias=True, num_shards=3) for _ in range(2))
    split.load_state_dict(whole.state_dict())
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parallelize_module(split, init_device_mesh("cpu", (world,)), plan)
    x = torch.randn(2, 5, 8)
    results = []
    for module in (whole, split):
        start = x.clone().requires_grad_()
        y = module(start)
        y.square().sum().backward()
        grads = [p.grad for p in module.parameters()]
        grads = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        results.append([y, start.grad, *grads])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    wrong = liger.nn.TiledSwiGLUMLP(8, 12, bias=True)
    parallelize_module(wrong, init_device_mesh("cpu", (world,)), plan | {"down_proj": ColwiseParallel()})
    with pytest.raises(RuntimeError, match=r"down_proj.weight is .*Shard\(dim=0\).*, expected"):
        wrong(x)
