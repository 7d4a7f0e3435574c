# SPDX-License-Identifier: BSD-3-Clause
"""fully_shard (FSDP2): weights are gathered around the call of the module that holds them, and only there."""

import models
import pytest
import ranks
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

LENGTHS = [[9, 5], [6, 11]]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model, tied=False, **options):
    """Shards each block, the head unless its weight is the embedding's too, and the rest."""
    options = {"mesh": ranks.mesh(), **options}
    for block in model.blocks:
        fully_shard(block, **options)
    if not tied:
        fully_shard(model.head, **options)
    return fully_shard(model, **options)


def train(model, batches):
    """(loss, full gradients) of this rank's micro-batches; the gradients are reduced with the last of
    them."""
    mine = batches[ranks.RANK]
    # FSDP averages over ranks: this makes the average of the ranks' losses the mean over all tokens.
    denominator = models.count([b for of_rank in batches for b in of_rank]) / ranks.WORLD
    loss = torch.zeros((), device=ranks.DEVICE)
    for i, (ids, target) in enumerate(mine):
        model.set_requires_gradient_sync(i == len(mine) - 1)
        part = model(ids, target, denominator)
        part.backward()
        loss += part.detach()
    return ranks.total(loss) / ranks.WORLD, full_gradients(model)


def full_gradients(model):
    # An offloaded gradient cannot be gathered where it lies when only the devices have a backend.
    return {n: ranks.whole(p.grad.to(ranks.DEVICE)) for n, p in model.named_parameters()}


def run(batches, mlp="swiglu", tied=False, dtype=torch.float32, **options):
    model = models.make(mlp, tied, ranks.DEVICE)
    reference = models.Reference(model, batches, dtype)
    model = shard(model, tied, **options)
    for _ in range(2):
        model.zero_grad()
        reference.check(*train(model, batches))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("reshard", [False, True], ids=["keep", "reshard"])
@pytest.mark.parametrize("mlp", models.MLPS)
def test_matches_one_process(mlp, reshard, tied):
    """Two micro-batches of other lengths on every rank, the head sharded by itself or tied to the
    embedding."""
    run(models.batches_of_ranks(LENGTHS, ranks.DEVICE), mlp, tied, reshard_after_forward=reshard)


@pytest.mark.parametrize("reshard", [False, True], ids=["keep", "reshard"])
@pytest.mark.parametrize("mlp", models.MLPS)
def test_mixed_precision(mlp, reshard):
    """Parameters of float32 that are used in bfloat16 and reduced in float32."""
    batches = models.batches_of_ranks(LENGTHS, ranks.DEVICE)
    run(batches, mlp, dtype=torch.bfloat16, reshard_after_forward=reshard, mp_policy=BF16)


@pytest.mark.parametrize("mlp", models.MLPS)
def test_cpu_offload(mlp):
    batches = models.batches_of_ranks(LENGTHS, ranks.DEVICE)
    run(batches, mlp, offload_policy=CPUOffloadPolicy(pin_memory=ranks.ON_GPU))
