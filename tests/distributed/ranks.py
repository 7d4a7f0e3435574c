# SPDX-License-Identifier: BSD-3-Clause
"""The process group that a distributed test runs in: who this process is, and where its tensors live."""

import datetime
import functools
import os

import torch
import torch.distributed as dist

# A rank is started by torchrun, or by conftest.py in the same way; any other process only reports for its
# ranks.
IS_RANK = "RANK" in os.environ
# Processes that run a test, LIGER_TEST_RANKS or two; a file that needs another number sets RANKS.
DEFAULT_WORLD, WORLDS = int(os.environ.get("LIGER_TEST_RANKS", 2)), (2, 4, 8)
# For meshes of two dimensions.
MESH_WORLD = max(4, DEFAULT_WORLD)
WORLD = int(os.environ["WORLD_SIZE"]) if IS_RANK else DEFAULT_WORLD
RANK = int(os.environ.get("RANK", 0))
ON_GPU = torch.cuda.device_count() >= WORLD
DEVICE = torch.device("cuda", RANK) if ON_GPU else torch.device("cpu")
# A collective that some rank never joins fails after this, rather than hang.
PATIENCE = datetime.timedelta(seconds=60)


def start():
    """Joins the process group; every rank must call it."""
    if WORLD not in WORLDS:
        raise RuntimeError(f"the distributed tests want {', '.join(map(str, WORLDS))} ranks, got {WORLD}")
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    # Frameworks that offload to the CPU also reduce there.
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE, device_id=DEVICE if ON_GPU else None)


@functools.cache
def mesh():
    """All ranks in one dimension."""
    return dist.device_mesh.init_device_mesh(DEVICE.type, (WORLD,))


@functools.cache
def mesh_of(*shape, names=None):
    """All ranks in several dimensions."""
    return dist.device_mesh.init_device_mesh(DEVICE.type, shape, mesh_dim_names=names)


def total(value):
    """The sum of a scalar tensor over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def assert_same_on_all(value):
    """Every rank has the same bits of a tensor; a sum over ranks would round."""
    value = value.detach().contiguous()
    of_ranks = [torch.empty_like(value) for _ in range(WORLD)]
    dist.all_gather(of_ranks, value)
    for rank, other in enumerate(of_ranks):
        assert torch.equal(other, value), f"rank {rank} has {other}, rank {RANK} has {value}"


def whole(tensor):
    """The full value of a tensor that may be sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
