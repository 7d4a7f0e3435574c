# SPDX-License-Identifier: BSD-3-Clause
"""fully_shard over a mesh of two dimensions (HSDP): two groups of ranks have the same shards, and sum their
gradients."""

import models
import pytest
import ranks
import test_fsdp2
import test_fsdp2_families
import torch

RANKS = ranks.MESH_WORLD


def mesh():
    return ranks.mesh_of(2, ranks.WORLD // 2, names=("replicas", "shards"))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("mlp", models.MLPS)
def test_matches_one_process(mlp, tied):
    """Two micro-batches of other lengths on every rank."""
    test_fsdp2.run(models.batches_of_ranks(test_fsdp2.LENGTHS, ranks.DEVICE), mlp, tied, mesh=mesh())


def test_mixed_precision():
    batches = models.batches_of_ranks(test_fsdp2.LENGTHS, ranks.DEVICE)
    test_fsdp2.run(batches, dtype=torch.bfloat16, mesh=mesh(), mp_policy=test_fsdp2.BF16)


@pytest.mark.parametrize("name, layout", [("qwen3", "tail"), ("gemma3", "root"), ("qwen3_moe", "small")])
def test_patched_models(name, layout):
    test_fsdp2_families.run(name, layout, mesh=mesh())


def test_each_group_has_all_shards():
    model = test_fsdp2.shard(models.make(device=ranks.DEVICE), mesh=mesh())
    weight = model.head.weight
    assert weight.device_mesh.shape == (2, ranks.WORLD // 2)
    assert weight.to_local().shape[0] == models.CONFIG.vocab_size // (ranks.WORLD // 2)
