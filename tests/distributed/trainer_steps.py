# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of the Trainer share: rows of different lengths, its arguments, and the steps that it
took."""

import families
import ranks
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState

STEPS, MICRO_BATCHES = 2, 2


class Rows(torch.utils.data.Dataset):
    """Rows of different lengths, some of which have few labels."""

    def __len__(self):
        return 2 * ranks.WORLD * MICRO_BATCHES * STEPS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, families.IMAGE_TOKEN, (12 + index % 4,), generator=generator)
        labels = ids.clone()
        labels[: 2 + index % 5] = -100
        return {"input_ids": ids, "labels": labels}


def collate(rows):
    length = max(len(row["input_ids"]) for row in rows)

    def padded(name, value):
        return torch.stack(
            [torch.nn.functional.pad(r[name], (0, length - len(r[name])), value=value) for r in rows]
        )

    ids, labels = padded("input_ids", 0), padded("labels", -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


def reset():
    """accelerate has one state in a process, which the first Accelerator determines."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Trainer(transformers.Trainer):
    """Keeps the micro-batches of this rank."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen = [*getattr(self, "seen", []), families.to(inputs, "cpu")]
        return super().training_step(model, inputs, *args, **kwargs)


def arguments(folder, **options):
    """The TrainingArguments of a short run with an optimizer that is linear in the gradients."""
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": STEPS, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "use_cpu": not ranks.ON_GPU, "learning_rate": families.LEARNING_RATE, "optim": "sgd",
        "optim_args": f"momentum={families.MOMENTUM}", "lr_scheduler_type": "constant", "max_grad_norm": 1e9,
        "dataloader_pin_memory": False, "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    return transformers.TrainingArguments(**{**settings, **options})


def losses_of(trainer):
    losses = [torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return losses


def steps_of(seen):
    """The steps of :func:`families.exactly` from the micro-batches of this rank."""
    of_ranks = [None] * ranks.WORLD
    torch.distributed.all_gather_object(of_ranks, seen)
    steps = []
    for start in range(0, STEPS * MICRO_BATCHES, MICRO_BATCHES):
        inputs = [x for of_rank in of_ranks for x in of_rank[start : start + MICRO_BATCHES]]
        count = sum(int((x["labels"][:, 1:] != -100).sum()) for x in inputs)
        more = {"num_items_in_batch": count / ranks.WORLD, "use_cache": False}
        steps.append(
            [
                {
                    "input_ids": x["input_ids"],
                    "attention_mask": x["attention_mask"],
                    "labels": x["labels"],
                    **more,
                }
                for x in inputs
            ]
        )
    return steps
