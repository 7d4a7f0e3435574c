# SPDX-License-Identifier: BSD-3-Clause
"""Training steps of one method at one size under FSDP2 or ZeRO-3, on all ranks of the cell."""

import contextlib
import os
import time

import torch
import torch.distributed as dist

from liger_bench.devices import on_ranks
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


def timed_steps(step, batches, machine, least=1):
    """The record of some steps of every rank, after a warm-up: times and peak of the slowest and greediest
    rank.

    Args:
        least: steps of the warm-up, at least.
    """
    begin = time.perf_counter()
    losses, times = [step(batches[0])], []
    losses[0].item()
    (first,) = largest([time.perf_counter() - begin], machine)
    # Of slow steps one is enough.
    is_slow = first > 2 * training.SLOW_STEP
    warm_up, steps = (1, 1) if is_slow else (training.WARM_UP, training.STEPS)
    losses += [step(batches[0]) for _ in range(max(warm_up, least) - 1)]
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


def fsdp2(made, machine):
    """The step of a Training whose decoder layers and root are sharded by ``fully_shard``."""
    made.build()
    on_ranks.shard(made.model, machine.device)
    made.optimizer = made.make_optimizer(made.model.parameters())
    return made.step


def zero3(made, machine, batch, offload=False):
    """The step of a Training under ZeRO-3 of DeepSpeed; ``offload`` moves weights and optimizer states to the
    host."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if machine.gpu else "cpu")
    import deepspeed

    zero = {"stage": 3}
    if offload:
        host = {"device": "cpu", "pin_memory": machine.gpu}
        zero |= {"offload_optimizer": host, "offload_param": host}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": zero,
        "fp16" if made.size.dtype == torch.float16 else "bf16": {"enabled": True},
        # The optimizers of DeepSpeed are compiled when they are first used.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    made.build()
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-5)
    engine, *_ = deepspeed.initialize(
        model=made.model, optimizer=optimizer, config=config, dist_init_required=False
    )

    def step(tokens):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def measure(cell, machine, entered=None, size=None, shard=fsdp2):
    """As training.measure, sharded over the ranks by ``shard(made, machine)``; batch and sequence are of each
    rank."""
    given = cell.settings
    start(machine)
    size = size or training.size_of(given.get("model", "1b"), machine)
    made = training.Training(entered or training.contestant(cell.method, machine), size, machine)
    count = training.STEPS * dist.get_world_size()
    batches = text.batches(machine, size.config["vocab_size"], count, given["batch"], given["sequence"])
    batches = batches[dist.get_rank() :: dist.get_world_size()]
    with made.contestant.context():
        record = timed_steps(shard(made, machine), batches, machine, made.contestant.warm_up)
    with contextlib.suppress(AssertionError):  # DeepSpeed may have destroyed it already
        dist.destroy_process_group()
    return record
