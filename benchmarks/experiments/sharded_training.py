"""Training steps of one method at one size under FSDP2, on all ranks of the cell."""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from liger_bench.measure import spread

from . import text, training


def start(machine):
    """Joins the process group that torchrun describes; without torchrun, one of this process alone."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29513")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    # Frameworks that offload to the CPU also reduce there.
    dist.init_process_group("cpu:gloo,cuda:nccl" if machine.gpu else "gloo")


def largest(values, machine):
    """The largest of each value on any rank."""
    tensor = torch.tensor(values, dtype=torch.float64, device=machine.device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def timed_steps(step, batches, machine, steps=training.STEPS):
    """The record of some steps of every rank, after a warm-up: times and peak of the slowest and greediest rank."""
    losses, times = [step(batches[0]) for _ in range(training.WARM_UP)], []
    if machine.gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for i in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        losses.append(step(batches[i % len(batches)]))
        if machine.gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    times = largest(times, machine)
    peak = torch.cuda.max_memory_allocated() if machine.gpu else 0
    (peak,) = largest([float(peak)], machine)
    milliseconds = spread(times)
    tokens = batches[0].numel() * dist.get_world_size()
    return {
        "ms": milliseconds,
        "tokens_per_second": tokens / milliseconds["median"] * 1e3,
        "peak_bytes": int(peak) if machine.gpu else None,
        "first_loss": float(losses[0]),
        "losses": [float(loss) for loss in losses],
        "ranks": dist.get_world_size(),
    }


def measure(cell, machine, entered=None, size=None):
    """As training.measure, with decoder layers and root sharded by ``fully_shard``; batch and sequence of each rank."""
    given = cell.settings
    start(machine)
    size = size or training.size_of(given.get("model", "1b"), machine)
    made = training.Training(entered or training.contestant(cell.method, machine), size, machine)
    count = training.STEPS * dist.get_world_size()
    batches = text.batches(machine, size.config["vocab_size"], count, given["batch"], given["sequence"])
    batches = batches[dist.get_rank() :: dist.get_world_size()]
    with made.contestant.context():
        made.build()
        for layer in made.model.model.layers:
            fully_shard(layer)
        fully_shard(made.model)
        made.optimizer = made.make_optimizer(made.model.parameters())
        record = timed_steps(made.step, batches, machine)
    dist.destroy_process_group()
    return record
