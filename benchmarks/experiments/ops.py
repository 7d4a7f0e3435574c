# SPDX-License-Identifier: BSD-3-Clause
"""E1: time and memory of every op over its sweep, by the rows of ``benchmarks/run.py --sweep``."""

from liger_bench import measure as bench
from liger_bench import suite
from liger_bench.harness import Options
from liger_bench.reports.verdict import time_of

from . import pictures, tables
from .cells import Cell, Experiment

# The ops of the source. Others are in E17.
OPS = ("cross_entropy", "rms_norm", "swiglu", "geglu", "rope", "layer_norm", "fused_linear_ce")
# The rows of an op that are measured: a sweep of forward and backward alone is in benchmarks/run.py --sweep.
WORK = "forward and backward"
# Times within this factor are equal: medians of two runs differ as much.
AS_FAST = 1.02
# Provider (or its beginning) -> name in the table.
SHOWN = {
    "liger": "liger[",
    "liger-kernel": "liger-kernel",
    "transformers": "transformers",
    "torch eager": "torch eager",
    "torch.compile": "torch.compile",
}


def cells(tiny):
    return [Cell(op, "sweep", seconds=420, expected=40.0) for op in (OPS[2:3] if tiny else OPS)]


def options_of(machine, sweep=False):
    return Options(
        device=machine.device,
        size="self-test" if machine.tiny else "full",
        backends=("torch",) if machine.tiny else ("cuda",),
        compile=sweep and not machine.tiny,
        sweep=sweep,
    )


def measure(cell, machine):
    options = options_of(machine, sweep=True)
    device = bench.Gpu() if machine.gpu else bench.Cpu()
    rows = []
    for row in suite.rows_of([cell.method], options)[1:]:
        if row.kind == "device" and (WORK in row.work or row.work == row.op):
            row.rounds = min(row.rounds, 5)
            row.reference = row.reference if machine.tiny else None  # benchmarks/run.py compares results
            rows.append(_short(bench.measure(row, device)))
    return {"rows": rows}


def _short(record):
    """What tables and pictures show of a row."""
    kept = ("status", "reason", "ms", "peak_mib", "group")
    providers = {n: {k: p[k] for k in kept if k in p} for n, p in record["providers"].items()}
    return {name: record[name] for name in ("name", "work", "shape")} | {"providers": providers}


def best(row, prefix, prefixes=()):
    """Of the measured providers whose name begins so, and not with a longer one of ``prefixes``, the one with
    least memory among the fastest; None without any.

    Some ops have a second form that overwrites its inputs, as fast as the first within the noise. An op
    without its public function does not count.
    """
    longer = tuple(other for other in prefixes if len(other) > len(prefix) and other.startswith(prefix))
    found = [
        p
        for n, p in row["providers"].items()
        if n.startswith(prefix)
        and not n.startswith(longer)
        and p["status"] == "ok"
        and p["group"] != "op alone"
        and time_of(p) is not None
    ]
    if not found:
        return None
    fastest = min(map(time_of, found))
    equal = [p for p in found if time_of(p) <= AS_FAST * fastest]
    return min(equal, key=lambda p: (p.get("peak_mib") or 0, time_of(p)))


def _text(row, provider):
    if provider is None:
        return ""
    memory = provider.get("peak_mib")
    return f"{provider['ms']['median']:.3f} ms" + ("" if memory is None else f", {memory:.0f} MiB")


def table_per_op(result, shown, text, head):
    """Tables of rows of ``benchmarks/run.py``.

    Args:
        shown: {name of a column: beginning of the names of its providers}.
        text: of a row and the best provider of a column, or None.
        head: of the first column, of all rows of an op.
    """
    parts = []
    for cell in result["cells"].values():
        parts.append(f"**{cell['method']}, {cell['size']}**")
        if tables.shape(cell) is not None:
            parts.append(tables.shape(cell))
            continue
        rows = cell["rows"]
        columns = {
            label: texts
            for label, prefix in shown.items()
            if any(texts := [text(row, best(row, prefix, shown.values())) for row in rows])
        }
        names = (row["name"] for row in rows)
        parts.append(tables.markdown([head(rows), *columns], zip(names, *columns.values(), strict=True)))
        parts.append(f"Where liger is behind: {behind(rows, shown)}.")
    return "\n\n".join(parts)


def table(result):
    return table_per_op(result, SHOWN, _text, lambda rows: WORK)


def behind(rows, shown=SHOWN):
    """The other methods that are faster or need less memory than liger, in how many rows, and by how much at
    most."""
    found = []
    for label, prefix in shown.items():
        every = [(best(row, "liger["), best(row, prefix, shown.values())) for row in rows]
        pairs = [pair for pair in every if None not in pair]
        faster = [ratio for o, t in pairs if (ratio := time_of(o) / time_of(t)) > AS_FAST]
        peaks = [(o.get("peak_mib"), t.get("peak_mib")) for o, t in pairs]
        peaks = [pair for pair in peaks if None not in pair]
        saved = [ours - theirs for ours, theirs in peaks if ours > AS_FAST * theirs]
        many = f"of {len(pairs)} rows"
        if faster:
            found.append(f"{label} is up to {100 * max(faster) - 100:.0f} % faster in {len(faster)} {many}")
        if saved:
            found.append(f"{label} needs up to {max(saved):.0f} MiB less in {len(saved)} {many}")
    return "; ".join(found) or "nowhere in this table"


def lines(rows):
    """{(work, growing size): {provider: [(value, ms, MiB)]}} of rows of one work that differ in one size."""
    works = {}
    for row in rows:
        works.setdefault(row["work"], []).append(row)
    found = {}
    for work, of_work in works.items():
        grown = [k for k in of_work[0]["shape"] if len({r["shape"].get(k) for r in of_work}) > 2]
        for name in grown:
            groups = {}
            for row in of_work:
                others = tuple(v for k, v in row["shape"].items() if k != name)
                groups.setdefault(others, []).append(row)
            longest = max(groups.values(), key=len)
            if len(longest) > 2:
                longest.sort(key=lambda row: row["shape"][name])
                found[work, name] = {
                    label: [
                        (row["shape"][name], p["ms"]["median"], p.get("peak_mib"))
                        for row in longest
                        if (p := best(row, prefix)) is not None
                    ]
                    for label, prefix in SHOWN.items()
                }
    return found


def draw(result):
    """One figure per op, with a row of panels per size that grows."""
    figures = {}
    for cell in result["cells"].values():
        found = lines(cell.get("rows", ()))
        works = dict.fromkeys(work for work, _ in found)
        groups = {
            name if len(works) == 1 else f"{name}, {work}": line for (work, name), line in found.items()
        }
        if groups:
            title = f"{cell['method']}, forward and backward"
            figures[cell["method"]] = pictures.value_lines(groups, title, pictures.source(result))
    return figures


EXPERIMENT = Experiment("E1", "Every op over its sweep", cells, measure, table, draw)
