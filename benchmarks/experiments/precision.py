# SPDX-License-Identifier: BSD-3-Clause
"""E8: training steps with gradient checkpointing: float16 autocast and a gradient scaler; float16 under
ZeRO-3 that offloads weights and states."""

from dataclasses import replace
from functools import partial

import torch

from . import pictures, sharded_training, tables, text, training
from .cells import Experiment, cells_of_kinds

FP16, ZERO = "fp16 autocast", "fp16, ZeRO-3 with offload"
METHODS = ("transformers", "liger", "liger-kernel")
NEEDS = {FP16: (), ZERO: ("deepspeed",)}


def cells(tiny):
    # The host computes.
    return cells_of_kinds(METHODS, NEEDS, tiny, alone=True, expected=25.0)


class Scaled(training.Training):
    """float32 weights, float16 under autocast, a scaler."""

    def build(self):
        super().build()
        self.scaler = torch.amp.GradScaler(self.device)

    def eager_step(self, tokens):
        with torch.autocast(self.device, torch.float16):
            loss = self.call(input_ids=tokens, labels=tokens).loss
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def measure(cell, machine):
    given = cell.settings
    size = training.size_of("1b", machine)
    entered = training.contestant(cell.method, machine)
    if cell.size != FP16:
        shard = partial(sharded_training.zero3, batch=given["batch"], offload=True)
        # DeepSpeed has no float16 on a CPU.
        size = replace(size, dtype=torch.float16 if machine.gpu else torch.bfloat16)
        return sharded_training.measure(cell, machine, entered, size, shard)
    made = Scaled(entered, replace(size, dtype=torch.float32), machine)
    batches = text.batches(machine, size.config["vocab_size"], 3, given["batch"], given["sequence"])
    with entered.context():
        made.build()
        return made.measured(batches)


def draw(result):
    return {"": pictures.bars(result, "Training steps of Llama-3.2-1B, 4 x 1024 tokens")}


EXPERIMENT = Experiment(
    "E8",
    "fp16 mixed precision, ZeRO-3 with offload",
    cells,
    measure,
    lambda result: (
        f"{tables.by_method(result, tables.speed_and_memory, label='')}\n\n{tables.behind(result)}"
    ),
    draw,
)
