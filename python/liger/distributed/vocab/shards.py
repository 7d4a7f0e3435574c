# SPDX-License-Identifier: BSD-3-Clause
"""The shard of classes of each process of a group, and the exchange of statistics between processes."""

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..._core.dtensor.placements import is_sharded
from ..._core.op.tensors import wrong_shape

# all_gather_into_tensor is the name up to torch 2.12.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class VocabShards(NamedTuple):
    """The shard of one process, as plain values, which can be arguments of an op."""

    start: int  # first class of this process
    vocab: int  # number of classes of all processes
    group_name: str


def group_of(op, group):
    """The group; None: the default group. Raises RuntimeError without process groups, or if this process is
    not a member."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(f"{op}: torch.distributed has no process group: call init_process_group first")
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise RuntimeError(f"{op}: this process is no member of the group of ranks {_ranks(group)}")
    return group


def _ranks(group):
    return dist.get_process_group_ranks(group)


def _mesh_dimension(op, name, mesh, group):
    """The dimension of a mesh along which this process has the ranks of a group."""
    for dimension in range(mesh.ndim):
        if _ranks(mesh.get_group(dimension)) == _ranks(group):
            return dimension
    found = " or ".join(str(_ranks(mesh.get_group(dimension))) for dimension in range(mesh.ndim))
    raise RuntimeError(
        f"{op}: {name} is a DTensor over ranks {found}, expected the ranks of the group, {_ranks(group)}"
    )


def vocab_group(tensor, dim):
    """The processes that share dimension ``dim`` of a DTensor, the classes; None if no or several dimensions
    of its mesh shard it."""
    dim %= max(tensor.dim(), 1)
    sharded = [i for i, p in enumerate(tensor.placements) if is_sharded(p) and p.dim == dim]
    return tensor.device_mesh.get_group(sharded[0]) if len(sharded) == 1 else None


def vocab_dimension(tensor, dim, has_rows):
    """The dimension of the mesh of a DTensor that shards the classes, its dimension ``dim``; None unless it
    is one, and along the others the tensor is whole or, with ``has_rows``, has rows of its own."""
    dim %= max(tensor.dim(), 1)
    sharded = [i for i, p in enumerate(tensor.placements) if is_sharded(p) and p.dim == dim]
    others = [p for i, p in enumerate(tensor.placements) if i not in sharded]
    if len(sharded) == 1 and all(p.is_replicate() or (has_rows and is_sharded(p)) for p in others):
        return sharded[0]
    return None


def local_shard(op, name, tensor, dim, group, vocab_size, rows=None):
    """(local tensor, group, number of all classes) of a DTensor; of a plain tensor the arguments.

    ``rows``: the other operand of a weight, which has the rows; None: the tensor has them itself. The
    gradient of a weight is a ``Partial`` sum along the dimensions of the mesh where processes have rows of
    their own: everywhere but along the vocabulary and where ``rows`` is replicated, or will be. A
    _StridedShard has rows of its own as well, but its ``is_shard()`` is False in torch 2.13.
    """
    if not isinstance(tensor, DTensor):
        return tensor, group, vocab_size
    mesh, dimension = tensor.device_mesh, vocab_dimension(tensor, dim, rows is None)
    if dimension is None:
        expected = f"(Shard(dim={dim}),)"
        if mesh.ndim > 1:
            expected = (
                f"Shard(dim={dim}) along one dimension of the mesh and Replicate() along the others: redistribute it, "
                "or call this within the forward of the module whose parameters fully_shard gathers"
            )
        placements = tuple(tensor.placements)
        raise RuntimeError(f"{op}: {name} is a DTensor with placements {placements}, expected {expected}")
    found = mesh.get_group(dimension)
    if group is not None and _ranks(group) != _ranks(found):
        raise RuntimeError(
            f"{op}: {name} is a DTensor over ranks {_ranks(found)}, expected the ranks of the group, {_ranks(group)}"
        )
    if vocab_size not in (None, tensor.shape[dim]):
        raise ValueError(
            f"{op}: vocab_size is {vocab_size}, expected the classes of {name}, a DTensor of shape "
            f"{tuple(tensor.shape)}"
        )
    gradient = list(tensor.placements)
    if rows is not None and mesh.ndim > 1:
        same = isinstance(rows, DTensor) and rows.device_mesh == mesh
        for i in range(mesh.ndim):
            replicated = same and (rows.placements[i].is_replicate() or rows.placements[i].is_partial())
            if i != dimension and not replicated:
                gradient[i] = Partial()
    return tensor.to_local(grad_placements=gradient), found, tensor.shape[dim]


def replicated_tensor(op, name, tensor, group):
    """The rows of the processes of the group, on each of them; plain tensors pass through.

    A DTensor keeps its sharding along other dimensions of its mesh: their processes have rows of their own.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    dimension = _mesh_dimension(op, name, tensor.device_mesh, group)
    placements = [
        Replicate() if i == dimension or p.is_partial() else p for i, p in enumerate(tensor.placements)
    ]
    return tensor.redistribute(placements=placements).to_local()


