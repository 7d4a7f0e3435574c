# SPDX-License-Identifier: BSD-3-Clause
"""liger.patch(recompute=True) where the weights of norms are sharded: the same bits as without it."""

import families
import pytest
import ranks
import test_ddp_families
import torch
from test_fsdp2_families import checkpoint, shard, train
from test_fsdp2_precision import BF16
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import liger
from liger.transformers.recipe import recomputed

NAMES = ["llama", "qwen3", "qwen3_moe"]


@pytest.fixture
def references(monkeypatch):
    """Counts the saved tensors that are references to a computation."""
    made = []
    init = recomputed._Reference.__init__

    def counted(self, output, tensor, counted):
        init(self, output, tensor, counted)
        made.append(tuple(tensor.shape))

    monkeypatch.setattr(recomputed._Reference, "__init__", counted)
    return made


def assert_same_bits(ours, theirs):
    for kind, expected in zip(ours, theirs, strict=True):
        assert kind.keys() == expected.keys()
        different = [name for name, value in expected.items() if not torch.equal(kind[name], value)]
        assert not different


@pytest.mark.parametrize(
    "options", [{}, {"reshard_after_forward": True, "mp_policy": BF16}], ids=["plain", "bf16"]
)
@pytest.mark.parametrize("layout", ["root", "tail", "small"])
@pytest.mark.parametrize("name", [n for n in NAMES if n in families.FAMILIES])
def test_fsdp2(name, layout, options, references):
    results = []
    for recompute in (True, False):
        model = liger.patch(families.make(name), recompute=recompute)
        results.append(train(shard(model, layout, **options), families.batches(name)))
        if recompute:
            # A unit of a norm alone gathers its weight for its own call, so its output is saved.
            assert bool(references) == (layout != "small")
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant", "wrapper"])
def test_fsdp2_with_checkpointing(kind, references):
    results = []
    for recompute in (True, False):
        model = liger.patch(families.make("qwen3"), recompute=recompute)
        checkpoint(model, kind)
        results.append(train(shard(model, "tail", reshard_after_forward=True), families.batches("qwen3")))
    # The hooks of the other kinds decide what is saved. The recomputation of a reentrant one has none.
    assert bool(references) == (kind == "reentrant")
    assert_same_bits(*results)


def test_fsdp1(references):
    gradients = []
    for recompute in (True, False):
        model = liger.patch(families.make("qwen3"), recompute=recompute)
        layers = {type(layer) for layer in model.model.layers}
        options = (
            {"device_id": ranks.DEVICE} if ranks.DEVICE.type == "cuda" else {"device_id": torch.device("cpu")}
        )
        sharded = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy(layers), use_orig_params=True, **options
        )
        of_ranks = families.batches("qwen3")[0]
        sharded(**families.to(of_ranks[ranks.RANK], ranks.DEVICE)).loss.backward()
        with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
            gradients.append({n: p.grad.clone() for n, p in sharded.named_parameters() if p.grad is not None})
    assert references and gradients[0]
    assert_same_bits(gradients[:1], gradients[1:])


def test_ddp(references):
    results = []
    for recompute in (True, False):
        model = liger.patch(families.make("qwen3"), recompute=recompute)
        results.append(test_ddp_families.train(model, families.batches("qwen3"), static_graph=True))
    assert references
    assert_same_bits(*results)


def test_zero3():
    pytest.importorskip("deepspeed")
    import test_deepspeed_families

    results = []
    for recompute in (True, False):
        model = liger.patch(families.make("qwen3"), recompute=recompute)
        results.append(test_deepspeed_families.train(model, families.batches("qwen3")))
    assert_same_bits(*results)
