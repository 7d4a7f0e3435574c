# SPDX-License-Identifier: BSD-3-Clause
"""E12: post-training losses over batch sizes, DPO and ORPO through TRL, training steps under FSDP2 on two
GPUs."""

from liger_bench import measure as bench
from liger_bench.harness import Options
from liger_bench.ops import preference as bench_preference

from . import pictures, preference_training, sharded_training, tables, training
from .cells import Cell, Experiment, coarse_first, packages

# SimPO is in E17, with all of these.
LOSSES = ("dpo", "orpo", "kto", "grpo", "jsd")
LOSS_METHODS = ("torch eager", "liger-kernel", "liger")
SEQUENCES = (8, 32, 128)
TRAINERS = ("dpo", "orpo")
TRAINER_METHODS = ("TRL", "liger", "liger-kernel")
PAIRS = (2, 32)
SHARDED = {"1B": ("1b", 1024, (16, 64)), "8B": ("8b", 512, (16, 64))}


def _cell(part, method, count, length, **settings):
    return Cell(
        method,
        f"{part} {count}x{length}",
        count,
        {"part": part, "count": count, "length": length, **settings},
        packages(method),
        gpus=2 if part.startswith("FSDP2") else 1,
        ladder=f"{method} {part}",
        seconds=180,
    )


def cells(tiny):
    """The losses first; of the others, every second size first."""
    made = []
    counts = (4,) if tiny else SEQUENCES
    length = 6 if tiny else 1024
    losses = LOSSES[:2] if tiny else LOSSES
    for count in coarse_first(counts):
        made += [_cell(f"loss {name}", m, count, length, loss=name) for name in losses for m in LOSS_METHODS]
    for count in coarse_first((2,) if tiny else PAIRS):
        for name in TRAINERS:
            part = f"TRL {name}"
            pairs = [_cell(part, m, count, 32 if tiny else 1024, trainer=name) for m in TRAINER_METHODS]
            made += [Cell(**{**vars(c), "needs": (*c.needs, "trl", "datasets")}) for c in pairs]
    for name, (model, sequence, batches) in SHARDED.items():
        if tiny and name == "8B":
            continue
        for batch in coarse_first((2,) if tiny else batches):
            settings = {"batch": batch, "sequence": 16 if tiny else sequence, "model": model}
            made += [
                _cell(f"FSDP2 {name}", method, batch, settings["sequence"], **settings)
                for method in ("transformers", "liger")
            ]
    return made


def measure(cell, machine):
    kind = cell.settings["part"].partition(" ")[0]
    return {"loss": _loss, "TRL": preference_training.measure, "FSDP2": sharded_training.measure}[kind](
        cell, machine
    )


def _loss(cell, machine):
    given = cell.settings
    options = Options(
        device=machine.device,
        size="self-test" if machine.tiny else "full",
        backends=(training.backend(machine),),
    )
    sizes = (16, 50) if machine.tiny else (4096, 128256)
    row = bench_preference._row(options, given["loss"], given["count"], given["length"], *sizes)
    name = f"liger[{training.backend(machine)}]" if cell.method == "liger" else cell.method
    row.providers = [provider for provider in row.providers if provider.name == name]
    # One set of inputs and no float32 logits: only the memory of the method itself is in the way.
    row.reference, row.sets, row.rounds = None, 1, 3
    record = bench.measure(row, bench.Gpu() if machine.gpu else bench.Cpu())["providers"][name]
    if record["status"] != "ok":
        raise RuntimeError(record["reason"])
    peak = record.get("peak_mib")
    return {
        "ms": record["ms"],
        "tokens_per_second": given["count"] * given["length"] / record["ms"]["median"] * 1e3,
        "peak_bytes": None if peak is None else int(peak * bench.MIB),
    }


# --- report -------------------------------------------------------------------------------------------------


def parts(result):
    """{part: its result}"""
    names = {c["size"]: c["size"].rpartition(" ")[0] for c in result["cells"].values()}
    return {
        part: {**result, "cells": {k: c for k, c in result["cells"].items() if names[c["size"]] == part}}
        for part in dict.fromkeys(names.values())
    }


def _speed_and_memory(cell, reference):
    if "first_loss" in cell:
        return tables.speed_and_memory(cell, reference)
    return f"{cell['ms']['median']:.1f} ms, {tables.gib(cell['peak_bytes'])}"


def best(part, method):
    """The cell with the most tokens per second."""
    cells = [c for c in part["cells"].values() if c["method"] == method and c["status"] == "ok"]
    return max(cells, key=lambda c: c["tokens_per_second"], default=None)


def _at_best(part):
    """One line: the most tokens per second of each method at any batch that fits."""
    found = {m: best(part, m) for m in dict.fromkeys(c["method"] for c in part["cells"].values())}
    texts = [f"{m} {c['tokens_per_second'] / 1e3:.1f} k at {c['size']}" for m, c in found.items() if c]
    return f"Most tokens/s: {'; '.join(texts)}."


def table(result):
    texts = []
    for name, part in parts(result).items():
        shown = tables.by_method(part, _speed_and_memory, label="sequences or pairs x tokens")
        texts += [f"**{name}**", shown]
        if not name.startswith("loss"):
            texts.append(_at_best(part))
        texts.append(f"{tables.gains(part)} {tables.behind(part)}")
    return "\n\n".join(texts)


def draw(result):
    every = parts(result)
    losses = {name.removeprefix("loss "): part for name, part in every.items() if name.startswith("loss")}
    figures = {}
    if losses:
        title = "Peak memory of a post-training loss, forward and backward"
        figures["losses"] = pictures.memory_of_parts(losses, title, "sequences")
    for name, part in every.items():
        if not name.startswith("loss"):
            label = f"{'sequences per GPU' if name.startswith('FSDP2') else 'pairs'} in a batch, {name}"
            (figures[name.replace(" ", "-")],) = pictures.training_lines(part, label).values()
    return figures


EXPERIMENT = Experiment("E12", "Post-training", cells, measure, table, draw)
