# SPDX-License-Identifier: BSD-3-Clause
"""Short runs of the Trainer of transformers on tiny models."""

import pytest
import torch
import transformers
from tiny_models import batch


class Tokens(torch.utils.data.Dataset):
    """Sequences of different lengths, so that micro-batches hold different numbers of labels."""

    def __init__(self):
        self.rows = batch(rows=12, tokens=16)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        row = {name: value[index].clone() for name, value in self.rows.items()}
        row["labels"][4 + index :] = -100
        return row


def train(model, folder, optimizers=(None, None), **overrides):
    """The losses that three optimizer steps of the Trainer log, and its evaluation loss."""
    pytest.importorskip("accelerate")
    settings = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
        **overrides,
    }
    arguments = transformers.TrainingArguments(**settings)
    if arguments.n_gpu > 1:
        # Otherwise the Trainer would replicate the model by nn.DataParallel.
        arguments._n_gpu = 1
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Tokens(), eval_dataset=Tokens(), optimizers=optimizers
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]
