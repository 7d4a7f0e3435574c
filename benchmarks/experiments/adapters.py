# SPDX-License-Identifier: BSD-3-Clause
"""E9: LoRA, QLoRA, AdamW with 8-bit states and GaLore, with and without liger: losses, speed and memory."""

import importlib
from dataclasses import replace

from . import pictures, tables, text, training
from .cells import Experiment, cells_of_kinds

METHODS = ("transformers", "liger", "liger-kernel")
KEPT = "LoRA, nothing recomputed"
NEEDS = {
    "LoRA": ("peft",),
    KEPT: ("peft",),
    "QLoRA": ("peft", "bitsandbytes"),
    "8-bit AdamW": ("bitsandbytes",),
    "GaLore": ("galore_torch", "bitsandbytes"),
}
ADAPTERS = {
    "LoRA": {"lora": 16},
    KEPT: {"lora": 16, "checkpointing": False},
    "QLoRA": {"lora": 16, "nf4": True},
}
STEPS = 16
GALORE = {"rank": 128, "update_proj_gap": 200, "scale": 1.0, "proj_type": "std"}


def cells(tiny):
    # The host issues these steps hardly faster than the GPU computes them.
    return cells_of_kinds(METHODS, NEEDS, tiny, alone=True, expected=12.0)


def galore(parameters, named):
    """Adam in projections of the gradients of query and output projections: one SVD each at the first
    step."""
    low_rank = [p for name, p in named if "q_proj" in name or "o_proj" in name]
    chosen = {id(p) for p in low_rank}
    others = [p for p in parameters if id(p) not in chosen]
    rank = min(GALORE["rank"], *(min(p.shape) for p in low_rank))
    return importlib.import_module("galore_torch").GaLoreAdamW(
        [{"params": others}, {"params": low_rank, **GALORE, "rank": rank}],
        lr=1e-5,
        no_deprecation_warning=True,
    )


class Variant(training.Training):
    """A Training with another optimizer."""

    def __init__(self, kind, *arguments):
        super().__init__(*arguments)
        self.kind = kind

    def make_optimizer(self, parameters):
        if self.kind == "8-bit AdamW":
            return importlib.import_module("bitsandbytes").optim.AdamW8bit(parameters, lr=1e-5)
        if self.kind == "GaLore":
            return galore(list(parameters), list(self.model.named_parameters()))
        return super().make_optimizer(parameters)


def measure(cell, machine):
    given = cell.settings
    entered = training.contestant(cell.method, machine)
    size = replace(training.size_of("1b", machine), **ADAPTERS.get(cell.size, {}))
    made = Variant(cell.size, entered, size, machine)
    batches = text.batches(machine, size.config["vocab_size"], STEPS, given["batch"], given["sequence"])
    with entered.context():
        made.build()
        return made.measured(batches, STEPS)


def table(result):
    def shown(cell, reference):
        line = tables.speed_and_memory(cell, reference)
        if reference is None or cell is reference:
            return line
        pairs = zip(cell["losses"], reference["losses"], strict=False)
        return f"{line}, losses {max(abs(a / b - 1) for a, b in pairs):.1e} apart"

    return f"{tables.by_method(result, shown, label='')}\n\n{tables.gains(result)} {tables.behind(result)}"


def draw(result):
    return {"": pictures.bars(result, "Training steps of Llama-3.2-1B, 4 x 1024 tokens")}


EXPERIMENT = Experiment("E9", "LoRA, QLoRA, 8-bit AdamW, GaLore", cells, measure, table, draw)
