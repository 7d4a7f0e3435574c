# SPDX-License-Identifier: BSD-3-Clause
"""Patched models whose lm_head shards its classes by tensor parallelism: the loss is of the
vocabulary-parallel op.

torch's parallelize_module shards the models, before or after they are patched, or transformers does.
"""

import inspect
import logging
from functools import partial

import families
import pytest
import ranks
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import liger
from liger.transformers import patch_report
from liger.transformers.head import loss_call

KIND = "vocab_parallel_fused_linear_cross_entropy"
LAYERS = {
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel,
    **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": RowwiseParallel,
}
GATHERED = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
takes_gpus = pytest.mark.skipif(
    torch.cuda.is_available() and not ranks.ON_GPU, reason="transformers takes GPUs, one for each rank"
)


def by_torch(name, patched=None, plan=GATHERED, change=None, tied=False, options=None, **settings):
    """A model that parallelize_module shards. ``patched``: None, or "before" or "after" that."""
    model = families.make(name, tied=tied, **settings)
    if change is not None:
        change(model)
    if patched == "before":
        liger.patch(model, **(options or {}))
    parallelize_module(model, ranks.mesh(), {n: style() for n, style in LAYERS.items()} | plan)
    if patched == "after":
        liger.patch(model, **(options or {}))
    return model


def by_transformers(folder, name, patched=None, tied=False):
    """A model that from_pretrained shards, or apply_tensor_parallelism after it was patched."""
    if patched == "before":
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        if "tp_plan" not in inspect.signature(apply_tensor_parallelism).parameters:
            pytest.skip("this version of transformers shards placeholders alone, before weights are loaded")
        model = liger.patch(families.make(name, tied=tied))
        plan = {n: style for n, style in model.tp_plan.items() if "*" not in n}
        # It wraps parameters that have their values already.
        plan |= {f"{n}.weight": style for n, style in plan.items()}
        return apply_tensor_parallelism(model, ranks.mesh(), plan)
    shared = [folder]
    dist.broadcast_object_list(shared)
    if ranks.RANK == 0:
        families.make(name, tied=tied).save_pretrained(shared[0])
    dist.barrier()
    model = getattr(transformers, families.ALL[name].model).from_pretrained(
        shared[0], attn_implementation="eager", tp_plan="auto"
    )
    return (liger.patch(model) if patched else model).train()


def batches(name, steps=3):
    """All ranks have one batch; families.exactly takes the mean over two."""
    found = []
    for step in range(steps):
        inputs = families.batch(name, step, 0)
        count = int((inputs["labels"][:, 1:] != -100).sum())
        found.append([{**inputs, "num_items_in_batch": count, "use_cache": False}] * ranks.WORLD)
    return found


def train(model, steps):
    optimizer, losses, grads, before = families.optimizer_of(model), [], [], families.weights_of(model)
    for inputs, *_ in steps:
        optimizer.zero_grad()
        loss = model(**families.to(inputs, ranks.DEVICE)).loss
        loss.backward()
        losses.append(loss.detach())
        grads.append(families.gradients_of(model))
        optimizer.step()
    return families.result(losses, grads, before, families.weights_of(model))


class Heads(TorchDispatchMode):
    """``weights`` has the shape of the weight in each call of the vocabulary-parallel op; ``from_logits``
    counts losses that are computed from logits."""

    def __init__(self):
        super().__init__()
        self.weights, self.from_logits = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        if name == "liger_distributed::fused_linear_ce_forward":
            self.weights.append(tuple(args[1].shape))
        self.from_logits += name == "liger::cross_entropy_forward"
        return func(*args, **(kwargs or {}))


def assert_sharded_loss(model, inputs, vocab=families.VOCAB):
    """The report has the op, and a step runs it once, on the shard of this rank, without logits."""
    assert list(patch_report(model).replaced.values()).count(KIND) == 1
    with Heads() as heads:
        output = model(**families.to(inputs, ranks.DEVICE), **{"use_cache": False})
        output.loss.backward()
    model.zero_grad()
    classes = torch.empty(vocab).chunk(ranks.WORLD)[ranks.RANK].numel()
    assert (heads.weights, heads.from_logits) == ([(classes, families.HIDDEN)], 0)
    assert output.logits is None and type(output.loss) is torch.Tensor and output.loss.dim() == 0


