"""DeepSpeed ZeRO-3 of patched models of several families. Runs where deepspeed is installed."""

import families
import pytest
import ranks
import torch
from test_deepspeed import deepspeed
from torch.utils._python_dispatch import TorchDispatchMode

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    # Small parameters are partitioned, too.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def engine_of(model, bfloat16=False, stage=3):
    zero = CONFIG["zero_optimization"] if stage == 3 else {"stage": stage}
    config = {**CONFIG, "zero_optimization": zero, "bf16": {"enabled": bfloat16}}
    optimizer = families.optimizer_of(model)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def full(engine, read):
    values = ((name, read(p)) for name, p in families.parameters_of(engine.module) if p.requires_grad)
    return {name: None if value is None else value.clone() for name, value in values}


def train(model, steps, bfloat16=False, stage=3):
    """The :class:`families.Result` of a model under ZeRO."""
    engine, losses, grads = engine_of(model, bfloat16, stage), [], []
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
    name, steps=None, tied=None, bfloat16=False, stage=3, change=None, make=families.make, whole=families.make
):
    """``make``: the model to train; ``whole``: the same for one process; ``change``: applied after the patch."""
    steps = families.batches(name) if steps is None else steps
    exact = families.exactly(whole(name, tied), steps)
    results = []
    for is_patched in (False, True):
        model = make(name, tied)
        if is_patched:
            families.patched(model, name)
        if change is not None:
            change(model)
        results.append(train(model, steps, bfloat16, stage))
    trained = results[0].changes
    first, last, changes = ({key: kind[key] for key in trained} for kind in exact[1:])
    exact = families.Result(exact.losses, first, last, changes)
    families.assert_as_exact(*results[::-1], exact, torch.bfloat16 if bfloat16 else torch.float32)


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_matches_plain_model(name, bfloat16):
    run(name, bfloat16=bfloat16)


class _OpsOfLiger(TorchDispatchMode):
    """Collects the names of liger's ops."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "liger":
            self.names.add(func._schema.name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_op_runs(name):
    """ZeRO-3 has hooks on every module, activations included."""
    batch = families.to(families.batches(name)[0][ranks.RANK], ranks.DEVICE)
    plain, engine = families.patched(families.make(name), name), None
    with _OpsOfLiger() as expected:
        plain.train()(**batch)
    assert any("swiglu" in op or "geglu" in op or "experts" in op for op in expected.names)
    try:
        engine = engine_of(families.patched(families.make(name), name))
        with _OpsOfLiger() as found:
            engine(**batch)
    finally:
        if engine is not None:
            engine.destroy()
    # The weights of norms are gathered in their own calls.
    fused = {op for op in expected.names if "fused_add_rms_norm" in op or "qk_norm_rope" in op}
    assert expected.names - fused <= found.names


@pytest.mark.parametrize("name", families.MOE)
def test_router_loss(name):
    """The loss of the router is added to that of the head, in place."""
    run(name, families.batches(name, output_router_logits=True))


@pytest.mark.parametrize("ignored_rank", range(ranks.WORLD))
@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_rank_without_valid_label(name, ignored_rank):
    run(name, families.batches(name, ignored_rank=ignored_rank))


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_tied_or_not(name):
    """The other choice than the configuration of the family makes."""
    run(name, tied=name == "qwen3")


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["gemma3_vl", "qwen3_moe"])
def test_other_stages(name, stage):
    run(name, stage=stage)
