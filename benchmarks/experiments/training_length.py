# SPDX-License-Identifier: BSD-3-Clause
"""E4: training steps of Llama-3.2-1B's shape, four sequences, over their lengths to out of memory."""

from functools import partial

from . import pictures, tables, training
from .cells import METHODS, Experiment, training_cells

LENGTHS = (512, 1024, 2048, 4096, 8192, 12288, 16384, 24576)
COMPILED = tuple((4, length) for length in (512, 1024, 4096, 12288, 24576))


def cells(tiny):
    shapes = [(2, t) for t in (8, 16)] if tiny else [(4, t) for t in LENGTHS]
    return training_cells(METHODS, shapes, lambda batch, sequence: sequence, 240.0, () if tiny else COMPILED)


EXPERIMENT = Experiment(
    "E4",
    "Llama-3.2-1B, four sequences, over lengths",
    cells,
    training.measure,
    tables.training,
    partial(pictures.training_lines, label="tokens in each of four sequences"),
)