def one_step(model, inputs):
    """(loss, {name: gradient})."""
    model.zero_grad()
    loss = model(**families.to(inputs, ranks.DEVICE), use_cache=False).loss
    loss.backward()
    return loss.detach(), families.gradients_of(model)


def assert_same_step(ours, theirs, tolerance=1e-5):
    (loss, grads), (expected, wanted) = ours, theirs
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        error = (grad - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-6)
        assert error <= 2 * tolerance, f"{name}: {error.item():.3g}"


def compare(name, make, dtype=torch.float32, tied=False):
    steps = batches(name)
    ours, theirs = make(True), make(False)
    assert_sharded_loss(ours, families.batch(name, 0, 0))
    exact = families.exactly(families.make(name, tied=tied), steps)
    families.assert_as_exact(train(ours, steps), train(theirs, steps), exact, dtype)


@pytest.mark.parametrize("patched", ["before", "after"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_matches_plain_model(name, patched):
    """Gemma 2 has a softcap."""
    compare(name, lambda ours: by_torch(name, patched if ours else None))


@takes_gpus
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_plan_of_transformers(name, tied, tmp_path):
    if name == "mixtral" and torch.__version__.startswith("2.11."):
        pytest.skip(
            "full_tensor() of torch 2.11 takes no mesh with a _StridedShard alone, as experts have it"
        )
    make = partial(by_transformers, tmp_path, name, tied=tied)
    compare(name, lambda ours: make("after" if ours else None), tied=tied)


@takes_gpus
def test_transformers_shards_a_patched_model():
    """The lm_head alone, whose forward becomes one of the instance."""
    model = by_transformers(None, "llama", "before")
    assert isinstance(model.lm_head.weight, DTensor)
    inputs = families.batch("llama", 0, 0)
    # The first call installs the loss in front of that forward.
    plain = families.make("llama", tied=False)
    assert_same_step(one_step(model, inputs), one_step(plain, inputs))
    assert_sharded_loss(model, inputs)


def in_both_forms(folder, patched):
    yield by_torch("llama", patched)
    if not torch.cuda.is_available() or ranks.ON_GPU:
        yield by_transformers(folder, "llama", patched)


def test_evaluation(tmp_path):
    """Logits and losses agree with the model that is not patched. transformers uses local shards here."""
    inputs = families.to(families.batch("llama", 0, 0), ranks.DEVICE)
    unlabelled = {name: value for name, value in inputs.items() if name != "labels"}
    for ours, theirs in zip(in_both_forms(tmp_path, "after"), in_both_forms(tmp_path, None), strict=True):
        ours.eval(), theirs.eval()
        for context in (torch.no_grad, torch.enable_grad):
            with context():
                for given in (inputs, unlabelled):
                    found, expected = ours(**given), theirs(**given)
                    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
                with Heads() as heads:
                    skipped = ours(**inputs, skip_logits=True)
                assert skipped.logits is None and len(heads.weights) == 1
                for loss in (skipped.loss, ours(**inputs).loss):
                    torch.testing.assert_close(loss, theirs(**inputs).loss, rtol=1e-5, atol=0)


ON_TOKENS = PrepareModuleOutput(
    output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False
)
OTHER_PLANS = {
    "gathered as a DTensor": {"lm_head": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)},
    "local logits": {"lm_head": ColwiseParallel()},
    "DTensor of logits": {"lm_head": ColwiseParallel(use_local_output=False)},
    "sharded tokens": {
        "model.norm": ON_TOKENS,
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
}


@pytest.mark.parametrize("patched", ["before", "after"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("plan", OTHER_PLANS)
def test_other_layouts(plan, name, patched):
    """Of the input and the output of the head. The loss is over all tokens and all classes."""
    inputs = families.batch(name, 0, 0)
    model = by_torch(name, patched, OTHER_PLANS[plan])
    assert_same_step(one_step(model, inputs), one_step(families.make(name, tied=False), inputs))
    assert_sharded_loss(model, inputs)


def test_bias_and_shards_of_different_sizes():
    """301 classes, with labels of the last one, and a head with a bias."""

    def change(model):
        head = torch.nn.Linear(families.HIDDEN, 301, device=ranks.DEVICE)
        with torch.no_grad():
            head.weight.copy_(model.lm_head.weight)
            head.bias.copy_(torch.linspace(-1, 1, 301))
        model.lm_head = head

    inputs = families.batch("llama", 0, 0)
    inputs["labels"][0, -2:] = 300
    plain = families.make("llama", tied=False, vocab_size=301)
    change(plain)
    model = by_torch("llama", "after", change=change, vocab_size=301)
    assert_same_step(one_step(model, inputs), one_step(plain, inputs))
    assert_sharded_loss(model, inputs, 301)


def test_frozen_head():
    inputs = families.batch("llama", 0, 0)

    def change(model):
        model.lm_head.weight.requires_grad_(False)

    theirs, ours = (by_torch("llama", patched, change=change) for patched in (None, "after"))
    (loss, grads), (expected, wanted) = one_step(ours, inputs), one_step(theirs, inputs)
    assert grads.pop("lm_head.weight") is wanted.pop("lm_head.weight") is None
    assert_same_step((loss, grads), (expected, wanted))


def test_autocast():
    inputs = families.batch("llama", 0, 0)
    model, plain = by_torch("llama", "after"), by_torch("llama")
    with torch.autocast(ranks.DEVICE.type, torch.bfloat16):
        assert_same_step(one_step(model, inputs), one_step(plain, inputs), 2e-2)


def test_compiled():
    inputs = families.to(families.batch("llama", 0, 0), ranks.DEVICE)
    model = by_torch("llama", "before")
    expected = one_step(model, inputs)
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert_same_step(one_step(model, inputs), expected)


@takes_gpus
def test_unpatch(tmp_path):
    """The forward of transformers is back; patching twice replaces it once."""
    model = by_transformers(tmp_path, "llama")
    forward = model.lm_head.forward
    liger.patch(liger.patch(model))
    assert model.lm_head.forward.liger_replaced is forward
    liger.unpatch(model)
    assert model.lm_head.forward is forward and type(model.lm_head) is torch.nn.Linear


# --- what is not supported ----------------------------------------------------------------------------------


def assert_from_logits(model, expected, reason, caplog):
    """The report and one warning say why; the loss is right."""
    (left,) = (text for name, text in patch_report(model).left.items() if name == "")
    assert reason in left and left.endswith("the loss is computed from full logits")
    loss_call.warn_about_head.cache_clear()
    inputs = families.batch("llama", 0, 0)
    with caplog.at_level(logging.WARNING, "liger.transformers"), Heads() as heads:
        for _ in range(2):
            found = one_step(model, inputs)
    assert not heads.weights
    assert [r.getMessage() for r in caplog.records if reason in r.getMessage()] == [
        f"liger: a model was patched, but now {left}"
    ]
    if expected is not None:
        assert_same_step(found, one_step(expected, inputs))


def test_rowwise_head(caplog):
    plan = {"lm_head": RowwiseParallel(input_layouts=Replicate())}
    model = by_torch("llama", "before", plan)
    assert_from_logits(model, families.make("llama", tied=False), "placements (Shard(dim=1),)", caplog)


def test_sum_of_weight_gradients(caplog):
    model = by_torch("llama", "after", options={"accumulate_grad_weight": True})
    caplog.clear()
    assert_from_logits(model, families.make("llama", tied=False), "accumulate_grad_weight", caplog)


def test_shards_that_are_no_dtensors(caplog):
    """As in older versions of transformers: hooks gather the logits of local shards."""

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            parts = [torch.empty_like(logits) for _ in range(ranks.WORLD)]
            dist.all_gather(parts, logits.contiguous())
            return torch.cat(parts, -1)

        @staticmethod
        def backward(ctx, grad):
            return grad.chunk(ranks.WORLD, -1)[ranks.RANK].contiguous()

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return ranks.total(grad)

    def before(module, inputs):
        return (Summed.apply(*inputs),)

    def after(module, inputs, output):
        return Gathered.apply(output)

    for hook in (before, after):
        hook.__module__ = "transformers.integrations.tensor_parallel"

    # The ranks gather shards of one size.
    model, plain = (families.make("llama", tied=False, vocab_size=304) for _ in range(2))
    head = model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().chunk(ranks.WORLD)[ranks.RANK].clone())
    head.register_forward_pre_hook(before)
    head.register_forward_hook(after)
    liger.patch(model)
    caplog.clear()
    assert_from_logits(model, None, "a shard of the weight that is no DTensor", caplog)
    inputs = families.batch("llama", 0, 0)
    (loss, grads), (expected, wanted) = one_step(model, inputs), one_step(plain, inputs)
    wanted["lm_head.weight"] = wanted["lm_head.weight"].chunk(ranks.WORLD)[ranks.RANK]
    assert_same_step((loss, grads), (expected, wanted))
