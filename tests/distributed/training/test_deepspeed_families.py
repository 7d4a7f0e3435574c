# SPDX-License-Identifier: BSD-3-Clause
"""DeepSpeed ZeRO-3 of patched models of several families. Runs where deepspeed is installed."""

from collections import Counter

import families
import pytest
import ranks
import torch
from called_ops import CalledOps
from graph_nodes import count_nodes
from test_deepspeed import deepspeed

from liger.transformers.checkpointing import methods

# The default threshold below which the parameters stay gathered: the weights of norms, in a model of any
# size.
PERSISTENT = int(1e5)
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    # Small parameters are partitioned, too.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def engine_of(model, bfloat16=False, stage=3, threshold=0):
    zero = {**CONFIG["zero_optimization"], "stage3_param_persistence_threshold": threshold}
    zero = zero if stage == 3 else {"stage": stage}
    config = {**CONFIG, "zero_optimization": zero, "bf16": {"enabled": bfloat16}}
    optimizer = families.optimizer_of(model)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def full(engine, read):
    values = ((name, read(p)) for name, p in families.parameters_of(engine.module) if p.requires_grad)
    return {name: None if value is None else value.clone() for name, value in values}


def train(model, steps, bfloat16=False, stage=3, threshold=0):
    """The :class:`families.Result` of a model under ZeRO."""
    engine, losses, grads = engine_of(model, bfloat16, stage, threshold), [], []
    try:
        before = full(engine, deepspeed.utils.safe_get_full_fp32_param)
        for of_ranks in steps:
            loss = engine(**families.to(of_ranks[ranks.RANK], ranks.DEVICE)).loss
            engine.backward(loss)
            losses.append(ranks.total(loss.float()) / ranks.WORLD)
            grads.append(full(engine, deepspeed.utils.safe_get_full_grad))
            engine.step()
        return families.result(losses, grads, before, full(engine, deepspeed.utils.safe_get_full_fp32_param))
    finally:
        engine.destroy()


def run(
    name, steps=None, tied=None, bfloat16=False, stage=3, change=None, make=families.make, whole=families.make,
    threshold=0, options=None,
):  # fmt: skip
    """``make``: the model to train; ``whole``: the same for one process; ``change``: applied after the patch,
    which has these ``options``."""
    steps = families.batches(name) if steps is None else steps
    exact = families.exactly(whole(name, tied), steps)
    results = []
    for is_patched in (False, True):
        model = make(name, tied)
        if is_patched:
            families.patched(model, name, **(options or {}))
        if change is not None:
            change(model)
        results.append(train(model, steps, bfloat16, stage, threshold))
    trained = results[0].changes
    first, last, changes = ({key: kind[key] for key in trained} for kind in exact[1:])
    exact = families.Result(exact.losses, first, last, changes)
    families.assert_as_exact(*results[::-1], exact, torch.bfloat16 if bfloat16 else torch.float32)


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_matches_plain_model(name, bfloat16):
    run(name, bfloat16=bfloat16)


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_norms_that_stay_gathered(name, bfloat16):
    run(name, bfloat16=bfloat16, threshold=PERSISTENT)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral"])
def test_checkpointing_of_norms_that_stay_gathered(name, reentrant):
    def change(model):
        methods.enable(model, use_reentrant=reentrant)

    run(name, change=change, threshold=PERSISTENT)


@pytest.mark.parametrize("threshold", [0, PERSISTENT])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral"])
def test_recomputed_outputs(name, threshold):
    run(name, threshold=threshold, options={"recompute": True})


def ops_of_liger(call):
    """The ops that run, as often as each does."""
    with CalledOps() as ops:
        call()
    return Counter(name for name in ops.full_names if name.startswith("liger::"))


@pytest.mark.parametrize("threshold", [0, PERSISTENT])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_op_runs(name, recompute, threshold):
    """ZeRO-3 has hooks on every module, activations included. In its first step it gathers what later steps
    keep."""
    batch = families.to(families.batches(name)[0][ranks.RANK], ranks.DEVICE)
    plain = families.patched(families.make(name), name, recompute=recompute)
    engine = engine_of(families.patched(families.make(name), name, recompute=recompute), threshold=threshold)
    expected = comparable(ops_of_liger(lambda: plain.train()(**batch).loss.backward()))
    assert any("swiglu" in op or "geglu" in op or "experts" in op for op in expected)
    # The weights of norms that do not stay gathered are gathered in calls of their own.
    fused = {op for op in expected if not threshold and ("add_rms_norm" in op or "qk_norm_rope" in op)}
    try:
        for _ in range(3):
            ops = ops_of_liger(lambda: engine.backward(engine(**batch).loss))
            engine.step()
            found = comparable(ops)
            assert expected.keys() - fused <= found.keys()
            if threshold:
                assert found == expected
            if recompute:
                assert ops["liger::rms_norm"] > ops["liger::rms_norm_backward"]
    finally:
        engine.destroy()


def comparable(ops):
    """Without the ops in the backward of an MLP: it depends on hooks of its last projection which they
    are."""
    products = ("swiglu", "geglu")
    kept = {op: n for op, n in ops.items() if not ("backward" in op and any(word in op for word in products))}
    # With recompute, the product is computed again in one node with the projection, or on its own.
    return {op: 1 if any(word in op for word in products) else n for op, n in kept.items()}


def test_a_module_that_is_called_without_its_engine():
    """Before the first step, and after other code has partitioned all parameters, parameters of norms are not
    gathered: the norms are called, and their hooks gather them."""
    batch = families.to(families.batches("qwen3")[0][ranks.RANK], ranks.DEVICE)
    plain = families.make("qwen3").eval()
    engine = engine_of(families.patched(families.make("qwen3"), "qwen3"), threshold=PERSISTENT)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    expected = plain(**inputs).logits
    try:
        for _ in range(2):
            engine.eval()
            with torch.no_grad():
                torch.testing.assert_close(engine.module(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
                with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                    pass
                torch.testing.assert_close(engine.module(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
            engine.train()
            engine.backward(engine(**batch).loss)
    finally:
        engine.destroy()


@pytest.mark.parametrize("name", families.MOE)
def test_router_loss(name):
    """The loss of the router is added to the loss of the head, in place."""
    run(name, families.batches(name, output_router_logits=True))


@pytest.mark.parametrize("ignored_rank", range(ranks.WORLD))
@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_rank_without_valid_label(name, ignored_rank):
    run(name, families.batches(name, ignored_rank=ignored_rank))


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_tied_or_not(name):
    """The other choice than the configuration of the family makes."""
    run(name, tied=name == "qwen3")


@pytest.mark.parametrize("threshold", [0, PERSISTENT])
def test_a_tied_weight_has_one_gradient(threshold):
    batch = families.to(families.batches("qwen3")[0][ranks.RANK], ranks.DEVICE)
    engine = engine_of(families.patched(families.make("qwen3", True), "qwen3"), threshold=threshold)
    try:
        for _ in range(2):
            loss = engine(**batch).loss
            nodes = count_nodes(loss)
            assert nodes["_SharedLookupBackward"] == 1 and not nodes["EmbeddingBackward0"]
            engine.backward(loss)
            engine.step()
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["gemma3_vl", "qwen3_moe"])
def test_other_stages(name, stage):
    run(name, stage=stage)
