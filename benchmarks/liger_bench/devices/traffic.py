# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that a rank sends in a training step: counted, predicted, and the time that a network takes for them.

Every collective is taken for a ring: of n ranks, each sends (n - 1) / n of the gathered or scattered tensor,
and twice as much to reduce it on all ranks. In an exchange of all with all it keeps 1 / n of its tensor.
"""

import math
from collections import Counter
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
    """A training step of a rank under FSDP2, whose traffic overlaps with the computation entirely.

    Attributes:
        parameters: how many the model has; ``kept`` as for :func:`fsdp2`.
        seconds: of the step of a rank without traffic between hosts, or None where it was not measured.
        exchanged: bytes of :func:`ulysses`, which a rank sends to the others of its host, if these have one
            sequence. They do not overlap, and ``seconds`` has them.
    """

    name: str
    parameters: int
    kept: int
    layers: int
    seconds: float | None = None
    exchanged: int = 0

    def row(self, network, ranks):
        """A row of :func:`projections`."""
        sent = fsdp2(self.parameters, ranks, self.kept)
        # Three collectives of a layer, and two of embedding and head.
        traffic = network.seconds(sent, ranks, 3 * self.layers + 2)
        within = network.seconds(self.exchanged, network.per_host, 12 * self.layers) if self.exchanged else 0
        row = [
            self.name,
            str(ranks),
            f"{sent / 1e9:.2f}",
            f"{self.exchanged / 1e9:.2f}",
            f"{traffic + within:.3f}",
        ]
        if self.seconds is None:
            return [*row, "", ""]
        step = max(self.seconds, traffic)
        return [*row, f"{step:.3f}", f"{self.seconds / step:.2f}"]


def projections(steps, network=H100, ranks=(8, 64, 512)):
    """(header, rows) of a table: what each step sends on so many ranks, and how long it takes."""
    header = ["step of a rank", "ranks", "GB by FSDP2", "GB by the sequence", "traffic, s", "step, s",
              "of the speed without FSDP2's traffic"]  # fmt: skip
    return header, [step.row(network, n) for step in steps for n in ranks]
