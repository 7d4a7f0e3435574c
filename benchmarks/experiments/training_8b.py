# SPDX-License-Identifier: BSD-3-Clause
"""E2: training steps of Llama-3-8B's shape at 512 tokens per sequence, over batch sizes to out of memory."""

from functools import partial

from . import pictures, tables, training
from .cells import METHODS, Experiment, training_cells

BATCHES = (8, 16, 32, 64, 96, 128)
COMPILED = ((8, 512),)


def cells(tiny):
    shapes = [(b, 8) for b in (1, 2)] if tiny else [(b, 512) for b in BATCHES]
    return training_cells(
        METHODS, shapes, lambda batch, sequence: batch, 240.0, () if tiny else COMPILED, model="8b"
    )


EXPERIMENT = Experiment(
    "E2",
    "Llama-3-8B, 512 tokens, over batch sizes",
    cells,
    training.measure,
    tables.training,
    partial(pictures.training_lines, label="sequences of 512 tokens in a batch"),
)
