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

from . import pictures, results, sharded_training, tables, training
from .cells import Cell, Experiment, expected_seconds, packages, steps_of

ZERO, MICRO_BATCH = "1B, ZeRO-3", "1B, micro-batch"
TILED = "liger, tiled MLP"
METHODS = ("transformers", "liger-kernel", "liger", TILED)
# A plan for a given memory, with attention and inputs of layers in host memory.
PLANNED = "liger, tiled MLP, plan, offload"
# GiB: less than a quarter of what the largest micro-batch takes without recomputation.
MEMORY, TINY_MEMORY = 24.0, 1.0
WARM_UP = 5
WIDE = replace(
    model_sizes.FULL_8B,
    config={**model_sizes.FULL_8B.config, "num_hidden_layers": 4, "max_position_embeddings": 131072},
)
LENGTHS = (8192, 32768, 131072)
MICRO_BATCHES = (2, 8, 16)


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
        expected=expected_seconds(model, batch, sequence, method, WARM_UP if method == PLANNED else 2),
        work=steps_of(model, method, batch, sequence) if gpus == 1 and method in METHODS else "",
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
        made += [_cell(m, MICRO_BATCH, b, lengths[0], "1b") for m in (*METHODS, PLANNED)]
    for length in lengths[-1:] if tiny else lengths:
        planned = (PLANNED,) if length == lengths[-1] else ()
        made += [
            _cell(m, "1B, FSDP2", 1, length, "1b", 2) for m in ("transformers", "liger", TILED, *planned)
        ]
        made += [
            _cell(m, ZERO, 1, length, "1b", 2, ("deepspeed",)) for m in ("transformers", TILED, *planned)
        ]
    return made


def planned(machine, memory, offload):
    """A contestant with tiled MLPs and a plan."""
    memory = int(TINY_MEMORY * results.GIB) if machine.tiny else memory

    def prepare(model):
        return liger.transformers.checkpoint(liger.patch(model, tiled_mlp=True), memory, offload=offload)

    return Contestant(prepare, training.context(machine), warm_up=WARM_UP)


def measure(cell, machine):
    wide = cell.settings["model"] == "wide" and not machine.tiny
    size = WIDE if wide else training.size_of("1b", machine)
    if cell.method == PLANNED:
        entered = planned(machine, int(MEMORY * results.GIB), True)
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


def verdict(part):
    """Whether tiling and a plan make a larger micro-batch worth it: the fastest of each size."""
    fastest = {}
    for cell in results.cells_of(part, status="ok"):
        best = fastest.get(cell["size"])
        if tables.is_ours(cell["method"]) and (
            best is None or cell["tokens_per_second"] > best["tokens_per_second"]
        ):
            fastest[cell["size"]] = cell
    if len(fastest) < 2:
        return ""
    shown = "; ".join(
        f"{size}: {cell['tokens_per_second'] / 1e3:.1f}k by {cell['method']}"
        for size, cell in fastest.items()
    )
    smallest, *_, largest = fastest.values()
    gain = largest["tokens_per_second"] / smallest["tokens_per_second"] - 1
    word = "Yes" if gain > tables.NOTICED else "No"
    return f"Does the larger micro-batch pay? {word}, {gain:+.1%} from the smallest to the largest. {shown}."


def table(result):
    texts = []
    for name, part in parts(result).items():
        texts += [f"**{name}**", tables.training(part), *([verdict(part)] if name == MICRO_BATCH else [])]
    return "\n\n".join(filter(None, texts))


EXPERIMENT = Experiment("E10", "Long sequences, with the MLP tiled and not", cells, measure, table, draw)
