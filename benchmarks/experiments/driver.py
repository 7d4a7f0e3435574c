"""Fills the missing cells of result files, each cell in a process of its own, within a time limit.

A cell that runs out of memory, fails, or takes too long is a result like any other. A cell that the limit of the whole
run cuts off is not: the next run measures it.
"""

import datetime
import json
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from . import experiment, launch, results

# Statuses that hold for larger sizes of the same ladder, too.
INHERITED = ("oom", "timeout")
# Statuses of cells that a process has measured.
MEASURED = ("ok", "oom", "failed", "timeout")
# A cell is not started with less time left than this, in seconds.
LEAST = 15


@dataclass
class Run:
    """Options of a run. ``only`` and ``sizes`` select cells by name; ``retry`` measures failed cells again."""

    folder: Path
    cache: Path
    tiny: bool = False
    only: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    retry: bool = False
    deadline: float = float("inf")
    gpus: int = field(default_factory=launch.count_gpus)
    fork: bool | None = None  # None: where that is safe
    facts: dict | None = None  # the environment, from the first process that has measured a cell


def measure(run, name, cell):
    """The record of a cell, or None if the time limit of the run has cut it off."""
    with tempfile.TemporaryDirectory(prefix="liger-experiment-") as folder:
        record, log = Path(folder) / "record.json", Path(folder) / "log"
        left = run.deadline - time.monotonic()
        child = launch.start(
            name,
            cell,
            record,
            log,
            tiny=run.tiny,
            cache=run.cache,
            with_facts=run.facts is None,
            fork=run.fork,
        )
        try:
            code = child.wait(min(cell.seconds, left))
        finally:
            launch.end(child)
        if record.is_file():
            return json.loads(record.read_text())
        if code is None:
            if cell.seconds > left:
                return None
            return {"status": "timeout", "reason": f"not done after {cell.seconds:.0f} s"}
        tail = log.read_text(errors="replace")[-1500:]
        # The kernel ends the process with most memory when the host has no memory left.
        status = "oom" if code == -signal.SIGKILL else "failed"
        return {"status": status, "reason": f"exit code {code}", "traceback": tail}


# --- all cells --------------------------------------------------------------------------------------------------


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


def is_done(result, cell, retry=False):
    record = result["cells"].get(cell.key)
    if record is None:
        return False
    # Packages can be installed later.
    return record["status"] == "ok" or not (retry or (record["status"] == "missing" and not cell.missing()))


def without_measuring(result, cell, known):
    """The record of a cell whose result follows from others, or from what is not installed; else None."""
    missing = cell.missing()
    if missing:
        return {"status": "missing", "reason": f"not installed: {', '.join(missing)}"}
    for other in known:
        record = result["cells"].get(other.key, {})
        if other != cell and record.get("status") in INHERITED and cell.follows(other):
            reason = f"not tried: {record['status']} at {other.size}"
            return {"status": record["status"], "inferred": True, "reason": reason}
    return None


def expected_seconds(result, cell, every):
    """How long a cell will take: as long as the largest smaller one of its ladder, in proportion to the size."""
    known = [
        (other.order, record["seconds"])
        for other in every
        if cell.follows(other)
        and (record := result["cells"].get(other.key, {})).get("status") == "ok"
        and other.order > 0
    ]
    if not known:
        return LEAST
    order, seconds = max(known)
    return max(LEAST, seconds * cell.order / order)


def fill(run, names, say=print):
    """Measures the missing cells of these experiments in turn; returns the number of cells that are left."""
    if run.fork is None:
        launch.preload()
        run.fork = launch.may_fork()
        if not run.fork:
            say(
                "an imported package has initialised the CUDA driver: processes start anew, which takes longer"
            )
    left = 0
    for name in names:
        left += _fill_one(run, name, say)
    return left


def _fill_one(run, name, say):
    path = results.path_of(run.folder, name, run.tiny)
    result = results.load(path, name, run.tiny)
    every = experiment(name).cells(run.tiny)
    todo = [cell for cell in selected(run, name) if not is_done(result, cell, run.retry)]
    left = []
    for cell in todo:
        record = without_measuring(result, cell, every)
        start = time.monotonic()
        if record is None:
            lacks_gpus = not run.tiny and 0 < run.gpus < cell.gpus
            expected = min(expected_seconds(result, cell, every), cell.seconds)
            if lacks_gpus or run.deadline - start < expected:
                left.append(cell)
                continue
            record = measure(run, name, cell)
        if record is None:
            left.append(cell)
            continue
        run.facts = record.pop("facts", run.facts)
        if record["status"] in MEASURED:
            record["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        record["seconds"] = round(time.monotonic() - start, 1)
        results.add(result, path, cell, record, run.facts)
        detail = "" if record["status"] == "ok" else f" ({record['reason'].splitlines()[0][:120]})"
        say(f"{name} {cell.key}: {record['status']}{detail}, {record['seconds']:.1f} s")
    if left:
        say(f"{name}: {len(left)} cells left: {', '.join(cell.key for cell in left[:12])}")
        if any(cell.gpus > max(run.gpus, 1) for cell in left) and not run.tiny:
            say(f"{name}: some need {max(cell.gpus for cell in left)} GPUs, here are {run.gpus}")
    else:
        say(f"{name}: complete, {path}")
    return len(left)
