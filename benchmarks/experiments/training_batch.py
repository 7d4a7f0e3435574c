# SPDX-License-Identifier: BSD-3-Clause
"""E3: training steps of Llama-3.2-1B's shape at 1024 tokens per sequence, over batch sizes to out of
memory."""

from functools import partial

from . import pictures, tables, training
from .cells import METHODS, Experiment, training_cells

BATCHES = (1, 4, 8, 16, 32, 64, 96, 112, 256)
COMPILED = tuple((batch, 1024) for batch in (4, 32))


def cells(tiny):
    shapes = [(b, 16) for b in (1, 2)] if tiny else [(b, 1024) for b in BATCHES]
    return training_cells(
        METHODS, shapes, lambda batch, sequence: batch, compiled=shapes if tiny else COMPILED
    )


EXPERIMENT = Experiment(
    "E3",
    "Llama-3.2-1B, 1024 tokens, over batch sizes",
    cells,
    training.measure,
    tables.training,
    partial(pictures.training_lines, label="sequences of 1024 tokens in a batch"),
)
