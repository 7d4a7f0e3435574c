# SPDX-License-Identifier: BSD-3-Clause
"""fully_shard (FSDP2) and options of a patch, several forwards, evaluation, frozen and offloaded
parameters."""

import families
import pytest
import ranks
import torch
from test_fsdp2_families import layers_of, run, shard, train
from test_fsdp2_precision import BF16
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from liger.transformers.recipe import reuse


def mine(inputs):
    return families.to(inputs[ranks.RANK], ranks.DEVICE)


def pair(name, layout="tail", freeze=(), **options):
    """(the plain model, the patched one), both sharded."""
    models = families.make(name), families.patched(families.make(name), name)
    for model in models:
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(word in parameter_name for word in freeze))
    return [shard(model, layout, **options) for model in models]


def result_of(losses, model):
    """A :class:`families.Result` without steps."""
    grads = families.gradients_of(model)
    return families.Result({i: ranks.total(loss.float()) for i, loss in enumerate(losses)}, grads, grads, {})


def test_output_dtype_of_the_head():
    """The unit of the head returns bfloat16, which would round the loss to three digits."""
    inputs = families.batches("qwen3")[0]
    exact = families.in_float64(families.make("qwen3"))(**families.to(inputs[ranks.RANK], ranks.DEVICE)).loss
    model = families.patched(families.make("qwen3"), "qwen3")
    for layer in layers_of(model):
        fully_shard(layer, mesh=ranks.mesh())
    fully_shard(model.lm_head, mesh=ranks.mesh(), mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    loss = fully_shard(model, mesh=ranks.mesh())(**mine(inputs)).loss
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact.double(), rtol=1e-5, atol=0)
    loss.backward()
    grads = families.gradients_of(model)
    reference = shard(families.make("qwen3"), "head")
    reference(**mine(inputs)).loss.backward()
    for name, expected in families.gradients_of(reference).items():
        torch.testing.assert_close(grads[name], expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_accumulation(name, dtype):
    """Micro-batches whose gradients are reduced together."""
    steps = families.batches(name)
    exact = families.exactly(families.make(name), [[inputs for of_ranks in steps for inputs in of_ranks]])
    options = {} if dtype == torch.float32 else {"mp_policy": BF16}
    results = []
    for model in pair(name, **options):
        losses = []
        for number, inputs in enumerate(steps, 1):
            model.set_requires_gradient_sync(number == len(steps))
            loss = model(**mine(inputs)).loss
            loss.backward()
            losses.append(loss.detach())
        results.append(result_of([sum(losses) / ranks.WORLD], model))
    families.assert_as_exact(*results[::-1], exact._replace(changes={}), dtype)


@pytest.mark.parametrize("layout", ["root", "tail"])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_two_forwards(name, layout):
    """Both losses are computed before the backward, which scales them."""
    first, second, _ = families.batches(name)
    exact = families.in_float64(families.make(name))
    losses = []
    for inputs in (first, second):
        outputs = [exact(**families.to(x, ranks.DEVICE, torch.float64)).loss for x in inputs]
        losses.append(sum(outputs))
    ((losses[0] + 3 * losses[1]) / ranks.WORLD).backward()
    true = families.gradients_of(exact)
    true = families.Result({i: loss.detach() for i, loss in enumerate(losses)}, true, true, {})
    results = []
    for model in pair(name, layout, reshard_after_forward=True):
        losses = [model(**mine(inputs)).loss for inputs in (first, second)]
        (losses[0] + 3 * losses[1]).backward()
        results.append(result_of(losses, model))
    families.assert_as_exact(*results[::-1], true)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_evaluation(name):
    """Logits, and the loss with and without them, between two steps of training."""
    inputs = mine(families.batches(name)[0])
    unlabelled = {key: value for key, value in inputs.items() if key not in ("labels", "num_items_in_batch")}
    found = []
    for model in pair(name):
        model(**inputs).loss.backward()
        model.eval()
        with torch.no_grad():
            labelled, logits = model(**inputs), model(**unlabelled).logits
        model.train()
        found.append((labelled.loss, labelled.logits, logits, model(**inputs).loss.detach()))
    with torch.no_grad():
        assert model.eval()(**inputs, skip_logits=True).get("logits") is None
    for ours, theirs in zip(*found[::-1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("checkpointing", ["none", "non_reentrant"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3_vl"])
def test_tiled_mlp(name, checkpointing):
    patch = {"tiled_mlp": True, "tiled_mlp_num_shards": 3}
    run(name, "tail", checkpointing, patch=patch, parts={"tiled_mlp": 2})


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant", "wrapper"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_reused_memory(name, checkpointing, monkeypatch):
    """The backward of an MLP overwrites its activations, which it does for large ones only."""
    monkeypatch.setattr(reuse, "WORTH_REUSING", 0)
    run(name, "tail", checkpointing, reshard_after_forward=True)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_patch_of_a_sharded_model(name):
    """The weights are DTensors when the trials see them."""
    steps = families.batches(name)
    exact = families.exactly(families.make(name), steps)
    models = shard(families.make(name), "tail"), shard(families.make(name), "tail")
    families.patched(models[1], name)
    assert all(isinstance(layer, FSDPModule) for layer in layers_of(models[1]))
    theirs, ours = (train(model, steps) for model in models)
    families.assert_as_exact(ours, theirs, exact)


@pytest.mark.parametrize("freeze", [("experts",), ("embed_tokens", "lm_head"), ("self_attn", "norm")])
@pytest.mark.parametrize("name", ["gemma3", "mixtral", "gpt_oss"])
def test_frozen_parts(name, freeze):
    first = families.batches(name)[0]
    exact = families.in_float64(families.make(name))
    sum(exact(**families.to(x, ranks.DEVICE, torch.float64)).loss for x in first).div(ranks.WORLD).backward()
    grads = []
    for model in pair(name, freeze=freeze):
        model(**mine(first)).loss.backward()
        grads.append(families.gradients_of(model))
    frozen = [key for key, value in grads[0].items() if value is None]
    assert frozen == [key for key, value in grads[1].items() if value is None]
    assert bool(frozen) == (freeze != ("experts",) or name in families.MOE)
    theirs, ours, true = (
        families.Result({}, {key: value for key, value in g.items() if key not in frozen}, {}, {})
        for g in (*grads, families.gradients_of(exact))
    )
    families.assert_as_exact(ours, theirs, true)


@pytest.mark.parametrize("name", ["gemma3", "mixtral"])
def test_offload(name):
    run(name, "tail", offload_policy=CPUOffloadPolicy(pin_memory=ranks.ON_GPU))


@pytest.mark.parametrize("name", families.MOE)
def test_experts_sharded_by_another_dimension(name):
    run(name, "tail", shard_placement_fn=lambda parameter: Shard(1) if parameter.dim() == 3 else None)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_loss_from_logits(name):
    patch = {"fused_linear_cross_entropy": False, "cross_entropy": True}
    run(name, "tail", patch=patch, parts={"fused_linear_cross_entropy": 0, "cross_entropy": 1})
