# SPDX-License-Identifier: BSD-3-Clause
"""DeepSpeed ZeRO 1, 2 and 3: partitioned optimizer states, gradients, parameters. Runs where deepspeed is
installed."""

import os

import models
import pytest
import ranks
import torch
from cases import error

import liger

# One GPU is not enough for two ranks; DeepSpeed would take it all the same.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if ranks.ON_GPU else "cpu")
deepspeed = pytest.importorskip("deepspeed")
from deepspeed.utils import safe_get_full_grad  # noqa: E402

STAGES = [1, 2, 3]


def start(model, stage, micro_batches=1, offload=False, bfloat16=False):
    """An engine whose steps change nothing, so that every iteration has the gradients of the first."""
    zero = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # small parameters are partitioned, too
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": zero,
        "bf16": {"enabled": bfloat16},
        # The optimizers of DeepSpeed are compiled when they are first used.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def full_gradients(engine):
    return {n: safe_get_full_grad(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad}


def train(engine, batches, ce_weight=None):
    """(loss, full gradients) of this rank's micro-batches, and a step that changes nothing."""
    mine = batches[ranks.RANK]
    # DeepSpeed averages over ranks and micro-batches: this makes that average the mean over all tokens.
    parts = ranks.WORLD * len(mine)
    denominator = models.count([b for of_rank in batches for b in of_rank], ce_weight) / parts
    loss = 0.0
    for i, (ids, target) in enumerate(mine):
        part = engine(ids, target, denominator)
        engine.backward(part)
        loss += part.detach()
        if i == len(mine) - 1:
            grads = full_gradients(engine)
        engine.step()
    return ranks.total(loss) / parts, grads


def run(mlp, stage, lengths, tied=False, **options):
    batches = models.batches_of_ranks(lengths, ranks.DEVICE)
    model = models.make(mlp, tied, ranks.DEVICE)
    dtype = torch.bfloat16 if options.get("bfloat16") else torch.float32
    reference = models.Reference(model, batches, dtype)
    engine = start(model, stage, len(lengths[0]), **options)
    try:
        # ZeRO-3 records the order of the modules in the first iteration and fetches ahead from the second on.
        for _ in range(3):
            reference.check(*train(engine, batches))
    finally:
        engine.destroy()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mlp", models.MLPS)
def test_matches_one_process(mlp, stage, tied):
    """Two micro-batches of other lengths on every rank."""
    run(mlp, stage, [[9, 5], [6, 11]], tied)


@pytest.mark.parametrize("stage", STAGES)
def test_class_weights(stage):
    """Micro-batches of all ranks have the loss of torch.nn.CrossEntropyLoss over all tokens together."""
    batches = models.batches_of_ranks([[9, 5], [6, 11]], ranks.DEVICE)
    ce_weight = torch.linspace(0.1, 3.0, models.CONFIG.vocab_size, device=ranks.DEVICE)
    model = models.make(device=ranks.DEVICE, ce_weight=ce_weight)
    plain = models.make(device=ranks.DEVICE, dtype=torch.float64)
    plain.head.forward = lambda x, *_, **__: torch.nn.functional.linear(x, plain.head.weight).flatten(0, -2)
    everything = [b for of_rank in batches for b in of_rank]
    with liger.use_backend("torch"):
        logits = torch.cat([plain(ids, target, None) for ids, target in everything])
        targets = torch.cat([target.flatten() for _, target in everything])
        expected = torch.nn.functional.cross_entropy(logits, targets, ce_weight.double())
        expected.backward()
    engine = start(model, stage, micro_batches=2)
    try:
        loss, grads = train(engine, batches, ce_weight)
    finally:
        engine.destroy()
    assert error(loss, expected.detach()) <= 1e-6
    for name, parameter in plain.named_parameters():
        assert error(grads[name], parameter.grad) <= 1e-5, name


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mlp", models.MLPS)
def test_bfloat16(mlp, stage):
    run(mlp, stage, [[9], [6]], bfloat16=True)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mlp", models.MLPS)
def test_offload(mlp, stage):
    run(mlp, stage, [[9], [6]], offload=True)
