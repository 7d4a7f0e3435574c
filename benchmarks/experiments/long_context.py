# SPDX-License-Identifier: BSD-3-Clause
"""E10: whole training steps over long sequences, with the MLP tiled and not; the largest micro-batch that
fits."""

import re
from dataclasses import replace
from functools import partial

import torch

import liger
from liger_bench.models import sizes as model_sizes
from liger_bench.models.contestants import Contestant

from . import pictures, sharded_training, tables, training
from .cells import Cell, Experiment, expected_seconds, packages

ZERO = "1B, ZeRO-3"
TILED = "liger, tiled MLP"
METHODS = ("transformers", "liger-kernel", "liger", TILED)
# Planned checkpointing in the memory of the GPU, which keeps the attention of layers where there is room, and
# the same with inputs of layers in host memory. -> ``offload``.
PLANNED = {"liger, tiled MLP, planned": None, "liger, tiled MLP, offload": True}
TINY_MEMORY = 1 << 30
WIDE = replace(
    model_sizes.FULL_8B,
    config={**model_sizes.FULL_8B.config, "num_hidden_layers": 4, "max_position_embeddings": 131072},
)
LENGTHS = (8192, 32768, 131072)
MICRO_BATCHES = (2, 8)


def _cell(method, part, batch, sequence, model, gpus=1, needs=()):
    return Cell(
        method,
        f"{part} {batch}x{sequence}",
        batch * sequence,
        {"batch": batch, "sequence": sequence, "model": model, "part": part},
        (*needs, *packages(method)),
        gpus,
        ladder=f"{method} {part}",
        seconds=240,
        expected=expected_seconds(model, batch, sequence, method, 8 if method in PLANNED else 2),
    )


def cells(tiny):
    lengths, batches = ((8, 32), (2,)) if tiny else (LENGTHS, MICRO_BATCHES)
    made = []
    for part, model in (("1B", "1b"), ("4 layers of 8B's width", "wide")):
        made += [
            _cell(m, part, 1, t, model)
            for t in lengths
            for m in METHODS
            if m != "liger-kernel" or model == "1b"
        ]
    for b in batches:
        # A plan is for what is left beside a large batch.
        methods = METHODS if b == batches[0] and not tiny else (*METHODS, *PLANNED)
        made += [_cell(m, "1B, micro-batch", b, lengths[0], "1b") for m in methods]
    for length in lengths[-1:] if tiny else lengths:
        made += [_cell(m, "1B, FSDP2", 1, length, "1b", 2) for m in ("transformers", "liger", TILED)]
        made += [_cell(m, ZERO, 1, length, "1b", 2, ("deepspeed",)) for m in ("transformers", TILED)]
    return made


def planned(method, machine):
    """A contestant with a plan, or with the inputs of all layers on the host."""
    offload, tiled = PLANNED[method], "tiled" in method

    def prepare(model):
        memory = TINY_MEMORY if machine.tiny else "auto"
        return liger.transformers.checkpoint(liger.patch(model, tiled_mlp=tiled), memory, offload=offload)

    return Contestant(prepare, training.context(machine), warm_up=8)


def measure(cell, machine):
    wide = cell.settings["model"] == "wide" and not machine.tiny
    size = WIDE if wide else training.size_of("1b", machine)
    if cell.method in PLANNED:
        entered = planned(cell.method, machine)
    elif cell.method == TILED:
        entered = training.patched(machine, tiled_mlp=True)
    else:
        entered = training.contestant(cell.method, machine)
    if cell.gpus == 1:
        return training.measure(cell, machine, entered, size)
    shard = sharded_training.fsdp2
    if cell.settings["part"] == ZERO:
        shard = partial(sharded_training.zero3, batch=cell.settings["batch"])
        size = replace(size, dtype=torch.bfloat16)
    return sharded_training.measure(cell, machine, entered, size, shard)


def parts(result):
    """The results of each part."""
    names = dict.fromkeys(size.rpartition(" ")[0] for size in (c["size"] for c in result["cells"].values()))
    return {
        name: {
            **result,
            "cells": {k: c for k, c in result["cells"].items() if c["size"].rpartition(" ")[0] == name},
        }
        for name in names
    }


def draw(result):
    figures = {}
    for name, part in parts(result).items():
        label = f"tokens in a step, {name}"
        (figures[re.sub(r"[^\w.-]", "", name.replace(" ", "-"))],) = pictures.training_lines(
            part, label
        ).values()
    return figures


def table(result):
    return "\n\n".join(f"**{name}**\n\n{tables.training(part)}" for name, part in parts(result).items())


EXPERIMENT = Experiment("E10", "Long sequences, with the MLP tiled and not", cells, measure, table, draw)
