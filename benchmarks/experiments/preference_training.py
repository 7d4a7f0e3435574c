# SPDX-License-Identifier: BSD-3-Clause
"""DPO and ORPO training through TRL: TRL alone, with liger-kernel's layers, with liger.

Words of the dataset are tokens of the text: a prompt, the text that follows as the chosen answer, and text
from another place as the rejected one.
"""

import importlib
import os
import tempfile
import time

import torch

from liger_bench.measure import spread

from . import text, training

STEPS = 3


def tokenizer(vocabulary):
    """A tokenizer of the words t0, t1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t0"
    )


def pairs(machine, vocabulary, count, length):
    """A dataset of ``count`` pairs whose sequences have ``length`` tokens with those that the trainer
    adds."""
    from datasets import Dataset

    windows = text.batches(machine, vocabulary, 2, count, length - 2).tolist()
    prompt = length // 4

    def words(ids):
        return " ".join(f"t{i}" for i in ids)

    return Dataset.from_list(
        [
            {
                "prompt": words(first[:prompt]),
                "chosen": " " + words(first[prompt:]),
                "rejected": " " + words(other[prompt:]),
            }
            for first, other in zip(*windows, strict=True)
        ]
    )


def make_trainer(cell, machine, folder, model, reference, data, vocabulary):
    import trl

    given = cell.settings
    options = {
        "output_dir": folder, "per_device_train_batch_size": given["count"], "max_steps": STEPS, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "learning_rate": 1e-5, "beta": 0.1,
        "max_length": given["length"], "gradient_checkpointing": True, "optim": "adamw_torch_fused",
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "bf16": machine.gpu, "use_cpu": not machine.gpu,
        "use_liger_kernel": cell.method == "liger-kernel", "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
    }  # fmt: skip
    common = {"train_dataset": data, "processing_class": tokenizer(vocabulary)}
    if given["trainer"] == "dpo":
        return trl.DPOTrainer(model, ref_model=reference, args=trl.DPOConfig(**options), **common)
    orpo = importlib.import_module("trl.experimental.orpo")
    return orpo.ORPOTrainer(model, args=orpo.ORPOConfig(**options), **common)


def stopwatch(machine):
    """A callback of the trainer with the milliseconds of every step; peak memory counts from the second step
    on."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):
        def __init__(self):
            self.times = []

        def on_step_begin(self, arguments, state, control, **_):
            if machine.gpu:
                torch.cuda.synchronize()
                if len(self.times) == 1:
                    torch.cuda.reset_peak_memory_stats()
            self.start = time.perf_counter()

        def on_step_end(self, arguments, state, control, **_):
            if machine.gpu:
                torch.cuda.synchronize()
            self.times.append((time.perf_counter() - self.start) * 1e3)

    return Stopwatch()


def measure(cell, machine):
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import liger.trl

    given = cell.settings
    size = training.size_of(given.get("model", "1b"), machine)
    vocabulary = size.config["vocab_size"]
    make = training.Training(training.contestant("transformers", machine), size, machine).make_model
    model, reference = make(), make() if given["trainer"] == "dpo" else None
    if cell.method == "liger":
        liger.patch(model)
        if reference is not None:
            liger.patch(reference)
    data = pairs(machine, vocabulary, given["count"] * STEPS, given["length"])
    watch = stopwatch(machine)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(cell, machine, folder, model, reference, data, vocabulary)
        if cell.method == "liger":
            liger.trl.patch(trainer)
        trainer.add_callback(watch)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    milliseconds = spread(watch.times[1:])
    return {
        "ms": milliseconds,
        "tokens_per_second": 2 * given["count"] * given["length"] / milliseconds["median"] * 1e3,
        "peak_bytes": torch.cuda.max_memory_allocated() if machine.gpu else None,
        "first_loss": losses[0],
        "losses": losses,
    }
