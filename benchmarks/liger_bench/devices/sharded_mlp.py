# SPDX-License-Identifier: BSD-3-Clause
"""One gated MLP under FSDP2 or ZeRO-3 on all GPUs of a host, whole and tiled: time and peak memory against
length.

Each rank has one sequence. A round is one forward and backward of every contestant, in another order each
time; a time is the median of the rounds on the slowest rank, a peak is what a step allocates on the greediest
rank beyond its shard of the weights, input and upstream gradient (``absolute``: with these). Contestants get
the same weights, and their results are compared with the results of the first.
"""

import importlib.util
import statistics
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from liger.nn import SwiGLUMLP, TiledSwiGLUMLP

from ..measure import MIB, PROVIDER_ERRORS, WRONG
from .on_ranks import milliseconds, over_ranks, peak_mib

SHARDS = 4


class PlainMLP(SwiGLUMLP):
    """The MLP as in model code."""

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def contestants(hidden, intermediate):
    """name -> constructor of the MLP; the first is the one without tiling."""
    made = {
        "regular": lambda: PlainMLP(hidden, intermediate),
        "liger": lambda: SwiGLUMLP(hidden, intermediate, inplace=True),
        f"liger tiled, {SHARDS} shards": lambda: TiledSwiGLUMLP(hidden, intermediate, num_shards=SHARDS),
        "liger tiled": lambda: TiledSwiGLUMLP(hidden, intermediate),
    }
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.tiled_mlp import LigerTiledSwiGLUMLP

        config = SimpleNamespace(
            hidden_size=hidden, intermediate_size=intermediate, hidden_act="silu", mlp_bias=False
        )
        made[f"liger-kernel tiled, {SHARDS} shards"] = lambda: LigerTiledSwiGLUMLP(config, num_shards=SHARDS)
    return made


# --- frameworks ---------------------------------------------------------------------------------------------


class Fsdp2:
    def __init__(self, mlp):
        from torch.distributed.fsdp import fully_shard

        self.module = fully_shard(mlp)

    def step(self, x, grad_y):
        y = self.module(x)
        y.backward(grad_y)
        return y

    def clear(self):
        self.module.zero_grad(set_to_none=True)


class Zero3:
    def __init__(self, mlp):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        }
        # ZeRO resets gradients in step(); the learning rate keeps the weights equal for all contestants.
        optimizer = torch.optim.SGD(mlp.parameters(), lr=0.0)
        self.engine, *_ = deepspeed.initialize(model=mlp, config=config, optimizer=optimizer)
        self.stepped = True

    def step(self, x, grad_y):
        y = self.engine(x)
        # The engine's backward takes a scalar; the gradient of this one with respect to y is grad_y.
        self.engine.backward(_Pairing.apply(y, grad_y))
        self.stepped = False
        return y

    def clear(self):
        if not self.stepped:
            self.engine.step()
        self.stepped = True


class _Pairing(torch.autograd.Function):
    """A scalar with a given gradient, without an allocation of the size of y."""

    @staticmethod
    def forward(ctx, y, grad_y):
        ctx.save_for_backward(grad_y)
        return y.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0], None


FRAMEWORKS = {"fsdp2": Fsdp2, "zero3": Zero3}


# --- measuring ----------------------------------------------------------------------------------------------


@dataclass
class Contestant:
    name: str
    wrapped: object

    def prepare(self, x):
        self.wrapped.clear()
        x.grad = None

    def step(self, x, grad_y):
        return self.wrapped.step(x, grad_y)


def _error(values, expected):
    return max(
        ((a.double() - e.double()).norm() / e.double().norm()).item()
        for a, e in zip(values, expected, strict=True)
    )


def measure_length(runners, tokens, hidden, shard_bytes, rounds, device):
    """{contestant: {"ms", "peak_mib", "absolute_mib", "error"}} for one sequence length."""
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(1, tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    grad_y = torch.randn_like(x)
    results, expected, order = {}, None, []
    for runner in runners:
        try:
            runner.prepare(x)
            y = runner.step(x, grad_y).detach()
        except PROVIDER_ERRORS as error:  # the same on every rank
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            results[runner.name] = {"status": "failed", "reason": reason}
            continue
        order.append(runner)
        # Every 61st row: a copy of all rows would change the measured memory.
        found = [y[:, ::61].clone(), x.grad[:, ::61].clone()]
        expected = expected or found
        (error,) = over_ranks([_error(found, expected)], device)
        del y, found
        runner.prepare(x)
        peak = peak_mib(lambda runner=runner: runner.step(x, grad_y), device)
        runner.prepare(x)
        absolute = peak + (shard_bytes + x.nbytes + grad_y.nbytes) / MIB
        results[runner.name] = {"peak_mib": peak, "absolute_mib": absolute, "error": error, "samples": []}
    for index in range(rounds):
        shift = index % len(order)
        for runner in order[shift:] + order[:shift]:
            runner.prepare(x)
            elapsed = milliseconds(lambda runner=runner: runner.step(x, grad_y), device)
            results[runner.name]["samples"] += over_ranks([elapsed], device)
    for runner in order:
        result = results[runner.name]
        result["ms"] = statistics.median(result.pop("samples"))
        result["status"] = "ok" if result["error"] <= WRONG else "wrong"
    return results


def build(framework, hidden, intermediate, device):
    runners = []
    state = None
    for name, make in contestants(hidden, intermediate).items():
        with torch.device(device):
            mlp = make().to(torch.bfloat16)
        state = state or {key: value.clone() for key, value in mlp.state_dict().items()}
        for value in state.values():
            dist.broadcast(value, 0)
        mlp.load_state_dict(state)
        runners.append(Contestant(name, FRAMEWORKS[framework](mlp)))
    return runners


def measure_lengths(framework, lengths, hidden, intermediate, rounds, device):
    """[{"tokens", "contestants"}] of every length, in a process group that exists; ``device`` is the device
    of the rank."""
    device = torch.device(device)
    runners = build(framework, hidden, intermediate, device)
    shard_bytes = 3 * hidden * intermediate * 2 // dist.get_world_size()
    records = []
    for tokens in lengths:
        found = measure_length(runners, tokens, hidden, shard_bytes, rounds, device)
        records.append({"tokens": tokens, "contestants": found})
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return records
