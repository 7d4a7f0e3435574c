# SPDX-License-Identifier: BSD-3-Clause
"""Whole tensors and their sharded forms, and the comparison of a function of both."""

import ranks
import torch
from cases import error
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

R = Replicate()
B, T, H, V = 2, 7, 16, 40  # T does not divide


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(ranks.DEVICE, dtype)


def targets(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(V, shape, generator=generator)
    target.view(-1)[1::5] = -100
    return target.to(ranks.DEVICE)


def distribute(tensor, *placements):
    """The parts of a tensor that all ranks have; partial sums whose sum it is."""
    if placements[0] == Partial():
        part = (1 + 2 * ranks.RANK) / ranks.WORLD**2  # of all ranks: 1
        return DTensor.from_local(tensor * part, ranks.mesh(), placements)
    return distribute_tensor(tensor, ranks.mesh(), placements, src_data_rank=None)


def compare(function, tensors, placements, gathers=False):
    """Results and gradients of a function of whole tensors against the same function of distributed ones.

    Returns the distributed results and gradients. Unless it ``gathers``, it reduces scalars at most.
    """

    def run(inputs):
        leaves = [t.detach().requires_grad_(t.is_floating_point()) if t is not None else None for t in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = [random(*o.shape, seed=1 + i).to(o.dtype) for i, o in enumerate(outputs)]
        return leaves, outputs, upstream

    leaves, outputs, upstream = run(tensors)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    used = dict(allow_unused=True)
    grads = torch.autograd.grad(outputs, wanted, upstream, **used)

    sharded = [None if t is None else distribute(t, p) for t, p in zip(tensors, placements, strict=True)]
    with CommDebugMode() as communication:
        leaves, results, upstream = run(sharded)
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        upstream = [
            distribute(u, *(R if p.is_partial() else p for p in r.placements))
            for u, r in zip(upstream, results, strict=True)
        ]
        their_grads = torch.autograd.grad(results, wanted, upstream, **used)
    if not gathers:
        counts = {str(op): n for op, n in communication.get_comm_counts().items()}
        assert not any("reduce" not in op or "scatter" in op for op in counts), counts
    for ours, whole in zip([*results, *their_grads], [*outputs, *grads], strict=True):
        if whole is None:
            assert ours is None
            continue
        full = ours.full_tensor()
        assert full.shape == whole.shape
        if whole.is_floating_point():
            assert error(full, whole) <= 32 * torch.finfo(whole.dtype).eps
        else:
            torch.testing.assert_close(full, whole)
    return results, their_grads
