# SPDX-License-Identifier: BSD-3-Clause
"""Conversion between DTensors with any token dimensions and the rows of the loss ops, without communication.

Flattening gives each rank the rows of its own shard, so the order of rows over all ranks differs from the
order in the whole tensor. No loss depends on that order if all tensors with one row per token are flattened
alike. :func:`unflatten` restores the shape of per-row results.
"""

import torch
from torch.distributed.tensor import DTensor, Shard

from .mixed import MixedTensors
from .placements import restrict_sharding, where_sharded, wrapped


def align(op, x, target, token_weight, names):
    """(x, target, token_weight) with the same sharding of token dimensions. Where x is sharded along its last
    dimension or partial, its tokens are sharded instead. ``names``: of x and of the target in messages.

    Raises:
        RuntimeError: a target or token weight that is not a DTensor on the mesh of x.
    """
    tokens = tuple(
        p if p.is_replicate() or same == p else Shard(max(x.dim() - 2, 0))
        for p, same in zip(x.placements, restrict_sharding(x, range(x.dim() - 1)), strict=True)
    )
    return x.redistribute(placements=tokens), *follow(op, x, tokens, target, token_weight, names)


def follow(op, x, tokens, target, token_weight, names):
    """(target, token_weight) with these placements.

    Raises:
        RuntimeError: one that is not a DTensor on the mesh of x.
    """
    moved = []
    for name, other in ((names[1], target), ("token_weight", token_weight)):
        if other is not None and not isinstance(other, DTensor):
            raise MixedTensors(
                f"{op}: {name} is a plain tensor, expected a DTensor on {x.device_mesh}, as {names[0]} is: use "
                "torch.distributed.tensor.distribute_tensor or DTensor.from_local"
            )
        if other is not None and other.device_mesh != x.device_mesh:
            raise MixedTensors(
                f"{op}: {name} is on {other.device_mesh}, expected the mesh of {names[0]}, {x.device_mesh}"
            )
        moved.append(None if other is None else other.redistribute(placements=tokens))
    return moved


def flatten(tensor, dims):
    """(rows, ...) of a tensor whose first ``dims`` dimensions are token dimensions."""
    local, shape = tensor.to_local().flatten(0, dims - 1), torch.Size(tensor.shape)
    placements = where_sharded(tensor.placements, Shard(0))
    return wrapped(local, tensor.device_mesh, placements, (shape[:dims].numel(), *shape[dims:]))


def unflatten(rows, like):
    """One value per row, with the shape and placements of ``like``, the tensor before :func:`flatten`."""
    local = rows.to_local().reshape(like.to_local().shape)
    return wrapped(local, like.device_mesh, like.placements, like.shape)
