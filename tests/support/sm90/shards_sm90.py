# SPDX-License-Identifier: BSD-3-Clause
"""The steps of fused_linear_ce on one device, which computes the shards of all ranks in turn."""

from itertools import pairwise
from typing import NamedTuple

import torch
from sm90_engine import MIB, Shape, clusters

from liger._core.head.cross_entropy import CEOptions, Metrics
from liger._core.head.sm90_plan import plan_chunks_sm90
from liger.distributed.vocab import sm90

# Odd sizes; of a rank: one chunk, several, partial tiles, split-K.
SHAPES = {
    "in the weight gradient": Shape(500, 512, 4099),
    "beside it": Shape(901, 512, 8449),
    "sums": Shape(1901, 256, 2305, MIB),
    "sums, larger": Shape(3001, 768, 16385, 8 * MIB),
    "sums, whole waves": Shape(6001, 2048, 2049, 4 * MIB),
    "split-K": Shape(257, 256, 32771),
    "split-K, chunks": Shape(901, 256, 16385, 8 * MIB),
    "partial tiles, sums": Shape(1901, 320, 2307, MIB),
    "few columns": Shape(1001, 64, 6001, MIB),
    "few classes": Shape(701, 128, 75),
}


class Results(NamedTuple):
    """Of all ranks: the results of the rows from the first one, after a comparison; gradients of all
    classes."""

    loss: torch.Tensor
    z_loss: torch.Tensor
    logprobs: torch.Tensor
    grad_input: torch.Tensor
    grad_weight: torch.Tensor


def plan_of(shape, ranks, trained=(True, True)):
    """The plan of a :class:`sm90_engine.Shape`, which the engine is asserted to take."""
    classes = -(-shape.vocab // ranks)
    exact = shape.accum_dtype in (None, torch.float32)
    plan = plan_chunks_sm90(shape.rows, shape.hidden, classes, *trained, exact, shape.budget, clusters())
    assert plan.chunks, f"the GEMMs of torch would run: {shape}"
    return plan


def even_bounds(vocab, ranks):
    return [min(rank * -(-vocab // ranks), vocab) for rank in range(ranks + 1)]


def run_ranks(shape, bounds, x, weight, target, trained=(True, True), compare=True, **chosen):
    """The :class:`Results` of the shards ``weight[bounds[i] : bounds[i + 1]]``. Collectives are sums and
    copies.

    ``compare``: asserts that all ranks have the same bits, which waits for the device.
    """
    plan = plan_of(shape, len(bounds) - 1, trained)
    options, metrics = CEOptions(**chosen), Metrics(z_loss=True, logprobs=True)
    calls = []
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        shards = start, weight.shape[0], "simulated"
        part = weight[start:stop].clone()
        calls.append(sm90.Call(x, part, target, options, shards, rank, plan, metrics, (*trained, False)))
        calls[-1].begin()
    logits = torch.stack([call.target_logit for call in calls]).sum(0)
    for call in calls:
        call.target_logit.copy_(logits)
    sums = [call.new_sum() for call in calls]
    for index, chunk in enumerate(plan.chunks):
        gathered = torch.stack([call.exponentials(index) for call in calls])
        parts = [memory[: chunk.rows] for memory in sums]
        for call, part in zip(calls, parts, strict=True):
            call.apply_rule(index, gathered, part)
            call.add_grad_weight(index)
        if trained[0]:
            for call in calls:
                call.rows[chunk.first : chunk.first + chunk.rows].copy_(sum(parts))
    found = [call.results() for call in calls]
    for others in found[1:] if compare else ():
        for i in (0, 1, 4, 6):
            assert torch.equal(others[i].nan_to_num(7.0), found[0][i].nan_to_num(7.0)), f"ranks differ in {i}"
    loss, z_loss, logprobs, grad_input = (found[0][i] for i in (0, 1, 4, 6))
    grad_weight = torch.cat([each[7] for each in found]) if trained[1] else found[0][7]
    return Results(loss, z_loss, logprobs, grad_input, grad_weight)


def surprising(shape, scale, x, weight, target):
    """Targets far below the largest logit, which one shard may have and another not. With few classes as
    targets the one-hot terms are elements of exponentials, of rows that are moved to another reference,
    too."""
    weight[: shape.vocab // 2] /= 16
    target[target >= 0] %= 1000
    return (scale * x.float()).to(x.dtype), weight, target
