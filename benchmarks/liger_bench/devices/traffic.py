# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that a rank sends in a training step: counted, predicted, and the time that a network takes for them.

    PYTHONPATH=benchmarks python -m liger_bench.devices.traffic

Every collective is taken for a ring: of n ranks, each sends (n - 1) / n of the gathered or scattered tensor,
and twice as much to reduce it on all ranks. In an exchange of all with all it keeps 1 / n of its tensor.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

# Method of a process group -> (collective, which argument has the larger tensors). Names with "single" are of
# torch 2.13 and later.
_GATHER, _SCATTER, _REDUCE, _EXCHANGE = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
_METHODS = {
    "allgather": (_GATHER, 0), "_allgather_base": (_GATHER, 0), "all_gather_single": (_GATHER, 0),
    "allgather_into_tensor_coalesced": (_GATHER, 0), "all_gather_single_coalesced": (_GATHER, 0),
    "reduce_scatter": (_SCATTER, 1), "_reduce_scatter_base": (_SCATTER, 1), "reduce_scatter_single": (_SCATTER, 1),
    "reduce_scatter_tensor_coalesced": (_SCATTER, 1), "reduce_scatter_single_coalesced": (_SCATTER, 1),
    "allreduce": (_REDUCE, 0), "allreduce_coalesced": (_REDUCE, 0),
    "alltoall": (_EXCHANGE, 1), "alltoall_base": (_EXCHANGE, 1), "all_to_all_single": (_EXCHANGE, 1),
}  # fmt: skip
# How many times (n - 1) / n of the larger tensors is sent.
_TIMES = {_GATHER: 1, _SCATTER: 1, _REDUCE: 2, _EXCHANGE: 1}


def _nbytes(value):
    """Bytes of a tensor, or of all tensors in a list of tensors or lists."""
    return value.nbytes if isinstance(value, torch.Tensor) else sum(map(_nbytes, value))


class Traffic:
    """Context manager: counts the bytes that this rank sends in collectives of Python code, on any thread.

    It replaces methods of the class ProcessGroup: a dispatch mode would not see what an op does inside of its
    kernel. Functional collectives, which DTensors use, do not pass through these methods.

    ``sent``: {collective: bytes}.
    """

    def __init__(self):
        self.sent = Counter()

    @property
    def total(self):
        return sum(self.sent.values())

    def _counting(self, method, kind, place):
        def counted(group, *args, **kwargs):
            n = group.size()
            self.sent[kind] += round(_TIMES[kind] * _nbytes(args[place]) * (n - 1) / n)
            return method(group, *args, **kwargs)

        return counted

    def __enter__(self):
        methods = vars(dist.ProcessGroup)
        self._before = {name: methods[name] for name in _METHODS if name in methods}
        for name in self._before:
            setattr(
                dist.ProcessGroup, name, self._counting(getattr(dist.ProcessGroup, name), *_METHODS[name])
            )
        return self

    def __exit__(self, *_):
        for name, method in self._before.items():
            setattr(dist.ProcessGroup, name, method)


# --- predictions, in bytes that each rank sends in a step ---------------------------------------------------


def fsdp2(parameters, ranks, kept=0, gathered=2, reduced=2):
    """FSDP2: every parameter is gathered in the forward and again in the backward, and its gradient reduced.

    Args:
        parameters: how many there are.
        kept: how many of them stay gathered between forward and backward, as embedding and head do.
        gathered, reduced: bytes of an element of a gathered parameter, and of a reduced gradient.
    """
    return round((parameters * (2 * gathered + reduced) - kept * gathered) * (ranks - 1) / ranks)


def vocabulary(tokens, hidden, ranks, statistics=12, sums=4):
    """A loss over a sharded vocabulary: statistics of every row are gathered, gradients of hidden states
    summed.

    Args:
        tokens: of the group, which are the same on all of its ranks.
        statistics: bytes that a rank has for a row.
        sums: bytes of an element of the sum.
    """
    return round(tokens * (statistics * (ranks - 1) + 2 * hidden * sums * (ranks - 1) / ranks))


