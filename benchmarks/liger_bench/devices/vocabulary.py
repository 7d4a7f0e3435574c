# SPDX-License-Identifier: BSD-3-Clause
"""The lm_head with its vocabulary sharded over all GPUs of a host, against the whole lm_head on one of them.

fused_linear_ce and fused_linear_logprobs, forward and backward. "one device": every rank computes the whole
lm_head, without communication. "sharded": the vocabulary-parallel op, with a shard of the weight on each
rank. "GEMMs": three GEMMs of a shard by cuBLAS, of the tokens that are not ignored. Speed is the time of one
device over the time of the ranks and over their number: 1 is perfect scaling. A round is one step of each, in
another order each time, on devices that GEMMs have heated; times are the slowest rank's, the median
over rounds. Peaks are what a step allocates beyond its inputs, on the rank with the highest peak; "workspace"
is without the gradients, which every method returns.
"""

import functools
import statistics
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

import liger

from ..harness import normal, training_work
from ..heads.inputs import layer
from ..measure import MIB, WRONG, Gpu, relative_error
from ..ops.fused_linear_ce import three_gemms
from ..reports.verdict import SAME_MEMORY_MIB
from .on_ranks import milliseconds, over_ranks, peak_mib

OPS = ("fused_linear_ce", "fused_linear_logprobs")
ONE, SHARDED, GEMMS = "one device", "sharded", "GEMMs"
SPEED_GOAL = 0.92
HEAT_MS = 100
MIN_ROUNDS = 3


@dataclass(frozen=True)
class Head:
    """The sizes of a row. ``ignored``: share of the tokens whose target is ignored."""

    op: str
    tokens: int
    hidden: int
    vocabulary: int
    ignored: float = 0.0

    @property
    def name(self):
        ignored = f", {self.ignored:.0%} ignored" if self.ignored else ""
        return f"{self.op} {self.tokens}x{self.hidden}x{self.vocabulary}{ignored}"

    def inputs(self, options):
        """The same tensors on all ranks."""
        torch.manual_seed(0)
        found = {
            **layer(options, self.tokens, self.hidden, self.vocabulary),
            # Of one sign: the relative error of a sum near zero says nothing.
            "advantages": normal(options, self.tokens).float().abs(),
        }
        found["target"][: round(self.ignored * self.tokens)] = -100
        for tensor in found.values():
            dist.broadcast(tensor, 0)
        return found

    def loss(self, sharded):
        """The loss as a function of named tensors."""
        op = getattr(liger, self.op)
        options = {"vocab_size": self.vocabulary} if sharded else {}

        def loss(t):
            value = op(t["input"], t["weight"], t["target"], **options)
            return value if self.op == "fused_linear_ce" else -(value * t["advantages"]).mean()

        return loss


def shard_of(weight):
    return weight.chunk(dist.get_world_size())[dist.get_rank()]


def works(head, inputs):
    """{contestant: its Work}."""
    made = {sharded: training_work(head.loss(sharded), (), ("input", "weight")) for sharded in (False, True)}
    shard = inputs | {"weight": shard_of(inputs["weight"]).clone()}
    return {ONE: made[False](inputs), SHARDED: made[True](shard), GEMMS: three_gemms(valid_only=True)(shard)}


def _error(results, whole):
    """The largest relative error of the loss and the gradients, of every 61st row."""
    expected = {**whole, "dweight": shard_of(whole["dweight"])}
    return max(
        relative_error(value[::61] if value.dim() else value, exact[::61] if exact.dim() else exact)
        for value, exact in ((results[name], expected[name]) for name in expected)
    )


def measure(head, options, rounds, device, heat, seconds_left):
    """The record of a row. ``heat``: None, or a function that keeps a GPU busy; ``seconds_left()``: the same
    on all ranks."""
    inputs = head.inputs(options)
    contestants = works(head, inputs)
    record = {**asdict(head), "name": head.name, "contestants": {}}
    whole = contestants[ONE].run()
    (error,) = over_ranks([_error(contestants[SHARDED].run(), whole)], device)
    del whole
    for name, work in contestants.items():
        found = record["contestants"][name] = {}
        if name != GEMMS:
            weight = inputs["weight"] if name == ONE else shard_of(inputs["weight"])
            found["peak_mib"] = peak_mib(work.run, device)
            found["workspace_mib"] = max(
                found["peak_mib"] - (weight.nbytes + inputs["input"].nbytes) / MIB, 0.0
            )
    samples = {name: [] for name in contestants}
    names = list(contestants)
    for index in range(rounds):
        if index >= MIN_ROUNDS and seconds_left() <= 0:
            break
        for name in names[index % 3 :] + names[: index % 3]:
            elapsed = milliseconds(contestants[name].run, device, heat)
            samples[name] += over_ranks([elapsed], device)
    for name, times in samples.items():
        record["contestants"][name] |= {"ms": statistics.median(times), "samples_ms": times}
    ratios = [a / b for a, b in zip(samples[ONE], samples[SHARDED], strict=True)]
    return record | verdict(record["contestants"], statistics.median(ratios) / dist.get_world_size(), error)


def verdict(contestants, speed, error):
    """What a row shows, and whether the goals are met."""
    one, sharded = contestants[ONE], contestants[SHARDED]
    measured = one["peak_mib"] > 0  # not on a CPU
    return {
        "speed": speed,
        "speed_goal": SPEED_GOAL,
        "speed_met": speed >= SPEED_GOAL,
        "of_gemms": sharded["ms"] / contestants[GEMMS]["ms"],
        "memory": sharded["peak_mib"] / one["peak_mib"] if measured else None,
        "memory_met": sharded["peak_mib"] <= one["peak_mib"] + SAME_MEMORY_MIB if measured else None,
        "error": error,
        "status": "ok" if error <= WRONG else "wrong",
    }


def measure_all(heads, options, rounds, seconds, device):
    """The records of the rows that start in time; a row that does not has only its sizes, its name and a
    status."""
    begin = time.monotonic()

    def seconds_left():
        (elapsed,) = over_ranks([time.monotonic() - begin], device)
        return seconds - elapsed

    heat = functools.partial(Gpu().heat, HEAT_MS) if device.type == "cuda" else None
    records = []
    for head in heads:
        if records and seconds_left() <= 0:
            records.append({**asdict(head), "name": head.name, "status": "no time left"})
            continue
        records.append(measure(head, options, rounds, device, heat, seconds_left))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return records
