# SPDX-License-Identifier: BSD-3-Clause
"""E14: whole training steps of current models, from 1024 to 131072 tokens: full fine-tuning, LoRA, DPO."""

from dataclasses import replace

from liger_bench.models import sizes as model_sizes

from . import long_context, preference_training, training
from .cells import Cell, Experiment, coarse_first

MODELS = ("1b", "qwen3-1.7b", "gemma3-1b", "qwen3-moe", "8b")
FULL, LORA, DPO = "full", "LoRA", "DPO"
RANK = 16
SHAPES = ((1, 1024), (8, 1024), (4, 8192), (1, 131072))
# Pairs and tokens of each of their sequences: as many tokens in all. TRL compiles no model.
PAIRS = ((1, 512), (4, 1024), (2, 8192), (1, 65536))
# liger's own layers take part in LoRA.
LAYERS = "liger, LoRA layers"
METHODS = {
    FULL: training.METHODS,
    LORA: (*training.METHODS, LAYERS),
    DPO: ("transformers", "liger-kernel", "liger"),
}


def _cell(model, task, method, shape):
    batch, sequence = shape
    part = f"{model_sizes.SIZES[model].name}, {task}"
    needs = ("liger_kernel", "triton") if method == "liger-kernel" else ()
    needs += {LORA: ("peft",), DPO: ("trl", "datasets")}.get(task, ())
    settings = {"model": model, "task": task, "batch": batch, "sequence": sequence}
    if task == DPO:
        settings |= {"trainer": "dpo", "count": batch, "length": sequence}
    # A compiled model takes long to start.
    seconds = 400.0 if method == training.COMPILED else 240.0
    order = batch * sequence * (2 if task == DPO else 1)
    ladder = f"{method} {part}"
    return Cell(method, f"{part} {batch}x{sequence}", order, settings, needs, seconds=seconds, ladder=ladder)


def cells(tiny):
    """Of every model and task: every second size first."""
    if tiny:
        plain = [_cell(m, FULL, method, (2, 16)) for m in MODELS[:-1] for method in ("transformers", "liger")]
        adapted = [_cell("1b", LORA, method, (2, 16)) for method in ("transformers", LAYERS)]
        return [*plain, *adapted, _cell("1b", DPO, "liger", (2, 32))]
    return [
        _cell(model, task, method, shape)
        for task, methods in METHODS.items()
        for model in MODELS
        for shape in coarse_first(PAIRS if task == DPO else SHAPES)
        for method in methods
    ]


def measure(cell, machine):
    given = cell.settings
    if given["task"] == DPO:
        return preference_training.measure(cell, machine)
    size = training.size_of(given["model"], machine)
    longest = max(size.config["max_position_embeddings"], given["sequence"])
    size = replace(
        size,
        config={**size.config, "max_position_embeddings": longest},
        lora=RANK if given["task"] == LORA else 0,
    )
    entered = training.patched(machine, lora_linear=True) if cell.method == LAYERS else None
    return training.measure(cell, machine, entered, size)


EXPERIMENT = Experiment(
    "E14", "Whole steps of current models", cells, measure, long_context.table, long_context.draw
)
