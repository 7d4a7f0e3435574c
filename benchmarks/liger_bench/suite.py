# SPDX-License-Identifier: BSD-3-Clause
"""A run of the suite: selection of rows, files of results, report."""

import importlib
import json
import re
import sys
import tempfile
from pathlib import Path

import torch

from . import OPS
from .environment import environment
from .harness import Row
from .measure import MIB, Cpu, Gpu, measure_all
from .reports.goals import reached
from .reports.report import markdown
from .reports.verdict import faults, verdict

SCHEMA = 2


def ceiling_row(options):
    """The copy speed of the device, measured with buffers much larger than its caches."""
    nbytes = options.pick(2048 * MIB, 2048 * MIB, 2 * MIB)
    inputs = {"like": torch.empty(0, device=options.device)}
    return Row(
        "ceilings", f"device copy of {nbytes // 2 // MIB} MiB", lambda: inputs, [], nbytes=nbytes, contests=()
    )


def rows_of(ops, options, words=()):
    """The rows of these ops, or those with one of ``words`` in their names. They allocate no memory until
    they are measured."""
    rows = [ceiling_row(options)]
    for op in ops:
        rows += importlib.import_module(f"{__package__}.ops.{op}").rows(options)
    return [row for row in rows if not words or any(word in row.name for word in words)]


def _conclude(result):
    result["verdict"] = verdict(result["rows"])
    result["goals"] = [] if result["environment"]["size"] == "self-test" else reached(result["rows"])


def _say(text):
    print(text, file=sys.stderr, flush=True)


def _write(result, path):
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(result))


def run(ops, options, path=None, words=(), minutes=None):
    """Measures the ops (all, if none are named), writes JSON and Markdown, prints the report.

    ``words``: only the rows with one of them in their names. No row starts after ``minutes``. Returns 0, or 1
    if one of our own providers failed or gave wrong results.
    """
    rows = rows_of(ops or OPS, options, words)
    facts = environment(options)
    name = re.sub(r"[^\w.]+", "-", f"{facts['date'][:16].replace(':', '')}-{facts['device']}-{facts['size']}")
    if path is None:
        path = Path(tempfile.mkdtemp(prefix="liger-bench-")) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"schema": SCHEMA, "environment": facts, "rows": [], "verdict": [], "goals": []}

    def save(records):
        # After every row, so that an interrupted run keeps its results.
        result["rows"] = records
        _conclude(result)
        _write(result, path)

    machine = Gpu() if options.device == "cuda" else Cpu()
    left = rows[len(measure_all(rows, machine, save, minutes)) :]
    print(markdown(result))
    for row in left:
        _say(f"not measured, for lack of time: {row.name}")
    _say(f"written: {path} and {path.with_suffix('.md')}")
    problems = faults(result["rows"])
    for problem in problems:
        _say(problem)
    return 1 if problems else 0
