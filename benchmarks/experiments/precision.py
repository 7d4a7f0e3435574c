"""E8: training steps with float16 autocast and a gradient scaler, and with ZeRO-3 that offloads weights and states."""

import os

import torch
import torch.distributed as dist

from liger_bench import bench_model

from . import pictures, sharded_training, tables, text, training
from .cells import Cell, Experiment

FP16, ZERO = "fp16 autocast", "ZeRO-3 with offload"
METHODS = ("transformers", "liger", "liger-kernel")
NEEDS = {FP16: (), ZERO: ("deepspeed",)}


def cells(tiny):
    batch, sequence = (2, 16) if tiny else (4, 1024)
    return [
        Cell(
            method,
            size,
            order,
            {"batch": batch, "sequence": sequence},
            NEEDS[size] + (("liger_kernel", "triton") if method == "liger-kernel" else ()),
            ladder=f"{method} {size}",
            seconds=240,
        )
        for order, size in enumerate(NEEDS)
        for method in METHODS
    ]


class Scaled(training.Training):
    """float32 weights, float16 under autocast, a scaler."""

    def build(self):
        super().build()
        self.scaler = torch.amp.GradScaler(self.device)

    def step(self, tokens):
        with torch.autocast(self.device, torch.float16):
            loss = self.call(input_ids=tokens, labels=tokens).loss
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _zero(made, machine, batches):
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if machine.gpu else "cpu")
    import deepspeed

    host = {"device": "cpu", "pin_memory": machine.gpu}
    config = {
        "train_micro_batch_size_per_gpu": batches[0].shape[0],
        "zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host},
        "bf16": {"enabled": True},
        # The optimizers of DeepSpeed are compiled when they are first used.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    made.build()
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-5)
    engine, *_ = deepspeed.initialize(
        model=made.model, optimizer=optimizer, config=config, dist_init_required=False
    )

    def step(tokens):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return sharded_training.timed_steps(step, batches, machine)


def measure(cell, machine):
    given = cell.settings
    size = training.size_of("1b", machine)
    dtype = torch.float32 if cell.size == FP16 else torch.bfloat16
    size = bench_model.replace(size, dtype=dtype)
    entered = training.contestant(cell.method, machine)
    batches = text.batches(machine, size.config["vocab_size"], 3, given["batch"], given["sequence"])
    with entered.context():
        if cell.size == FP16:
            made = Scaled(entered, size, machine)
            made.build()
            return made.measured(batches)
        sharded_training.start(machine)
        record = _zero(training.Training(entered, size, machine), machine, batches)
    dist.destroy_process_group()
    return record


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