def ulysses(tokens, hidden, kv_hidden, layers, ranks, element=2, forwards=2):
    """Attention whose heads are spread over the ranks while its tokens meet: four tensors are exchanged in a
    forward, and as many in the backward.

    Args:
        tokens: of the whole sequence.
        hidden, kv_hidden: heads times size of a head, of queries and of keys.
        forwards: 2 with gradient checkpointing, else 1; between them where some layers recompute attention.
    """
    exchanged = tokens / ranks * (2 * hidden + 2 * kv_hidden) * element * layers
    return round((forwards + 1) * exchanged * (ranks - 1) / ranks)


# --- a network ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Hosts of GPUs; speeds in bytes per second and direction of a GPU, ``latency`` in seconds per step of a
    ring."""

    name: str
    per_host: int
    within: float
    between: float
    latency: float = 10e-6

    def seconds(self, sent, ranks, collectives=1):
        """The time of ``sent`` bytes per rank in so many collectives: a ring is as fast as its slowest link.

        Rings through several hosts leave each host once; every GPU has a port of its own, so that as many
        rings as GPUs use all ports.
        """
        if ranks == 1:
            return 0.0
        speed = self.within if ranks <= self.per_host else min(self.within, self.between)
        # Libraries take trees for small messages of many ranks: latency grows with the logarithm.
        return sent / speed + collectives * self.latency * math.log2(ranks)


H100 = Network("8 GPUs per host on NVLink at 450 GB/s, 400 Gb/s InfiniBand per GPU", 8, 450e9, 50e9)


@dataclass(frozen=True)
class Step:
    """A training step of a rank: seconds of computation, and what it sends.

    ``overlapped``: whether the traffic runs while the GPU computes, so that the longer of the two counts.
    """

    name: str
    compute: float
    sent: Callable
    collectives: int
    overlapped: bool = True

    def seconds(self, network, ranks):
        """(seconds of the traffic, seconds of the step)"""
        traffic = network.seconds(self.sent(ranks), ranks, self.collectives)
        return traffic, max(self.compute, traffic) if self.overlapped else self.compute + traffic


# Of Llama-3.2-1B, whose head is tied, and of Llama-3-8B: all parameters, and embedding and head.
PARAMETERS = {"1B": (1_235_814_400, 262_670_336), "8B": (8_030_261_248, 1_050_677_248)}
LAYERS = {"1B": 16, "8B": 32}
RANKS = (2, 8, 64, 512)


def steps(compute):
    """The steps that docs/lab/scaling.md predicts, with {name: seconds of computation of one rank}."""
    return [
        Step(
            f"FSDP2, {name}",
            seconds,
            lambda n, m=name[:2]: fsdp2(PARAMETERS[m][0], n, kept=PARAMETERS[m][1]),
            3 * LAYERS[name[:2]] + 2,
        )
        for name, seconds in compute.items()
    ]


def markdown(made, network=H100, ranks=RANKS):
    """A table: bytes, seconds of traffic and of the step, and the share of one GPU's speed, per number of
    ranks."""
    lines = [
        "| step | ranks | GB sent | traffic, s | step, s | of the speed without traffic |",
        "|---|" + "---|" * 5,
    ]
    for step in made:
        for n in ranks:
            traffic, seconds = step.seconds(network, n)
            lines.append(
                f"| {step.name} | {n} | {step.sent(n) / 1e9:.2f} | {traffic:.3f} | {seconds:.3f} | "
                f"{step.compute / seconds:.2f} |"
            )
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compute", nargs=2, action="append", metavar=("NAME", "SECONDS"),
        help="a step, named 1B or 8B and more words, and the seconds that a rank computes; repeatable",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    given = parser.parse_args(arguments)
    compute = given.compute or [("8B, 16 x 512 tokens per rank", "0.86")]
    unknown = [name for name, _ in compute if name[:2] not in PARAMETERS]
    if unknown:
        parser.error(f"--compute {unknown[0]!r}: expected a name that begins with {' or '.join(PARAMETERS)}")
    print(markdown(steps({name: float(seconds) for name, seconds in compute}), ranks=given.ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
