# SPDX-License-Identifier: BSD-3-Clause
"""Placements and strides of DTensors."""

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard


def is_sharded(placement):
    """True if each rank has one contiguous block. False for _StridedShard, whose blocks alternate between
    ranks: other tensors of the call would not be split alike."""
    # Not ``type(placement) is Shard``, which is False for placements traced by Dynamo of torch 2.10.
    return placement.is_shard() and not isinstance(placement, _StridedShard)


def restrict_sharding(tensor, dims):
    """The placements of a DTensor, replicated wherever it is not sharded along one of ``dims``."""
    return tuple(p if is_sharded(p) and p.dim in dims else Replicate() for p in tensor.placements)


def where_sharded(placements, other):
    """Placements for another tensor of the call: ``other`` where ``placements`` shard, else replicated."""
    return tuple(other if is_sharded(p) else Replicate() for p in placements)


def wrapped(local, mesh, placements, shape):
    """A DTensor of this shape, dense, from the local tensor of each rank."""
    strides = dense_strides(local, shape)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def dense_strides(local, shape):
    """The strides of a dense tensor of a shape, with the dimension order of ``local`` in memory."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
        strides[dim] = step
        step = step * shape[dim]
    return tuple(strides)
