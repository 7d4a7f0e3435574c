# SPDX-License-Identifier: BSD-3-Clause
"""E17: every op and loss, lm_heads, and host time of small tensors, at the sizes of models: rows of
``benchmarks/run.py``."""

import liger_bench
from liger_bench import measure as bench
from liger_bench import suite
from liger_bench.ops.experts import SHAPES
from liger_bench.reports import overview
from liger_bench.reports.depends import HOST_OPS, HOST_TIME
from liger_bench.reports.verdict import time_of

from . import ops
from .cells import Cell, Experiment

OPS = tuple(liger_bench.OPS)
ROUNDS = 5
# Seconds on an H200.
EXPECTED = {"fused_linear_ce": 75, "heads": 90, "preference": 55, HOST_TIME: 45}
ALL, EXPERTS = "sizes", "experts"
# Provider (or its beginning) -> name in the table.
SHOWN = {
    **ops.SHOWN,
    "liger-kernel CuTe": "liger-kernel CuTe",
    "quack": "quack",
    "TRL": "TRL",
    "unsloth_zoo": "unsloth_zoo",
    "cut-cross-entropy": "cut-cross-entropy",
    "torch F.": "torch F.",
}


def cells(tiny):
    """Host times first: nothing else runs beside them."""
    host = Cell(HOST_TIME, "small tensors", seconds=240, expected=EXPECTED[HOST_TIME], alone=True)
    if tiny:
        return [host, Cell("softmax", ALL)]
    made = [Cell(op, ALL, seconds=420, expected=EXPECTED.get(op, 9)) for op in OPS if op != EXPERTS]
    # A cell for each: kernels of peers may take minutes to tune. gpt-oss, which they lack, is first.
    return [host, *made, *(Cell(EXPERTS, shape.name, seconds=420, expected=50) for shape in SHAPES[::-1])]


def _is_measured(cell, row):
    """Forward and backward together; not of heads with many tokens; of two patterns of ignored targets the
    random one."""
    if cell.method == HOST_TIME:
        return row.kind == "host"
    alone = row.work.endswith((" forward", " backward")) and ops.WORK not in row.work
    long = cell.method == "heads" and "131072" in row.name
    other = cell.method == EXPERTS and f" {cell.size} " not in row.name
    return row.kind == "device" and not (other or alone or long or "prompts ignored" in row.name)


def measure(cell, machine):
    options = ops.options_of(machine)
    device = bench.Gpu() if machine.gpu else bench.Cpu()
    of_host = HOST_OPS[:1] if machine.tiny else HOST_OPS
    rows = suite.rows_of(of_host if cell.method == HOST_TIME else [cell.method], options)[1:]
    records = []
    for row in rows:
        if _is_measured(cell, row):
            row.rounds = min(row.rounds, ROUNDS)
            if cell.method == EXPERTS:
                row.reference = None  # a loop over the experts in float32
            records.append(_short(bench.measure(row, device)))
    return {"rows": records}


def _short(record):
    """A row without the providers that are not installed, and with medians and quartiles alone."""
    kept = {n: p for n, p in record["providers"].items() if p["status"] != "missing"}
    for provider in kept.values():
        provider.pop("latency_ms", None)
        provider.pop("first_s", None)
    return {**record, "providers": kept, "seconds": round(record["seconds"], 1)}


def runs(result):
    """The measured cells as runs of the suite, whose pictures and verdicts take these."""
    cells = [c for c in result["cells"].values() if c["status"] == "ok"]
    return [
        {
            "environment": {"dtype": "bfloat16", **result["environments"][cell["environment"]]},
            "rows": cell["rows"],
        }
        for cell in cells
    ]


def _text(row, provider):
    if provider is None:
        return ""
    if row["kind"] == "host":
        return f"{time_of(provider):.1f} us"
    ratio = "".join(
        f", {provider['ratios'][name]:.2f} x" for name in row["ceilings"][:1] if name in provider["ratios"]
    )
    memory = provider.get("peak_mib")
    return f"{time_of(provider):.3f} ms{ratio}" + ("" if memory is None else f", {memory:.0f} MiB")


def _head(rows):
    ceilings = ", ".join(dict.fromkeys(name for row in rows for name in row["ceilings"][:1]))
    return f"x: {ceilings}" if ceilings else "per call"


def table(result):
    """A table per op: time, ratio to the ceiling of the row, peak memory."""
    return ops.table_per_op(result, SHOWN, _text, _head)


def draw(result):
    return overview.overview(runs(result))


EXPERIMENT = Experiment("E17", "Ops and losses at the sizes of models", cells, measure, table, draw)
