# SPDX-License-Identifier: BSD-3-Clause
"""FullyShardedDataParallel (FSDP1): flat parameters, of which the modules' own are views while they are
gathered."""

import models
import pytest
import ranks
import torch
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import liger

LENGTHS = [[9, 5], [6, 11]]


def wrap(model, tied=False, **options):
    alone = {models.Block} if tied else {models.Block, liger.nn.LMHeadLoss}
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(alone),
        device_id=ranks.DEVICE,
        use_orig_params=True,
        **options,
    )


def train(module, batches, offloaded=False):
    """(loss, full gradients) of this rank's micro-batches, each of them reduced."""
    # FSDP averages over ranks: this makes the average of the ranks' losses the mean over all tokens.
    denominator = models.count([b for of_rank in batches for b in of_rank]) / ranks.WORLD
    loss = torch.zeros((), device=ranks.DEVICE)
    for ids, target in batches[ranks.RANK]:
        part = module(ids, target, denominator)
        part.backward()
        loss += part.detach()
    return ranks.total(loss) / ranks.WORLD, full_gradients(module, offloaded)


def full_gradients(module, offloaded):
    """The whole gradients by name. FSDP1 gathers parameters that are offloaded, but not their gradients: so
    these take the parameters' places first."""
    if offloaded:
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:  # a rank may have no part of it
                    parameter.copy_(parameter.grad)
    with FullyShardedDataParallel.summon_full_params(module, with_grads=not offloaded):
        names = ((n.replace("_fsdp_wrapped_module.", ""), p) for n, p in module.named_parameters())
        return {n: (p if offloaded else p.grad).detach().clone() for n, p in names}


def run(mlp, tied=False, dtype=torch.float32, **options):
    model = models.make(mlp, tied, ranks.DEVICE)
    batches = models.batches_of_ranks(LENGTHS, ranks.DEVICE)
    reference = models.Reference(model, batches, dtype)
    module = wrap(model, tied, **options)
    for _ in range(2):
        module.zero_grad()
        reference.check(*train(module, batches))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("mlp", models.MLPS)
def test_matches_one_process(mlp, strategy, tied):
    run(mlp, tied, sharding_strategy=strategy)


@pytest.mark.parametrize("mlp", models.MLPS)
def test_mixed_precision(mlp):
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run(mlp, dtype=torch.bfloat16, mixed_precision=precision)


@pytest.mark.gpu
@pytest.mark.parametrize("mlp", models.MLPS)
def test_cpu_offload(mlp):
    """Only one micro-batch: FSDP1 cannot add to an offloaded gradient without losing what it has."""
    model = models.make(mlp, device=ranks.DEVICE)
    batches = models.batches_of_ranks([[9], [6]], ranks.DEVICE)
    reference = models.Reference(model, batches)
    module = wrap(model, cpu_offload=CPUOffload(offload_params=True))
    reference.check(*train(module, batches, offloaded=True))
