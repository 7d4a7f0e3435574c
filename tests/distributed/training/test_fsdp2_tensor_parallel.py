# SPDX-License-Identifier: BSD-3-Clause
"""Patched models on meshes of two dimensions: tensor parallel along one, fully_shard along the other. Four
ranks or more."""

import families
import pytest
import ranks
import torch
import transformers
from called_ops import CalledOps
from test_fsdp2_families import layers_of
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from liger.transformers import patch_report
from liger.transformers.checkpointing import methods

RANKS = ranks.MESH_WORLD
DATA, TENSOR = RANKS // 2, 2


def mesh():
    return ranks.mesh_of(DATA, TENSOR, names=("fsdp", "tp"))


def data_rank():
    return mesh().get_local_rank("fsdp")


def parallelize(model):
    """Attention, MLP and lm_head are sharded; norms and activations between them are the same on all
    ranks."""
    plan = {
        **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh()["tp"], plan)


def shard(model, head=False, **options):
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh()["fsdp"], **options)
    if head:
        fully_shard(model.lm_head, mesh=mesh()["fsdp"], **options)
    return fully_shard(model, mesh=mesh()["fsdp"], **options)


def total(loss):
    """The mean over all ranks; the ranks of a tensor-parallel group have the same loss."""
    return ranks.total(loss.float()) / ranks.WORLD


def train(model, steps):
    """The :class:`families.Result` of a model on two dimensions."""
    optimizer, losses, grads, before = families.optimizer_of(model), [], [], families.weights_of(model)
    for of_ranks in steps:
        optimizer.zero_grad()
        loss = model(**families.to(of_ranks[data_rank()], ranks.DEVICE)).loss
        loss.backward()
        losses.append(total(loss))
        grads.append(families.gradients_of(model))
        optimizer.step()
    return families.result(losses, grads, before, families.weights_of(model))


def compare(name, make, dtype=torch.float32, steps=None, report=None):
    """``make(patched)``: the model on the mesh."""
    steps = families.batches(name, data_ranks=DATA) if steps is None else steps
    ours, theirs = make(True), make(False)
    assert isinstance(ours, FSDPModule) and isinstance(theirs, FSDPModule)
    assert any(isinstance(p, DTensor) and p.device_mesh.ndim == 2 for p in ours.parameters())
    if report is not None:
        report(ours)
    exact = families.exactly(families.make(name, tied=False), steps, DATA)
    families.assert_as_exact(train(ours, steps), train(theirs, steps), exact, dtype)
    # After the training: the weights of the root stay gathered after a forward without a backward.
    assert_head_computes_loss(ours, steps[0])


def assert_head_computes_loss(model, of_ranks):
    """A patched model: the head computes the loss from its shards of the classes, in the report and in a
    call."""
    replaced = list(patch_report(model).replaced.values())
    if not replaced:
        return
    assert replaced.count("vocab_parallel_fused_linear_cross_entropy") == 1
    with CalledOps() as called, torch.no_grad():
        output = model(**families.to(of_ranks[data_rank()], ranks.DEVICE))
    assert output.logits is None
    assert "liger_distributed::fused_linear_ce_forward" in called.full_names


def on_mesh(name, patched, change=None, options=None, parts=None, **sharding):
    model = families.make(name, tied=False)
    if patched:
        families.patched(model, name, parts, **(options or {}))
    if change is not None:
        change(model)
    return shard(parallelize(model), **sharding)


@pytest.mark.parametrize("head", [False, True], ids=["root", "head"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_matches_plain_model(name, head):
    compare(name, lambda patched: on_mesh(name, patched, head=head))


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_reshard(reshard):
    compare("llama", lambda patched: on_mesh("llama", patched, reshard_after_forward=reshard))


def test_bfloat16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compare("llama", lambda patched: on_mesh("llama", patched, mp_policy=policy), torch.bfloat16)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    def change(model):
        methods.enable(model, use_reentrant=reentrant)

    compare("llama", lambda patched: on_mesh("llama", patched, change))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tiled_mlp(name):
    """Column- and row-wise weights of one tiled MLP, gathered over the other dimension by its unit."""
    options = {"tiled_mlp": True, "tiled_mlp_num_shards": 3}
    compare(name, lambda patched: on_mesh(name, patched, options=options, parts={"tiled_mlp": 2}))


def test_recompute():
    compare("llama", lambda patched: on_mesh("llama", patched, options={"recompute": True}))


# What transformers has given a forward of its own for tensor parallelism stays as it was.
LEFT = {"llama": {}, "qwen3": {"Qwen3RMSNorm": 4}, "mixtral": {"MixtralExperts": 2}}


@pytest.mark.skipif(
    torch.cuda.is_available() and not ranks.ON_GPU, reason="transformers takes GPUs, one for each rank"
)
@pytest.mark.parametrize("name", LEFT)
def test_plan_of_transformers(name, tmp_path):
    """from_pretrained shards along both dimensions; the model is patched after that."""
    folder = [tmp_path]
    torch.distributed.broadcast_object_list(folder)
    if ranks.RANK == 0:
        families.make(name, tied=False).save_pretrained(folder[0])
    torch.distributed.barrier()

    def make(patched):
        model = getattr(transformers, families.ALL[name].model).from_pretrained(
            folder[0],
            attn_implementation="eager",
            distributed_config=transformers.distributed.DistributedConfig(tp_size=TENSOR, fsdp_size=DATA),
        )
        if patched:
            import liger

            liger.patch(model)
        return model.train()

    def report(model):
        left = [name.rsplit(".", 1)[-1] for name in patch_report(model).left]
        assert len(left) == sum(LEFT[name].values()), patch_report(model)

    compare(name, make, report=report)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tiled_module(name):
    """liger.nn's own tiled MLP takes the place of the original one, whose weights it shares by name."""
    import liger

    kind = {"llama": liger.nn.TiledSwiGLUMLP, "gemma2": liger.nn.TiledGEGLUMLP}[name]

    def change(model):
        for layer in layers_of(model):
            tiled = kind.from_config(model.config, num_shards=3, device=ranks.DEVICE)
            tiled.load_state_dict(layer.mlp.state_dict())
            layer.mlp = tiled

    compare(name, lambda patched: on_mesh(name, False, change if patched else None))