def whole_tensor(tensor):
    """The global tensor of a DTensor over any processes, on each of them; other values pass through."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def find_shard(op, name, classes, group, vocab_start, vocab_size):
    """The :class:`VocabShards` of a process with ``classes`` classes.

    Without ``vocab_start`` classes are sharded as by ``torch.chunk`` and DTensor: equal shards, a smaller
    last one and none on the processes after it. Raises RuntimeError if the number of classes does not fit,
    ValueError for a ``vocab_start`` or ``vocab_size`` out of range. No communication.
    """
    group = group_of(op, group)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if vocab_size is None and classes == 0:
        raise RuntimeError(f"{op}: {name} has no classes, expected at least one without vocab_size")
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"{op}: vocab_size is {vocab_size}, expected at least 1")
    if vocab_start is not None:
        if vocab_size is None:
            raise ValueError(f"{op}: vocab_start was given without vocab_size, expected both")
        if not 0 <= vocab_start <= vocab_size - classes:
            raise ValueError(
                f"{op}: vocab_start is {vocab_start}, expected {name} with its {classes} classes to lie within the "
                f"vocab_size of {vocab_size}"
            )
        return VocabShards(vocab_start, vocab_size, group.group_name)
    if vocab_size is None:
        return VocabShards(rank * classes, world * classes, group.group_name)
    shard = -(-vocab_size // world)
    start = min(rank * shard, vocab_size)
    expected = min(shard, vocab_size - start)
    if classes != expected:
        raise RuntimeError(
            f"{op}: {name} has {classes} classes, expected {expected} on rank {rank} of {world} for a vocab_size of "
            f"{vocab_size}; other layouts need vocab_start"
        )
    return VocabShards(start, vocab_size, group.group_name)


def gather(stats, group):
    """All-gather of the (statistics, rows) of every process: ((world, statistics, rows), the Work to wait for
    or None)."""
    world = dist.get_world_size(group)
    if world == 1:
        return stats.unsqueeze(0), None
    gathered = stats.new_empty(world * stats.shape[0], stats.shape[1])
    work = all_gather_single(gathered, stats, group=group, async_op=True)
    return gathered.view(world, *stats.shape), work


def gathered(stats, group):
    """The result of :func:`gather`, which this waits for."""
    found, work = gather(stats, group)
    if work is not None:
        work.wait()
    return found


def layer_to_check(op, weight, bias):
    """Weight and bias of a process for the checks of ops that need a class; a process without classes gets
    one class."""
    if weight.dim() != 2 or weight.shape[0] > 0:
        return weight, bias
    if bias is not None and bias.shape != (0,):
        raise wrong_shape(op, "bias", bias, "(0,), one value per row of weight")
    return weight.new_empty(1, weight.shape[1]), None if bias is None else bias.new_empty(1)
