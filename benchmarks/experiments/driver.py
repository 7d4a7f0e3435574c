# SPDX-License-Identifier: BSD-3-Clause
"""Fills the missing cells of result files, each cell in a process of its own, within a time limit.

A cell that runs out of memory, fails, or takes too long is a result like any other. A cell that the limit of
the whole run cuts off is not: the next run measures it.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from liger_bench.devices.processes import count_gpus, elsewhere, may_fork
from liger_bench.reports import stale

from . import MODULES, experiment, launch, results, text
from .cells import Machine
from .measurement import Measurement

# Statuses that hold for larger sizes of the same ladder, too.
INHERITED = ("oom", "timeout")
# Seconds for which one running cell is waited for before the next is asked.
POLL = 0.05


@dataclass
class Run:
    """Options of a run. ``only`` and ``sizes`` select cells by name; ``retry`` measures failed cells again,
    ``stale`` cells of other code."""

    folder: Path
    cache: Path
    tiny: bool = False
    only: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    retry: bool = False
    stale: bool = False
    deadline: float = float("inf")
    gpus: int = field(default_factory=count_gpus)
    fork: bool | None = None  # None: where that is safe
    parallel: bool = False  # a cell on each GPU
    facts: dict | None = None  # the environment, from the first process that has measured a cell


def selected(run, name):
    """The cells of an experiment that the run is to measure, measured or not."""
    cells = experiment(name).cells(run.tiny)
    for option, given, known in (("only", run.only, "method"), ("sizes", run.sizes, "size")):
        names = {getattr(cell, known) for cell in cells}
        unknown = [value for value in given if value not in names]
        if unknown:
            raise ValueError(f"{name}: no {known} {unknown} for --{option}, expected some of {sorted(names)}")
    return [
        c for c in cells if (not run.only or c.method in run.only) and (not run.sizes or c.size in run.sizes)
    ]


def without_measuring(cell, every, current):
    """The record of a cell whose result follows from ``current`` ones, or from what is not installed; else
    None."""
    missing = cell.missing()
    if missing:
        return {"status": "missing", "reason": f"not installed: {', '.join(missing)}"}
    for other in every:
        record = current.get(other.key, {})
        if other != cell and record.get("status") in INHERITED and cell.follows(other):
            reason = f"not tried: {record['status']} at {other.size}"
            return {"status": record["status"], "inferred": True, "reason": reason}
    return None


def expected_seconds(cell, every, records):
    """How long a cell will take: as long as last time; none if a smaller one lacked memory then."""
    last = records.get(cell.key, {})
    if last.get("seconds") is not None:
        return last["seconds"]
    known = without_measuring(cell, every, records)
    return 0.0 if known is not None and known.get("inferred") else cell.expected


def _but_for_commit(facts):
    return {name: value for name, value in facts.items() if name not in ("commit", "modified")}


def fill(run, names, say=print):
    """Measures the missing cells of these experiments; returns the number of cells that are left.

    One cell at a time, or with ``run.parallel`` one on each GPU; one of several GPUs has as many of them.
    """
    if run.fork is None:
        run.fork = may_fork(launch.PRELOAD)
        if not run.fork:
            say(
                "an imported package has initialised the CUDA driver: processes start anew, which takes longer"
            )
    sheets = [Sheet(run, name, say) for name in names]
    if not run.tiny and any(sheet.todo for sheet in sheets):
        # Once, instead of in each of the first cells.
        elsewhere(text.prepare, Machine("cpu", False, run.cache))
    waiting = [(sheet, cell) for sheet in sheets for cell in sheet.todo]
    free = list(range(max(run.gpus, 1)))
    running = {}
    try:
        while waiting or running:
            waiting = _start_what_fits(run, waiting, free, running)
            if running:
                _finish_one(free, running)
    finally:
        for _, measurement in running.values():
            measurement.end()
    return sum(sheet.finish() for sheet in sheets)


def _start_what_fits(run, waiting, free, running):
    """Starts cells on free GPUs, and returns those that still wait.

    A cell of several GPUs that are not free yet holds back all after it, or it would wait for all of them.
    One that is to be alone holds back none: it waits until nothing runs.
    """
    kept = []
    for index, (sheet, cell) in enumerate(waiting):
        # A smaller cell may yet show that this one needs too much memory.
        depends = any(other is sheet and cell.follows(m.cell) for other, m in running.values())
        crowded = cell.alone or not run.parallel or any(m.cell.alone for _, m in running.values())
        if running and (depends or crowded):
            kept.append((sheet, cell))
            continue
        if running and len(free) < cell.gpus <= max(run.gpus, 1):
            return kept + waiting[index:]
        taken = free[: cell.gpus]
        measurement = sheet.begin(cell, taken)
        if measurement is not None:
            del free[: len(taken)]
            running[tuple(taken)] = sheet, measurement
    return kept


def _finish_one(free, running):
    """Waits until one of the running cells is measured or out of time, and adds its record."""
    while True:
        for taken, (sheet, measurement) in list(running.items()):
            if measurement.wait(POLL):
                del running[taken]
                free.extend(taken)
                free.sort()
                sheet.add(measurement.cell, measurement.end())
                return


class Sheet:
    """The results of one experiment, and its cells that are to be measured."""

    def __init__(self, run, name, say=print):
        self.run, self.name, self.say = run, name, say
        self.path = results.path_of(run.folder, name, run.tiny)
        self.result = results.load(self.path, name, run.tiny)
        self.every = experiment(name).cells(run.tiny)
        keys = {cell.key for cell in self.every}
        # Without cells that are no longer part of the experiment.
        records = {key: record for key, record in self.result["cells"].items() if key in keys}
        self.result["cells"] = records
        # The records that count: with run.stale the records of the present code.
        self.current = {k: r for k, r in records.items() if not (run.stale and stale.is_stale(name, r))}
        # Those of several GPUs first: fewer of them are idle than if others came between.
        todo = [cell for cell in selected(run, name) if not self._is_done(cell)]
        self.todo = sorted(todo, key=lambda cell: -cell.gpus)
        self.left = []

    def _is_done(self, cell):
        record = self.current.get(cell.key)
        if record is None:
            return False
        # Packages can be installed later.
        failed = record["status"] != "ok"
        return not (failed and (self.run.retry or (record["status"] == "missing" and not cell.missing())))

    def expected(self, cell):
        return min(expected_seconds(cell, self.every, self.result["cells"]), cell.seconds)

    def begin(self, cell, gpus):
        """A Measurement; None if the cell needs none, or if there is no time or GPU for it."""
        record = without_measuring(cell, self.every, self.current)
        last = self.result["cells"].get(cell.key)
        if record is not None and not (record["status"] == "missing" and last is not None):
            self.add(cell, {**record, "seconds": 0.0})
            return None
        run = self.run
        lacks_gpus = not run.tiny and 0 < run.gpus < cell.gpus
        shared = None if record is not None or lacks_gpus else self._measured_elsewhere(cell)
        if shared is not None:
            self.add(cell, *shared)
            return None
        if record is not None or lacks_gpus or run.deadline - time.monotonic() < self.expected(cell):
            self.left.append(cell)
            return None
        return Measurement(run, self.name, cell, gpus)

    def _measured_elsewhere(self, cell):
        """The record of the same work in another experiment, of the present code, with this device and these
        packages, and its environment; else None."""
        for name in MODULES if cell.work and self.run.facts else ():
            if name == self.name:
                continue
            result = results.load(results.path_of(self.run.folder, name, self.run.tiny), name, self.run.tiny)
            for other in experiment(name).cells(self.run.tiny) if result["cells"] else ():
                record = result["cells"].get(other.key, {})
                # What ran beside other cells does not tell the time of a cell that is to run alone.
                if other.work != cell.work or other.alone < cell.alone:
                    continue
                if "environment" not in record or stale.is_stale(name, record):
                    continue
                facts = result["environments"][record["environment"]]
                if _but_for_commit(facts) == _but_for_commit(self.run.facts):
                    own = ("method", "size", "order", "gpus", "environment", "code")
                    return {k: v for k, v in record.items() if k not in own} | {"measured_in": name}, facts
        return None

    def add(self, cell, record, facts=None):
        """Saves the record of a cell, of this environment if it has none of its own; None: the time limit has
        cut it off."""
        if record is None:
            self.left.append(cell)
            return
        self.run.facts = record.pop("facts", self.run.facts)
        record["code"] = stale.digest_of(self.name, cell.method, cell.size)
        results.add(self.result, self.path, cell, record, facts or self.run.facts)
        self.current[cell.key] = self.result["cells"][cell.key]
        detail = "" if record["status"] == "ok" else f" ({record['reason'].splitlines()[0][:120]})"
        self.say(f"{self.name} {cell.key}: {record['status']}{detail}, {record['seconds']:.1f} s")

    def finish(self):
        """Says what is left, and returns the number of these cells."""
        if not self.left:
            self.say(f"{self.name}: complete, {self.path}")
            return 0
        names = ", ".join(cell.key for cell in self.left[:12])
        self.say(f"{self.name}: {len(self.left)} cells left: {names}")
        most = max(cell.gpus for cell in self.left)
        if most > max(self.run.gpus, 1) and not self.run.tiny:
            self.say(f"{self.name}: some need {most} GPUs, here are {self.run.gpus}")
        lacking = sorted({name for cell in self.left for name in cell.missing()})
        if lacking:
            self.say(f"{self.name}: not installed: {', '.join(lacking)}")
        return len(self.left)
