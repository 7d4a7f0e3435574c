# SPDX-License-Identifier: BSD-3-Clause
"""What an experiment declares: cells, and how one of them is measured, tabulated and drawn."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """One method at one size, measured in a process of its own.

    Cells of one ``ladder`` (default: of one method) need more memory the larger ``order`` is: after an
    out-of-memory error or a timeout the larger ones are not tried. ``needs`` names modules that must be
    importable. On a GPU machine ``gpus`` processes share a cell with more than one. ``seconds`` is its time
    limit.
    """

    method: str
    size: str
    order: float = 0.0
    settings: dict = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    gpus: int = 1
    seconds: float = 150.0
    ladder: str = ""

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
