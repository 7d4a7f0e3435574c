# SPDX-License-Identifier: BSD-3-Clause
"""The Trainer with DeepSpeed's ZeRO-2 and ZeRO-3: losses, gradients and weights of a patched model after some
steps."""

import families
import pytest
import ranks
import torch
import transformers
from test_deepspeed import deepspeed
from test_deepspeed_families import CONFIG, full
from trainer_steps import Rows, Trainer, arguments, collate, losses_of, reset, steps_of
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not ranks.ON_GPU, reason="the Trainer takes GPUs, one for each rank"
)
NAMES = ["llama", "qwen3", "qwen3_moe", "mixtral"]
FULL_WEIGHT = deepspeed.utils.safe_get_full_fp32_param


def config_of(stage, bfloat16=False, **zero):
    """``auto``: what the arguments of the Trainer say."""
    zero = {**(CONFIG["zero_optimization"] if stage == 3 else {"stage": stage}), **zero}
    automatic = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    return {**CONFIG, **automatic, "zero_optimization": zero, "bf16": {"enabled": bfloat16}}


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch):
    # TrainingArguments set it for the process.
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    if not ranks.ON_GPU:
        # With use_cpu=True accelerate takes no DeepSpeed, without it the arguments refuse bfloat16 on a CPU.
        monkeypatch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True)
    yield
    reset()
    unset_hf_deepspeed_config()


class _Trainer(Trainer):
    """Keeps the gradients of every step: the backward of accelerate ends with the step of the engine."""

    def training_step(self, model, *args, **kwargs):
        if not hasattr(self, "gradients"):
            self.gradients, self.before, step = [], full(model, FULL_WEIGHT), model.step

            def record(*args, **kwargs):
                self.gradients.append(full(model, deepspeed.utils.safe_get_full_grad))
                return step(*args, **kwargs)

            model.step = record
        return super().training_step(model, *args, **kwargs)


def train(make, folder, stage, **options):
    """(the :class:`families.Result`, the micro-batches of this rank).

    ``make`` is called after the arguments exist: from then on ``from_pretrained`` partitions weights for
    ZeRO-3.
    """
    reset()
    zero = options.pop("zero", {})
    given = arguments(
        folder, use_cpu=False, deepspeed=config_of(stage, options.get("bf16", False), **zero), **options
    )
    trainer = _Trainer(make(), given, train_dataset=Rows(), data_collator=collate)
    trainer.train()
    engine = trainer.deepspeed
    try:
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        assert engine.zero_optimization_stage() == stage
        after = full(engine, FULL_WEIGHT)
        return families.result(losses_of(trainer), trainer.gradients, trainer.before, after), trainer.seen
    finally:
        engine.destroy()


def run(name, folder, stage, dtype=torch.float32, make=families.make, **options):
    results = []
    for is_patched in (True, False):
        models = []

        def new(models=models, is_patched=is_patched):
            models.append(make(name))
            if is_patched and not options.get("use_liger_kernel"):
                families.patched(models[0], name)
            return models[0]

        own = {**options, "use_liger_kernel": is_patched} if options.get("use_liger_kernel") else options
        results.append(train(new, folder, stage, **own))
        if is_patched:
            families.assert_patched(models[0], name)
    (ours, seen), (theirs, again) = results
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(seen, again, strict=True))
    families.assert_as_exact(ours, theirs, families.exactly(families.make(name), steps_of(seen)), dtype)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_float32(name, stage, tmp_path):
    run(name, tmp_path, stage)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name, stage, tmp_path):
    run(name, tmp_path, stage, torch.bfloat16, bf16=True)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_checkpointing(name, stage, tmp_path):
    run(name, tmp_path, stage, gradient_checkpointing=True)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_offload(name, stage, tmp_path):
    offload = {"device": "cpu", "pin_memory": False}
    zero = {"offload_optimizer": offload, **({"offload_param": offload} if stage == 3 else {})}
    run(name, tmp_path, stage, zero=zero)


@pytest.mark.usefixtures("liger_kernel")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_use_liger_kernel(name, stage, tmp_path):
    """The Trainer patches the model itself, before DeepSpeed partitions it."""
    run(name, tmp_path, stage, use_liger_kernel=True)


@pytest.mark.parametrize("name", NAMES)
def test_partitioned_from_the_start(name, tmp_path):
    """The arguments of the Trainer come first: from_pretrained loads partitioned weights, and then they are
    patched."""
    folder = [tmp_path]
    torch.distributed.broadcast_object_list(folder)
    if ranks.RANK == 0:
        families.make(name).save_pretrained(folder[0] / "model")
    torch.distributed.barrier()

    def load(name):
        model = getattr(transformers, families.ALL[name].model).from_pretrained(
            folder[0] / "model", attn_implementation="eager"
        )
        assert all(parameter.numel() == 0 for parameter in model.parameters())
        return model.train()

    run(name, tmp_path, 3, make=load)
