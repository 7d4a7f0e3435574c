# SPDX-License-Identifier: BSD-3-Clause
"""Patched models under what people train with: the Trainer, PEFT, accelerate, FSDP2 and ZeRO-like hooks."""

import pytest
import torch

import liger

transformers = pytest.importorskip("transformers")

from combinations import lora  # noqa: E402
from cuda_graphs import no_synchronisation  # noqa: E402
from tiny_models import ONE_QUICK, assert_same_step, batch, make, step, twin  # noqa: E402
from trainer_runs import train  # noqa: E402

import liger.transformers as lt  # noqa: E402


@pytest.mark.parametrize("family", ONE_QUICK)
def test_trainer_with_gradient_accumulation(tmp_path, family):
    plain = make(family)
    patched = liger.patch(twin(plain))
    ours, theirs = train(patched, tmp_path), train(plain, tmp_path)
    assert len(ours) == 4
    # Adam turns roundings of small gradients into whole steps.
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=0)


@pytest.mark.parametrize("family", ONE_QUICK)
@pytest.mark.parametrize(
    "options", [{}, {"cross_entropy": True, "fused_linear_cross_entropy": False}], ids=["fused", "not fused"]
)
def test_label_smoothing_of_the_trainer(tmp_path, family, options):
    """The Trainer shifts the labels of the models whose names it knows."""
    plain = make(family)
    patched = liger.patch(twin(plain), **options)
    ours, theirs = (train(m, tmp_path, label_smoothing_factor=0.1) for m in (patched, plain))
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=0)


def test_trainer_in_bfloat16_with_checkpointing(tmp_path):
    plain = make("qwen3")
    patched = liger.patch(twin(plain))
    ours, theirs = (train(m, tmp_path, bf16=True, gradient_checkpointing=True) for m in (patched, plain))
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=0)


@pytest.mark.parametrize("order", ["patch first", "patch last"])
@pytest.mark.parametrize("saved", ["lm_head", "norm"])
def test_modules_that_peft_saves(saved, order, caplog):
    pytest.importorskip("peft")

    def adapted(model):
        return lora(model, "up_proj", init_lora_weights=False, modules_to_save=[saved])

    plain = make("llama")
    patched = twin(plain)
    patched = adapted(liger.patch(patched)) if order == "patch first" else liger.patch(adapted(patched))
    ours, theirs = step(patched, **batch()), step(adapted(plain), **batch())
    assert_same_step(ours, theirs)
    assert ours[0].logits is None and not caplog.text


def test_forward_behind_the_hooks_of_accelerate():
    hooks = pytest.importorskip("accelerate.hooks")
    plain = make("llama")
    model = twin(plain)
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    expected = step(plain, **batch())
    liger.patch(model)
    assert lt.patch_report(model).left == {}
    assert model(**batch()).logits is None
    assert_same_step(step(model, **batch()), expected)
    liger.unpatch(model)
    assert model(**batch()).logits is not None
    assert_same_step(step(model, **batch()), expected)
    for module in model.modules():
        hooks.remove_hook_from_module(module)
    assert_same_step(step(model, **batch()), expected)


def test_a_head_on_which_hooks_gather_the_weight():
    """As ZeRO-3 does: the weight is there only inside the head's call and inside its backward."""
    plain = make("llama")
    model = liger.patch(twin(plain))
    head, full = model.lm_head, model.lm_head.weight.data

    class ReleaseAfterBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            head.weight.data = full.new_empty(0)
            return grad

    class GatherBeforeBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            head.weight.data = full
            return grad

    def gather(module, inputs):
        module.weight.data = full
        return tuple(map(ReleaseAfterBackward.apply, inputs))

    def release(module, inputs, output):
        module.weight.data = full.new_empty(0)
        return GatherBeforeBackward.apply(output)

    release.__module__ = "deepspeed.runtime.zero"
    head.weight.data = full.new_empty(0)
    head.register_forward_pre_hook(gather)
    head.register_forward_hook(release)
    model.zero_grad()
    output = model(**batch())
    assert head.weight.numel() == 0
    output.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert_same_step((output, grads), step(plain, **batch()))


@pytest.fixture
def one_process_group(tmp_path):
    if not torch.distributed.is_available() or torch.distributed.is_initialized():
        pytest.skip("needs torch.distributed, not yet initialised")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("order", ["patch first", "patch last"])
def test_fully_shard(one_process_group, order):
    from torch.distributed.fsdp import fully_shard

    plain = make("qwen3")
    model = twin(plain)
    if order == "patch first":
        liger.patch(model)
    for module in [*model.model.layers, model.model.norm, model.lm_head, model]:
        fully_shard(module, mesh=one_process_group)
    if order == "patch last":
        liger.patch(model)
    assert lt.patch_report(model).left == {}
    output, grads = step(model, **batch())
    assert output.logits is None
    grads = {name: grad.full_tensor() for name, grad in grads.items()}
    assert_same_step((output, grads), step(plain, **batch()))
    if order == "patch first":
        with pytest.raises(RuntimeError, match="derived from a patched class"):
            liger.unpatch(model)
    else:
        liger.unpatch(model)
        assert model(**batch()).logits is not None


def test_fully_shard_with_a_weight_shared_by_embedding_and_head(one_process_group):
    from torch.distributed.fsdp import fully_shard

    plain = make("llama", tie_word_embeddings=True)
    model = liger.patch(twin(plain))
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=one_process_group)
    for _ in range(2):
        output, grads = step(model, **batch())
        grads = {name: grad.full_tensor() for name, grad in grads.items()}
        assert_same_step((output, grads), step(plain, **batch()))


def test_tensor_parallel_head_returns_logits(one_process_group):
    """The head's weight is a DTensor of which each rank holds a part: the loss comes from the gathered
    logits."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    plain = make("llama")
    model = liger.patch(twin(plain))
    plan = {"lm_head": ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    parallelize_module(model, one_process_group, plan)
    assert model.lm_head.weight.placements == (Shard(0),)
    output, grads = step(model, **batch())
    grads["lm_head.weight"] = grads["lm_head.weight"].full_tensor()
    assert_same_step((output, grads), step(plain, **batch()))


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_does_not_wait_for_the_gpu(tied):
    inputs = {name: value for name, value in batch("cuda").items() if name != "attention_mask"}
    inputs["num_items_in_batch"] = torch.tensor(17, device="cuda")
    plain = make("llama", "cuda", torch.bfloat16, tie_word_embeddings=tied)

    def waits(model):
        step(model, **inputs)
        try:
            with no_synchronisation():
                step(model, **inputs)
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            return True
        return False

    if waits(plain):
        pytest.skip("this transformers waits for the GPU in its own code")
    assert not waits(liger.patch(plain))
