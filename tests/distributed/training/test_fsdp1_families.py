# SPDX-License-Identifier: BSD-3-Clause
"""FullyShardedDataParallel (FSDP1) of patched models of several families: loss, gradients and weights of some
steps."""

import families
import pytest
import ranks
import torch
from graph_nodes import count_nodes
from test_fsdp2_families import checkpoint, is_tied, layers_of
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from liger.transformers.recipe import reuse

NAMES = ["llama", "qwen3", "gemma3", "qwen3_moe", "mixtral"]


def wrap(model, head=False, use_orig_params=True, **options):
    """Units: the layers, the rest, and on request an lm_head that is not tied."""
    alone = {type(layer) for layer in layers_of(model)}
    if head and not is_tied(model):
        alone.add(type(model.lm_head))
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(alone),
        device_id=ranks.DEVICE,
        use_orig_params=use_orig_params,
        **options,
    )


def whole(module, read):
    with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
        return {
            name.replace("_fsdp_wrapped_module.", ""): None if read(p) is None else read(p).detach().clone()
            for name, p in families.parameters_of(module)
        }


def train(model, steps, **options):
    """The :class:`families.Result` of a sharded model."""
    module = wrap(model, **options)
    optimizer, losses, grads = families.optimizer_of(module), [], []
    before = whole(module, lambda p: p)
    for of_ranks in steps:
        optimizer.zero_grad()
        loss = module(**families.to(of_ranks[ranks.RANK], ranks.DEVICE)).loss
        loss.backward()
        losses.append(ranks.total(loss.float()) / ranks.WORLD)
        grads.append(whole(module, lambda p: p.grad))
        optimizer.step()
    return families.result(losses, grads, before, whole(module, lambda p: p))


def run(name, dtype=torch.float32, kind="none", steps=None, tied=None, **options):
    steps = families.batches(name) if steps is None else steps
    exact = families.exactly(families.make(name, tied), steps)
    results = []
    for model in (families.patched(families.make(name, tied), name), families.make(name, tied)):
        checkpoint(model, kind)
        results.append(train(model, steps, **options))
    families.assert_as_exact(*results, exact, dtype)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("head", [False, True], ids=["root", "head"])
@pytest.mark.parametrize("name", NAMES)
def test_matches_plain_model(name, head, strategy):
    run(name, head=head, sharding_strategy=strategy)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name):
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run(name, torch.bfloat16, mixed_precision=precision)


@pytest.mark.parametrize("kind", ["nonreentrant", "wrapper"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_checkpointing(name, kind):
    run(name, kind=kind)


@pytest.mark.parametrize("ignored_rank", range(ranks.WORLD))
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_rank_without_valid_label(name, ignored_rank):
    run(name, steps=families.batches(name, ignored_rank=ignored_rank))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tied_or_not(name):
    """The other choice than the configuration of the family makes. The root owns a weight that two modules
    have."""
    run(name, tied=name == "llama")


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_memory_is_reused(strategy, monkeypatch):
    """FSDP1 has tensors in place of the parameters: MLPs still overwrite their product, and a tied weight has
    one gradient. Products of tiny models count as worth reusing."""
    monkeypatch.setattr(reuse, "WORTH_REUSING", 0)
    run("llama", tied=True, sharding_strategy=strategy)
    run("llama", kind="nonreentrant", sharding_strategy=strategy)


@pytest.mark.parametrize(
    "precision", [None, MixedPrecision(param_dtype=torch.bfloat16)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_nodes_that_reuse_memory(use_orig_params, precision, monkeypatch):
    monkeypatch.setattr(reuse, "WORTH_REUSING", 0)
    model = families.patched(families.make("llama", tied=True), "llama")
    module = wrap(model, use_orig_params=use_orig_params, mixed_precision=precision)
    batch = families.to(families.batches("llama")[0][ranks.RANK], ranks.DEVICE)
    loss = module(**batch).loss
    assert {"_LinearOverBackward", "_SharedLookupBackward"} <= count_nodes(loss).keys()
    loss.backward()
