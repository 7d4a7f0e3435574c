# SPDX-License-Identifier: BSD-3-Clause
"""What an experiment declares: cells, and how one of them is measured, tabulated and drawn."""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """One method at one size, measured in a process of its own.

    Cells of one ``ladder`` (default: of one method) need more memory the larger ``order`` is: after an
    out-of-memory error or a timeout the larger ones are not tried. ``needs`` names modules that must be
    importable. On a GPU machine ``gpus`` processes share a cell with more than one. ``seconds`` is its time
    limit, ``expected`` how long it may take if it was never measured. Nothing else runs beside a cell that is
    ``alone``: its time is of the host. Cells of several experiments with the same ``work`` are measured once.
    """

    method: str
    size: str
    order: float = 0.0
    settings: dict = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    gpus: int = 1
    seconds: float = 150.0
    ladder: str = ""
    expected: float = 12.0
    alone: bool = False
    work: str = ""

    @property
    def key(self):
        return f"{self.method} @ {self.size}"

    def missing(self):
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def follows(self, other):
        """True if this cell needs more memory and time than ``other``."""
        same = (self.ladder or self.method) == (other.ladder or other.method)
        return same and self.order > other.order


@dataclass(frozen=True)
class Machine:
    """Where a cell runs. ``tiny`` sizes run on a CPU; ``cache`` is a folder for the tokens of the text."""

    device: str
    tiny: bool
    cache: Path

    @property
    def gpu(self):
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class Experiment:
    """``cells(tiny)`` in the order in which they are measured; ``measure(cell, machine)`` returns a record
    for JSON.

    ``table(result)`` returns Markdown, ``draw(result)`` {suffix: figure}; a result is the content of the JSON
    file.
    """

    name: str
    title: str
    cells: Callable[[bool], list[Cell]]
    measure: Callable[[Cell, Machine], dict]
    table: Callable[[dict], str]
    draw: Callable[[dict], dict]


def coarse_first(values):
    """Every second value, then the others: a sweep that is cut short has points over the whole range."""
    return [*values[::2], *values[1::2]]


# --- cells of training steps --------------------------------------------------------------------------------

COMPILED = "transformers, compiled"
METHODS = ("transformers", "liger-kernel", "liger", COMPILED)
# Model -> parameters that a token meets, in billions; layers; width of its attention.
_MODELS = {
    "1b": (1.24, 16, 2048), "8b": (8.03, 32, 4096), "wide": (1.9, 4, 4096), "qwen3-1.7b": (1.72, 28, 2048),
    "gemma3-1b": (1.0, 26, 1024), "qwen3-moe": (0.9, 4, 4096), "mixtral": (1.1, 2, 4096), "gpt-oss": (1.6, 4, 4096),
}  # fmt: skip
# Of a GPU in a training step that recomputes every layer; tokens whose logits do not fit beside it.
_FLOPS, _TOO_MANY = 6e14, 90_000


def steps_of(model, method, batch, sequence):
    """The ``work`` of a cell of training steps by training.measure, of which every layer is recomputed."""
    return f"{model}, {method}, {batch}x{sequence}"


def packages(method):
    return ("liger_kernel", "triton") if method == "liger-kernel" else ()


def expected_seconds(model, batch, sequence, method="liger", warm_up=2):
    """Roughly how long a cell of training steps takes on an H200, of which every layer is recomputed."""
    billions, layers, width = _MODELS[model]
    tokens = batch * sequence
    start = 1.5 + 0.8 * billions + {"liger-kernel": 2.5, COMPILED: 32 + 3.5 * billions}.get(method, 0)
    if tokens > _TOO_MANY and method in ("transformers", COMPILED):
        return round(start + 1, 1)
    step = tokens * (8e9 * billions + 9 * layers * width * sequence) / _FLOPS
    # As Training.measured counts them.
    slow = step > 6 and warm_up == 2
    steps = (1 if slow else warm_up) + min(3, math.ceil(3 / step))
    return round(start + step * steps, 1)


def training_cells(methods, shapes, order, seconds=150.0, compiled=(), **settings):
    """Cells of every method at every (batch, sequence); ``order`` says by which number memory grows.

    A compiled model takes long to start, so it comes last, at the shapes of ``compiled`` alone.
    """
    pairs = [(m, s) for s in coarse_first(shapes) for m in methods if m != COMPILED]
    pairs += [(COMPILED, s) for s in coarse_first(compiled) if COMPILED in methods]
    return [
        Cell(
            method,
            f"{batch}x{sequence}",
            order(batch, sequence),
            {"batch": batch, "sequence": sequence, **settings},
            packages(method),
            seconds=2 * seconds if method == COMPILED else seconds,
            expected=expected_seconds(settings.get("model", "1b"), batch, sequence, method),
            work=steps_of(settings.get("model", "1b"), method, batch, sequence),
        )
        for method, (batch, sequence) in pairs
    ]


def cells_of_kinds(methods, needs, tiny, **options):
    """Cells of every method for each kind of training, whose packages ``needs`` has by name, at 4 x 1024
    tokens."""
    batch, sequence = (2, 16) if tiny else (4, 1024)
    return [
        Cell(
            method,
            kind,
            order,
            {"batch": batch, "sequence": sequence},
            (*required, *packages(method)),
            ladder=f"{method} {kind}",
            seconds=240,
            **options,
        )
        for order, (kind, required) in enumerate(needs.items())
        for method in methods
    ]
