# SPDX-License-Identifier: BSD-3-Clause
"""A model on all ranks of a process group; times and peaks of a step that they run together."""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..measure import MIB


def over_ranks(values, device):
    """The largest of each value on any rank."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def peak_mib(step, device):
    """Peak memory of a step in MiB beyond what was allocated before, on the rank with the highest peak; 0 on
    a CPU, where it is not measured."""
    if device.type == "cpu":
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = step()
    torch.cuda.synchronize()
    del results
    (peak,) = over_ranks([torch.cuda.max_memory_allocated() - before], device)
    return peak / MIB


def milliseconds(step, device, before=None):
    """Time on this rank of a step that all ranks start together.

    Args:
        before: a function that launches other work on a GPU first. The host launches the step meanwhile, and
            the GPUs start it together after a collective.
    """
    dist.barrier()
    if device.type == "cpu":
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if before is not None:
        before()
        dist.all_reduce(torch.zeros(1, device=device))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def shard(model, device):
    """FSDP2 over all ranks: every decoder layer of a causal language model, and its root, by
    ``fully_shard``."""
    # Where there is a GPU, the mesh that fully_shard would make is one of GPUs, also for a model on the CPU.
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
