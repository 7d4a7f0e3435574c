# SPDX-License-Identifier: BSD-3-Clause
"""E16: what recomputation costs: plans of a given memory, with and without host memory, against full
checkpointing."""

import functools
from dataclasses import dataclass

import liger
from liger.transformers.checkpointing.checkpoint import planners
from liger_bench.models.contestants import Contestant, adamw, in_backward, with_inputs_on_host

from . import pictures, tables, training
from .cells import Cell, Experiment, expected_seconds, packages, steps_of
from .results import GIB

PLAN = "liger, plan"
OFFLOAD, RELEASE = f"{PLAN}, offload", f"{PLAN}, offload, released gradients"
TILED_OFFLOAD, TILED_RELEASE = (name.replace(PLAN, f"{PLAN}, tiled MLP") for name in (OFFLOAD, RELEASE))
RELEASED = (RELEASE, TILED_RELEASE)
PEERS, TRANSFORMERS_OFFLOAD = ("transformers", "liger-kernel"), "transformers, offload"
METHODS = (
    "transformers",
    TRANSFORMERS_OFFLOAD,
    "liger-kernel",
    "liger",
    PLAN,
    OFFLOAD,
    RELEASE,
    TILED_OFFLOAD,
    TILED_RELEASE,
)
# Steps after which a plan is final; of steps that take a quarter of a minute the fourth is close to it.
WARM_UP, LONG_WARM_UP, LONG = 7, 4, 2**17
# A memory that no plan of a tiny model reaches.
TINY_MEMORY = 1.0


@dataclass(frozen=True)
class Row:
    """A batch, and the GiB that plans have."""

    batch: int
    sequence: int
    memories: dict[str, float]

    @property
    def tokens(self):
        return self.batch * self.sequence


ROWS = (
    Row(4, 8192, {PLAN: 14.8, OFFLOAD: 12.0, RELEASE: 12.0}),
    Row(1, 32768, {PLAN: 14.8, OFFLOAD: 12.0, RELEASE: 12.0}),
    Row(32, 1024, {PLAN: 17.6, OFFLOAD: 12.0}),
    # Gate, up and their gradients of a whole layer are the peak of long sequences.
    Row(1, 131072, {PLAN: 37.0, OFFLOAD: 20.0, TILED_RELEASE: 17.5}),
    Row(4, 65536, {TILED_OFFLOAD: 30.0}),
    Row(512, 1024, {OFFLOAD: 51.0}),
)
PICTURED = ("4x8192", "1x131072")
TINY_ROWS = (
    Row(2, 16, dict.fromkeys((PLAN, OFFLOAD, RELEASE), TINY_MEMORY)),
    Row(1, 32, dict.fromkeys((PLAN, OFFLOAD, TILED_RELEASE), TINY_MEMORY)),
)


def _warm_up(tokens):
    return LONG_WARM_UP if tokens >= LONG else WARM_UP


def cells(tiny):
    made = []
    for row in TINY_ROWS if tiny else ROWS:
        made += [
            Cell(
                method,
                f"{row.batch}x{row.sequence}",
                row.tokens,
                {"batch": row.batch, "sequence": row.sequence, "memory": row.memories.get(method)},
                packages(method),
                # A batch that has no memory for one length may have it for another.
                ladder=f"{method} {row.batch}x{row.sequence}",
                seconds=240,
                work=steps_of("1b", method, row.batch, row.sequence) if method in PEERS else "",
                expected=expected_seconds(
                    "1b",
                    row.batch,
                    row.sequence,
                    method,
                    _warm_up(row.tokens) if method in row.memories else 2,
                ),
            )
            for method in METHODS
            if method in row.memories or not method.startswith(PLAN)
            # Logits of more tokens have no room.
            if method != TRANSFORMERS_OFFLOAD or row.tokens < LONG
        ]
    return made


def contestant(cell, machine):
    """Every layer is recomputed by ``transformers``, ``liger-kernel`` and ``liger``."""
    if cell.method == TRANSFORMERS_OFFLOAD:
        return Contestant(with_inputs_on_host)
    if cell.settings["memory"] is None:
        if cell.method == "liger":
            return training.patched(machine, recompute=True)
        return training.contestant(cell.method, machine)
    tokens = cell.settings["batch"] * cell.settings["sequence"]
    return Contestant(
        functools.partial(
            _planned,
            memory=int(cell.settings["memory"] * GIB),
            offload=cell.method != PLAN,
            tiled=cell.method in (TILED_OFFLOAD, TILED_RELEASE),
        ),
        training.context(machine),
        warm_up=_warm_up(tokens),
        optimizer=in_backward(adamw) if cell.method in RELEASED else adamw,
    )


def _planned(model, memory, offload, tiled):
    patched = liger.patch(model, recompute=True, tiled_mlp=tiled)
    return liger.transformers.checkpoint(patched, memory, offload=offload)


def measure(cell, machine):
    size = training.size_of("1b", machine)
    trained = training.Training(contestant(cell, machine), size, machine)
    given = cell.settings
    batches = training.text.batches(
        machine, size.config["vocab_size"], training.STEPS, given["batch"], given["sequence"]
    )
    with trained.contestant.context():
        trained.build()
        record = trained.measured(batches)
    for planner in planners(trained.model):
        record |= plan_of(planner)
    return record


def plan_of(planner):
    """What a planner predicts for its step and has measured: peaks in bytes, and bytes on the host."""
    record = {"plan": planner.summary, "moved_bytes": planner.store.moved}
    if planner.plan is not None and planner.step is not None:
        phase, kept = planner.step.phase, planner.step.kept
        record["layers"] = planner.plan.counts(kept)
        record["predicted_bytes"] = planner.step.start + planner.plan.need(phase, kept, planner.longest)
    return record


def table(result):
    """Speed and memory; and for each plan its memory, the predicted and the measured peak."""
    rows = [
        [
            f"{cell['method']}, {cell['size']}",
            " / ".join(map(str, cell.get("layers", "-"))),
            tables.gib(cell["predicted_bytes"]),
            tables.gib(cell["peak_bytes"]),
            f"{cell['moved_bytes'] / GIB:.2f} GiB",
        ]
        for cell in result["cells"].values()
        if cell["status"] == "ok" and "predicted_bytes" in cell
    ]
    plans = tables.markdown(
        ["plan", "layers: nothing / attention / all kept", "predicted peak", "measured", "moved to the host"],
        rows,
    )
    return f"{tables.training(result)}\n\n{plans}"


def draw(result):
    """The shapes whose layers differ most in what recomputation costs; all of the tiny ones."""
    cells = {key: c for key, c in result["cells"].items() if c["size"] in PICTURED or result["tiny"]}
    drawn = {**result, "cells": cells}
    return {"": pictures.speed_over_memory(drawn, "Tokens per second over peak memory, Llama-3.2-1B")}


EXPERIMENT = Experiment(
    "E16", "Recomputation for memory, with and without the host", cells, measure, table, draw
)
