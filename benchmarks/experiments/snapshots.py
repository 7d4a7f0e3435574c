# SPDX-License-Identifier: BSD-3-Clause
"""E6: the memory of two training steps over time, by category; and what ``liger plan`` predicts of the
lm_head."""

from dataclasses import replace

from liger.cli.plan import SM90, head_memory

from . import tables, text, training
from .cells import Experiment, training_cells
from .memory_timeline import figure, record_steps
from .results import cells_of, ordered

METHODS = ("transformers", "liger", "liger-kernel")
BATCHES = (4, 8, 112)


def cells(tiny):
    shapes = [(2, 16)] if tiny else [(b, 1024) for b in BATCHES]
    made = training_cells(METHODS, shapes, lambda batch, sequence: batch)
    # Their records have the course of a step, not its speed.
    return [replace(cell, work="") for cell in made]


def measure(cell, machine):
    batch, sequence = cell.settings["batch"], cell.settings["sequence"]
    size = training.size_of("1b", machine)
    made = training.Training(training.contestant(cell.method, machine), size, machine)
    config = size.config
    batches = text.batches(machine, config["vocab_size"], 3, batch, sequence)
    with made.contestant.context():
        made.build()
        made.warm_up(batches[:1])
        recorded = record_steps(made.model, made.call, made.optimizer, batches[1:], made.device)
    tokens = batch * sequence
    planned = head_memory(
        tokens,
        config["hidden_size"],
        config["vocab_size"],
        size.dtype,
        capability=SM90 if machine.gpu else None,
    )
    element = size.dtype.itemsize
    return {
        "timeline": recorded,
        "peak_bytes": recorded["peak"],
        # The article's estimate: the logits, against one saved input per checkpointed layer.
        "logits_bytes": tokens * config["vocab_size"] * element,
        "checkpoint_bytes": tokens * config["hidden_size"] * config["num_hidden_layers"] * element,
        "planned_bytes": planned["peak" if cell.method == "transformers" else "peak_liger"],
    }


def head_peak(cell):
    """The most bytes that the lm_head and its loss have at one time."""
    return max(cell["timeline"]["bytes"]["lm_head and loss"])


def table(result):
    rows = []
    for size in ordered(result, "size"):
        for cell in cells_of(result, size=size):
            name = [size, cell["method"]]
            if tables.shape(cell) is not None:
                rows.append([*name, tables.shape(cell), "", "", "", ""])
                continue
            planned = cell["planned_bytes"] if cell["method"] in ("transformers", "liger") else None
            rows.append(
                [*name, *(tables.gib(v) for v in (
                    cell["peak_bytes"], head_peak(cell), planned, cell["logits_bytes"], cell["checkpoint_bytes"]
                ))]
            )  # fmt: skip
    return tables.markdown(
        [
            "batch x tokens", "", "peak", "of it lm_head and loss", "planned for them", "estimate: logits",
            "estimate: checkpoints",
        ],
        rows,
    )  # fmt: skip


def draw(result):
    figures = {}
    for size in ordered(result, "size"):
        measured = {c["method"]: c["timeline"] for c in cells_of(result, size=size) if c["status"] == "ok"}
        if measured:
            figures[size] = figure(measured, f"Memory of two training steps, {size} tokens")
    return figures


EXPERIMENT = Experiment("E6", "Memory over time by category", cells, measure, table, draw)
