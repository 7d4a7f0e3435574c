# SPDX-License-Identifier: BSD-3-Clause
"""E18: training steps on few tokens, which the host issues more slowly than a GPU computes them, by each way
of docs/recipes/small_batches.md."""

from dataclasses import replace

import liger
from liger_bench.models.contestants import Contestant, reduce_overhead

from . import tables, training
from .cells import Cell, Experiment

SHAPE = (4, 512)
REDUCED, OURS_REDUCED, GRAPH = "transformers, reduce-overhead", "liger, reduce-overhead", "liger, CUDA graph"
METHODS = ("transformers", REDUCED, "liger", OURS_REDUCED, GRAPH)
STEPS = 10


def cells(tiny):
    batch, sequence = (2, 16) if tiny else SHAPE
    methods = METHODS[:3:2] if tiny else METHODS
    return [
        Cell(
            method,
            f"{batch}x{sequence}",
            batch * sequence,
            {"batch": batch, "sequence": sequence},
            seconds=240,
            expected=45.0 if "reduce" in method else 6.0,
            alone=True,
        )
        for method in methods
    ]


def contestant(method, machine):
    if method in ("transformers", "liger"):
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
    return training.measure(cell, machine, entered, steps=STEPS)


EXPERIMENT = Experiment("E18", "Small batches", cells, measure, tables.training, lambda result: {})
