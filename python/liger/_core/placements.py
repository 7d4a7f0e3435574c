"""Placements and strides of DTensors."""

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import _StridedShard


def is_sharded(placement):
    """Whether ranks hold one block each. Not of blocks that alternate, which other tensors are not cut into alike."""
    # Not type(placement) is Shard, which Dynamo of torch 2.10 denies of placements that it has traced.
    return placement.is_shard() and not isinstance(placement, _StridedShard)


def keep(tensor, dims):
    """The placements of a DTensor, but replicated wherever it is not sharded along one of ``dims``."""
    return tuple(p if is_sharded(p) and p.dim in dims else Replicate() for p in tensor.placements)


def where_sharded(placements, other):
    """The placements of another tensor of the same call: ``other`` where these ones shard, and replicated."""
    return tuple(other if is_sharded(p) else Replicate() for p in placements)


def dense_strides(local, shape):
    """The strides of a dense tensor of a shape, its dimensions in the order in which those of ``local`` lie."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
        strides[dim] = step
        step = step * shape[dim]
    return tuple(strides)
