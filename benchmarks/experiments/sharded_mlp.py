# SPDX-License-Identifier: BSD-3-Clause
"""E11: one gated MLP under FSDP2 and ZeRO-3 at seven lengths, whole and tiled, by
liger_bench.devices.sharded_mlp."""

from liger_bench.devices import sharded_mlp as bench

from . import pictures, sharded_training, tables
from .cells import Cell, Experiment

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
REGULAR = "regular"


def cells(tiny):
    lengths = (8,) if tiny else LENGTHS
    return [
        Cell(
            framework,
            f"{tokens} tokens",
            tokens,
            {"tokens": tokens},
            ("deepspeed",) if framework == "zero3" else (),
            gpus=2,
            seconds=240,
        )
        for tokens in lengths
        for framework in bench.FRAMEWORKS
    ]


def measure(cell, machine):
    sharded_training.start(machine)
    sizes = (16, 24) if machine.tiny else (4096, 12288)
    (record,) = bench.measure_lengths(
        cell.method, [cell.settings["tokens"]], *sizes, 2 if machine.tiny else 5, machine.device
    )
    return {"contestants": record["contestants"]}


def _text(one, regular):
    if one["status"] == "failed":
        return f"failed: {one['reason'][:80]}".replace("|", "/")
    wrong = "" if one["status"] == "ok" else " (WRONG)"
    memory = ""
    if regular.get("peak_mib"):
        memory = f", {one['peak_mib']:.0f} MiB ({one['peak_mib'] / regular['peak_mib']:.2f}x)"
    return f"{one['ms']:.2f} ms ({one['ms'] / regular['ms']:.3f}x){memory}{wrong}"


def table(result):
    """One row per framework and length, one column per contestant: time, peak, and both relative to the
    regular MLP."""
    cells = sorted(result["cells"].values(), key=lambda c: (c["method"], c["order"]))
    names = list(dict.fromkeys(n for c in cells for n in c.get("contestants", ())))
    rows = []
    for cell in cells:
        row = [cell["method"], cell["size"]]
        if tables.shape(cell) is not None:
            rows.append([*row, tables.shape(cell), *[""] * (len(names) - 1)])
            continue
        found = cell["contestants"]
        regular = found[REGULAR]
        rows.append([*row, *(_text(found[n], regular) if n in found else "" for n in names)])
    table = tables.markdown(["", "tokens per rank", *(names or ["result"])], rows)
    return f"{table}\n\n{_larger(cells)}"


def _larger(cells):
    """One line: where a tiled MLP needs more memory than the regular one."""
    texts = []
    for cell in cells:
        found = cell.get("contestants", {})
        regular = found.get(REGULAR, {}).get("peak_mib")
        for name, one in found.items():
            if regular and one["status"] != "failed" and one["peak_mib"] > regular * (1 + tables.NOTICED):
                texts.append(
                    f"{cell['method']}, {cell['size']}: {name} by {one['peak_mib'] / regular - 1:.0%}"
                )
    return f"Larger than the regular MLP: {'; '.join(texts) if texts else 'nowhere in this table'}."


def draw(result):
    figures = {}
    for framework in bench.FRAMEWORKS:
        series = {}
        for cell in sorted(result["cells"].values(), key=lambda c: c["order"]):
            if cell["method"] == framework:
                for name, one in cell.get("contestants", {}).items():
                    if one["status"] != "failed":
                        series.setdefault(name, []).append((cell["order"], one["ms"], one["absolute_mib"]))
        if series:
            title = f"One gated MLP under {framework}"
            lines = {"tokens per rank": series}
            figures[framework] = pictures.value_lines(lines, title, pictures.source(result))
    return figures


EXPERIMENT = Experiment("E11", "A sharded MLP, whole and tiled", cells, measure, table, draw)
