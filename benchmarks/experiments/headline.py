# SPDX-License-Identifier: BSD-3-Clause
"""E14: whole training steps of current models, from 1024 to 131072 tokens: full fine-tuning, LoRA, DPO."""

from dataclasses import replace

from liger_bench.models import sizes as model_sizes

from . import long_context, preference_training, training
from .cells import COMPILED, METHODS, Cell, Experiment, coarse_first, expected_seconds, packages, steps_of

MODELS = ("1b", "qwen3-1.7b", "gemma3-1b", "qwen3-moe", "8b")
# Other mixtures of experts, at the second shape.
MIXTURES = ("mixtral", "gpt-oss")
FULL, KEPT, LORA, DPO = "full", "nothing recomputed", "LoRA", "DPO"
RANK = 16
SHAPES = ((1, 1024), (8, 1024), (4, 8192), (1, 131072))
# A step of the largest model on the longest sequence takes three minutes.
LARGEST = "8b"
# Models with room for all that the backward needs, and their shape.
ROOMY, KEPT_SHAPE = MODELS[:4], (16, 1024)
# Pairs and tokens of each of their sequences: as many tokens in all. TRL compiles no model.
PAIRS = ((4, 1024), (2, 8192))
COMPILED_SHAPE = (4, 8192)
# Fewer tokens in a step: the host decides how fast some methods are.
FEW_TOKENS, MORE_STEPS = 8192, 12


def _few(batch, sequence, task):
    return task != DPO and batch * sequence < FEW_TOKENS * (2 if task == LORA else 1)


def _cell(model, task, method, shape):
    batch, sequence = shape
    part = f"{model_sizes.SIZES[model].name}, {task}"
    needs = {LORA: ("peft",), DPO: ("trl", "datasets")}.get(task, ())
    settings = {"model": model, "task": task, "batch": batch, "sequence": sequence}
    if task == DPO:
        settings |= {"trainer": "dpo", "count": batch, "length": sequence}
    order = batch * sequence * (2 if task == DPO else 1)
    return Cell(
        method,
        f"{part} {batch}x{sequence}",
        order,
        settings,
        (*needs, *packages(method)),
        # A compiled model takes long to start.
        seconds=400.0 if method == COMPILED else 240.0,
        ladder=f"{method} {part}",
        alone=_few(batch, sequence, task),
        work=steps_of(model, method, batch, sequence) if task == FULL else "",
        expected=expected_seconds(model, 2 * batch if task == DPO else batch, sequence, method)
        + (6 if task in (LORA, DPO) else 0),
    )


def cells(tiny):
    """Of every model and task: every second size first."""
    if tiny:
        plain = [
            _cell(m, FULL, method, (2, 16))
            for m in (*MODELS[:-1], *MIXTURES)
            for method in ("transformers", "liger")
        ]
        plain += [_cell("1b", KEPT, method, (2, 16)) for method in ("transformers", "liger")]
        adapted = [_cell("1b", LORA, method, (2, 16)) for method in ("transformers", "liger")]
        return [*plain, *adapted, _cell("1b", DPO, "liger", (2, 32))]
    tasks = [(model, FULL, SHAPES[: 3 if model == LARGEST else None]) for model in MODELS]
    tasks += [(model, FULL, SHAPES[1:2]) for model in MIXTURES]
    tasks += [(model, KEPT, (KEPT_SHAPE,)) for model in ROOMY]
    tasks += [("1b", LORA, SHAPES[1:3]), (LARGEST, LORA, SHAPES[1:2]), ("1b", DPO, PAIRS)]
    made = [
        _cell(model, task, method, shape)
        for model, task, shapes in tasks
        for shape in coarse_first(shapes)
        for method in METHODS
        if method != COMPILED
    ]
    return made + [_cell(model, FULL, COMPILED, COMPILED_SHAPE) for model in MODELS]


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
        checkpointing=given["task"] != KEPT,
    )
    few = _few(given["batch"], given["sequence"], given["task"])
    return training.measure(cell, machine, size=size, steps=MORE_STEPS if few else training.STEPS)


EXPERIMENT = Experiment(
    "E14", "Whole steps of current models", cells, measure, long_context.table, long_context.draw
)
