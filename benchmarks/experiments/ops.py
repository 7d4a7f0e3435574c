"""E1: time and memory of every op over its sweep, by the rows of ``liger bench --sweep``."""

import liger_bench
from liger_bench import measure as bench
from liger_bench import suite
from liger_bench.harness import Options

from . import pictures, tables
from .cells import Cell, Experiment

# Heads, post-training losses and the tiled MLP have experiments of their own.
OPS = tuple(op for op in liger_bench.OPS if op not in ("heads", "preference", "tiled_mlp", "logprobs"))
FIRST = ("cross_entropy", "rms_norm", "swiglu", "geglu", "rope", "layer_norm", "fused_linear_ce")
# The rows of an op that are measured: a sweep of forward and backward alone is in liger bench --sweep.
WORK = "forward and backward"
# Provider (or its beginning) -> name in the table.
SHOWN = {
    "liger": "liger[",
    "liger-kernel": "liger-kernel",
    "torch eager": "torch eager",
    "torch.compile": "torch.compile",
}


def cells(tiny):
    ops = [*FIRST, *(op for op in OPS if op not in FIRST)]
    if tiny:
        ops = ["swiglu"]
    return [Cell(op, "sweep", seconds=420) for op in ops]


def measure(cell, machine):
    options = Options(
        device=machine.device,
        size="self-test" if machine.tiny else "full",
        backends=("torch",) if machine.tiny else ("cuda",),
        compile=not machine.tiny,
        sweep=True,
    )
    device = bench.Gpu() if machine.gpu else bench.Cpu()
    rows = []
    for row in suite.rows_of([cell.method], options)[1:]:
        if row.kind == "device" and (WORK in row.work or row.work == row.op):
            row.rounds = min(row.rounds, 5)
            row.reference = row.reference if machine.tiny else None  # liger bench compares results
            rows.append(_short(bench.measure(row, device)))
    return {"rows": rows}


def _short(record):
    """What tables and pictures show of a row."""
    kept = ("status", "reason", "ms", "peak_mib", "group")
    providers = {n: {k: p[k] for k in kept if k in p} for n, p in record["providers"].items()}
    return {name: record[name] for name in ("name", "work", "shape")} | {"providers": providers}


def best(row, prefix):
    """The fastest measured provider whose name begins so, or None."""
    found = [
        p for n, p in row["providers"].items() if n.startswith(prefix) and p["status"] == "ok" and "ms" in p
    ]
    return min(found, key=lambda p: p["ms"]["median"], default=None)


def _text(provider):
    if provider is None:
        return ""
    memory = provider.get("peak_mib")
    return f"{provider['ms']['median']:.3f} ms" + ("" if memory is None else f", {memory:.0f} MiB")


def table(result):
    parts = []
    for cell in result["cells"].values():
        parts.append(f"**{cell['method']}**")
        if tables.shape(cell) is not None:
            parts.append(tables.shape(cell))
            continue
        rows = [
            [row["name"], *(_text(best(row, prefix)) for prefix in SHOWN.values())] for row in cell["rows"]
        ]
        parts.append(tables.markdown(["forward and backward", *SHOWN], rows))
    return "\n\n".join(parts)


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
