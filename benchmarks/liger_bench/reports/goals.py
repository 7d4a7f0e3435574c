# SPDX-License-Identifier: BSD-3-Clause
"""Performance goals on an H200, per row, and the evaluation of a run against them.

If a row has a ceiling, the goal is a ratio to it, measured in the same rounds, so the result does not depend
on the speed of the individual GPU.
"""

import importlib
from dataclasses import dataclass

from .. import OPS
from .verdict import SAME_MEMORY_MIB, time_of

# Allowed factor over the error of a single float32 sum: kernels round at different places.
AS_EXACT = 1.05
EAGER = "torch eager"


@dataclass(frozen=True)
class Goal:
    """A bound for ``metric`` of the row ``row``: a minimum, or a maximum for times.

    Metrics: ``"of copy speed"`` and ``"TB/s"`` (minimum), ``"x <a ceiling>"`` and host ``"us"`` (maximum).
    ``mib`` limits the peak memory without inputs; ``no_more_than`` limits it to the peak of another provider.
    ``exact`` limits the errors of the gradients to the errors of eager PyTorch, which accumulates in float32.
    One provider must meet all conditions.
    """

    row: str
    metric: str
    bound: float
    mib: float | None = None
    exact: bool = False
    no_more_than: str | None = None

    @property
    def asked(self):
        text = f"{'<=' if self.at_most else '>='} {self.bound:g} {self.metric}"
        text += "" if self.mib is None else f", <= {self.mib:g} MiB"
        text += "" if self.no_more_than is None else f", no more memory than {self.no_more_than}"
        return text + (", as exact as one float32 sum" if self.exact else "")

    @property
    def at_most(self):
        return self.metric == "us" or self.metric.startswith("x ")


COPY = "of copy speed"
GEMMS = "x three GEMMs"


def every_goal():
    """The goals of all ops: ``GOALS`` of their modules."""
    modules = (importlib.import_module(f"liger_bench.ops.{op}") for op in OPS)
    return [goal for module in modules for goal in getattr(module, "GOALS", ())]


def _value(goal, record, provider):
    """The metric of a provider, or None if the ceiling was not measured."""
    if goal.metric == "us":
        return time_of(provider)
    if goal.metric == "TB/s":
        return record["nbytes"] / time_of(provider) / 1e9
    ratio = provider["ratios"].get("device copy" if goal.metric == COPY else goal.metric[2:])
    if ratio is None or goal.metric != COPY:
        return ratio
    return 1 / ratio


def _conditions(goal, record, provider):
    """Further conditions of the goal, as [(met, description)]; met is None if a measurement is missing."""
    conditions = []
    if goal.mib is not None:
        peak = provider.get("peak_mib")
        met = None if peak is None else peak <= goal.mib + SAME_MEMORY_MIB
        conditions.append((met, "memory unknown" if peak is None else f"{peak:.0f} MiB"))
    if goal.no_more_than is not None:
        most, peak = (p.get("peak_mib") for p in (record["providers"].get(goal.no_more_than, {}), provider))
        met = None if None in (most, peak) else peak <= most + SAME_MEMORY_MIB
        conditions.append((met, "memory unknown" if met is None else f"{peak:.0f} of {most:.0f} MiB"))
    if goal.exact:
        mine, eager = (p.get("errors", {}) for p in (provider, record["providers"].get(EAGER, {})))
        names = [name for name in mine if name.startswith("d") and mine[name] and eager.get(name)]
        if names:
            worst = max(mine[name] / eager[name] for name in names)
            conditions.append((worst <= AS_EXACT, f"error {worst:.2f}x"))
        else:
            conditions.append((None, "error not compared"))
    return conditions


def _attempt(goal, record, name):
    """The result of one provider: a line of the report, and a rank by which the best is chosen."""
    provider = record["providers"][name]
    value = _value(goal, record, provider)
    if value is None:
        return None
    conditions = _conditions(goal, record, provider)
    reached = value <= goal.bound if goal.at_most else value >= goal.bound
    verdicts = [reached, *(met for met, _ in conditions)]
    met = False if False in verdicts else None if None in verdicts else True
    digits = 3 if goal.metric != "us" else 1
    words = ", ".join([f"{value:.{digits}f} {goal.metric}", *(text for _, text in conditions)])
    line = {"row": goal.row, "asked": goal.asked, "provider": name, "measured": words, "met": met}
    # A provider that violates another condition ranks below all others.
    rank = (met is not True, any(v is False for v in verdicts[1:]), value if goal.at_most else -value)
    return rank, line


def reached(records, goals=None):
    """One line per goal with results of liger, from liger's provider closest to the goal."""
    by_name = {record["name"]: record for record in records}
    lines = []
    for goal in every_goal() if goals is None else goals:
        record = by_name.get(goal.row)
        if record is None:
            continue
        mine = [n for n, p in record["providers"].items() if p["group"] == "ours" and p["status"] == "ok"]
        attempts = [attempt for name in mine if (attempt := _attempt(goal, record, name)) is not None]
        if attempts:
            lines.append(min(attempts, key=lambda pair: pair[0])[1])
    return lines
