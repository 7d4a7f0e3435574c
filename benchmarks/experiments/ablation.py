# SPDX-License-Identifier: BSD-3-Clause
"""E5: the parts of ``liger.patch`` alone, together, and all but one: time and peak memory of a training
step."""

import itertools

from . import pictures, tables, training
from .cells import Cell, Experiment, expected_seconds, steps_of
from .results import cells_of, ordered

# Part -> options of liger.patch. The order is the order of the stacked bars: each part is added to those
# before it.
PARTS = {
    "fused loss": ("fused_linear_cross_entropy",),
    "SwiGLU": ("swiglu",),
    "RMSNorm": ("rms_norm", "fused_add_rms_norm"),
    "RoPE": ("rope",),
    "tiled MLP": ("tiled_mlp",),
}
# Over batches, then over lengths, for the sums of parts; the parts alone and all but one at one of them.
SHAPES = (*((b, 1024) for b in (4, 16, 32, 64, 112)), *((4, t) for t in (512, 4096, 8192, 16384, 24576)))
OTHERS = ((32, 1024),)
UNPATCHED = "unpatched"
# Sums of parts that are methods of other experiments.
SAME = {UNPATCHED: "transformers", " + ".join(list(PARTS)[:-1]): "liger"}


def sums():
    """{name: parts}: sums of parts in their order."""
    parts = list(PARTS)
    found = {" + ".join(parts[:count]): tuple(parts[:count]) for count in range(1, len(parts) + 1)}
    return {UNPATCHED: (), **found}


def methods():
    """{name: parts}: sums of parts, parts alone, all but one."""
    parts = list(PARTS)
    found = sums()
    found |= {part: (part,) for part in parts}
    for part in parts[:-1]:
        found[f"all but {part}"] = tuple(p for p in parts if p != part)
    return found


def options(parts):
    """The keywords of liger.patch that replace these parts only."""
    return {option: part in parts for part, names in PARTS.items() for option in names}


def cells(tiny):
    shapes = [(2, 16)] if tiny else SHAPES
    chosen = methods()
    if tiny:
        chosen = {m: chosen[m] for m in (UNPATCHED, "fused loss", "fused loss + SwiGLU", "RoPE", "tiled MLP")}
    return [
        Cell(
            name,
            f"{b}x{t}",
            b * t,
            {"batch": b, "sequence": t, "parts": parts},
            expected=expected_seconds("1b", b, t),
            work=steps_of("1b", SAME[name], b, t) if name in SAME else "",
        )
        for b, t in shapes
        for name, parts in chosen.items()
        if tiny or (b, t) in OTHERS or name in sums()
    ]


def measure(cell, machine):
    parts = cell.settings["parts"]
    if not parts:
        return training.measure(cell, machine, training.contestant("transformers", machine))
    return training.measure(cell, machine, training.patched(machine, **options(parts)))


def _sums(result, value):
    """{size: {part: what it saves after those before it}}, and the rest, from the sums of parts."""
    chain = list(sums())
    groups = {}
    for size in ordered(result, "size"):
        known = {c["method"]: value(c) for c in cells_of(result, size=size) if c["status"] == "ok"}
        steps = [name for name in chain if known.get(name) is not None]
        if len(steps) < 2:
            continue
        bars = {"with all parts that were measured": known[steps[-1]]}
        for before, after in reversed(list(itertools.pairwise(steps))):
            added = " + ".join(p for p in methods()[after] if p not in methods()[before])
            bars[f"saved by {added}"] = known[before] - known[after]
        groups[size if steps[0] == UNPATCHED else f"{size}\n(unpatched: OOM)"] = bars
    return groups


def draw(result):
    figures = {}
    for suffix, value, label in (
        ("memory", pictures.gibibytes, "peak memory, GiB"),
        ("time", lambda c: c["ms"]["median"], "ms per step"),
    ):
        groups = _sums(result, value)
        if groups:
            figures[suffix] = pictures.stacked_bars(
                groups, f"What each part of liger.patch saves: {label}", label, pictures.source(result)
            )
    return figures


def table(result):
    """One row per set of parts, one column per size."""
    found = {(c["method"], c["size"]): c for c in result["cells"].values()}
    sizes = ordered(result, "size")

    def text(cell, reference):
        if tables.shape(cell) is not None:
            return tables.shape(cell)
        wrong = " (WRONG LOSS)" if tables.differs(cell, reference) else ""
        return f"{cell['ms']['median']:.1f} ms, {tables.gib(cell['peak_bytes'])}{wrong}"

    rows = []
    for method in methods():
        if any((method, size) in found for size in sizes):
            cells = []
            for size in sizes:
                first = found.get((UNPATCHED, size))
                first = first if first is not None and first["status"] == "ok" else None
                cells.append(text(found.get((method, size)), first))
            rows.append([method, *cells])
    return tables.markdown(["parts", *sizes], rows)


EXPERIMENT = Experiment("E5", "Each part of liger.patch", cells, measure, table, draw)
