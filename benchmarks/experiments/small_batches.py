# SPDX-License-Identifier: BSD-3-Clause
"""E18: training steps on few tokens, which the host issues more slowly than a GPU computes them, by each way
of docs/recipes/small_batches.md."""

from dataclasses import replace

import liger
from liger_bench.models.contestants import Contestant, reduce_overhead

from . import tables, training
from .cells import COMPILED, Cell, Experiment

FULL, LORA = "full", "LoRA"
RANK = 16
REDUCED, OURS_REDUCED, GRAPH = "transformers, reduce-overhead", "liger, reduce-overhead", "liger, CUDA graph"
METHODS = ("transformers", COMPILED, REDUCED, "liger", OURS_REDUCED, GRAPH)
UNCOMPILED = ("transformers", "liger", GRAPH)
# (task, shape, methods): a model takes long to compile.
ROWS = (
    (FULL, (4, 512), METHODS),
    (LORA, (4, 512), (*UNCOMPILED, OURS_REDUCED)),
    (FULL, (1, 2048), (*UNCOMPILED, REDUCED, OURS_REDUCED)),
    (LORA, (1, 2048), UNCOMPILED),
)
TINY_ROWS = tuple((task, (2, 16), UNCOMPILED[:2]) for task in (FULL, LORA))
STEPS = 10


def cells(tiny):
    return [
        Cell(
            method,
            f"{'LoRA ' if task == LORA else ''}{batch}x{sequence}",
            order,
            {"batch": batch, "sequence": sequence, "task": task},
            ("peft",) if task == LORA else (),
            seconds=240,
            ladder=f"{method} {order}",
            expected=45.0 if method in (COMPILED, REDUCED, OURS_REDUCED) else 6.0,
            alone=True,
        )
        for order, (task, (batch, sequence), methods) in enumerate(TINY_ROWS if tiny else ROWS)
        for method in methods
    ]


def contestant(method, machine):
    if method in ("transformers", COMPILED, "liger"):
        return training.contestant(method, machine)
    prepare = {
        REDUCED: reduce_overhead,
        OURS_REDUCED: lambda model: reduce_overhead(liger.patch(model)),
        GRAPH: liger.patch,
    }[method]
    return Contestant(prepare, training.context(machine), captured=method == GRAPH)


def measure(cell, machine):
    # torch.compile captures its CUDA graphs in the second step.
    entered = replace(contestant(cell.method, machine), warm_up=3)
    size = replace(training.size_of("1b", machine), lora=RANK if cell.settings["task"] == LORA else 0)
    record = training.measure(cell, machine, entered, size, STEPS)
    # What a CUDA graph works in is reserved, but does not count as allocated when the graph is replayed.
    return record | {"peak_bytes": record.get("reserved_bytes", record["peak_bytes"])}


EXPERIMENT = Experiment("E18", "Small batches", cells, measure, tables.training, lambda result: {})
