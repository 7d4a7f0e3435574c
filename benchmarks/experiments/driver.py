"""Fills the missing cells of result files, each cell in a process of its own, within a time limit.

A cell that runs out of memory, fails, or takes too long is a result like any other. A cell that the limit of the whole
run cuts off is not: the next run measures it.
"""

import contextlib
import ctypes
import datetime
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import experiment, process, results

# Statuses that hold for larger sizes of the same ladder, too.
INHERITED = ("oom", "timeout")
# Statuses of cells that a process has measured.
MEASURED = ("ok", "oom", "failed", "timeout")
# A cell is not started with less time left than this, in seconds.
LEAST = 15
_CUDA_ERROR_NOT_INITIALIZED = 3
_PR_SET_PDEATHSIG = 1


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
    gpus: int = field(default_factory=torch.cuda.device_count)
    fork: bool | None = None  # None: where that is safe
    facts: dict | None = None  # the environment, from the first process that has measured a cell


def may_fork():
    """Whether a forked process can use CUDA: nothing in this process has initialised the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _CUDA_ERROR_NOT_INITIALIZED


def preload():
    """Imports what most cells import, so that forked processes start at once."""
    import importlib

    for name in (
        "transformers.models.llama.modeling_llama",
        "liger.transformers",
        "liger_bench.model_trainee",
    ):
        importlib.import_module(name)


# --- one process ------------------------------------------------------------------------------------------------


def _end_with_parent():
    """The process that calls it is ended when its parent ends, also by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Forked:
    def __init__(self, arguments, log):
        self._process = multiprocessing.get_context("fork").Process(
            target=self._child, args=(arguments, log), daemon=False
        )
        self._process.start()
        self.pid = self._process.pid

    @staticmethod
    def _child(arguments, log):
        os.setsid()
        _end_with_parent()
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        process.run(*arguments)

    def wait(self, seconds):
        """The exit code, or None if the process still runs after this time."""
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self):
        self._process.kill()


class _Started:
    def __init__(self, command, log):
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self.pid = self._process.pid

    def wait(self, seconds):
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self):
        self._process.kill()


def _start(run, name, cell, record, log):
    if cell.gpus == 1 and run.fork:
        return _Forked((name, cell, str(record), run.tiny, str(run.cache), run.facts is None), log)
    command = [sys.executable]
    if cell.gpus > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cell.gpus}"]
    command += ["-m", "experiments.process", name, cell.key, str(record), str(run.cache)]
    options = [*(["--tiny"] if run.tiny else []), *(["--facts"] if run.facts is None else [])]
    return _Started([*command, *options], log)


def _end(child):
    """Ends the process and everything that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait(30)


def measure(run, name, cell):
    """The record of a cell, or None if the time limit of the run has cut it off."""
    with tempfile.TemporaryDirectory(prefix="liger-experiment-") as folder:
        record, log = Path(folder) / "record.json", Path(folder) / "log"
        left = run.deadline - time.monotonic()
        child = _start(run, name, cell, record, log)
        try:
            code = child.wait(min(cell.seconds, left))
        finally:
            _end(child)
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
        preload()
        run.fork = may_fork()
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
