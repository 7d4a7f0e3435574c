# SPDX-License-Identifier: BSD-3-Clause
"""Tokens per second over peak memory of training steps, from result files of ``bench_model``.

PYTHONPATH=benchmarks python -m liger_bench.models.curve 32x1024 RESULT.json ... --output PICTURE.png
"""

import argparse
import json
from pathlib import Path

from ..reports.plots import color
from .bench_model import parse_shape
from .report import GIB, tokens_per_second

# Group of contestants -> (label, name of a provider whose colour it has; one without is black).
SERIES = {
    "ours": ("liger-ops", "liger[cuda]"),
    "liger-kernel": ("liger-kernel", "liger-kernel"),
    "plain": ("transformers", "torch eager"),
    "other": ("torch.compile", "compiled"),
}


def ranks_of(results, wanted):
    """The numbers of ranks of the rows of one (batch, sequence)."""
    rows = (record for result in results for record in result["rows"])
    return sorted({r.get("ranks", 1) for r in rows if (r["batch"], r["sequence"]) == wanted})


def points(results, wanted):
    """{group: [(GiB, thousand tokens/s, name)]}, sorted by memory, of one (batch, sequence)."""
    found = {group: [] for group in SERIES}
    for result in results:
        for record in result["rows"]:
            if (record["batch"], record["sequence"]) != wanted:
                continue
            for name, provider in record["providers"].items():
                if provider["status"] == "ok" and provider["peak_bytes"] and provider["group"] in found:
                    speed = tokens_per_second(record, provider) / 1e3
                    found[provider["group"]].append((provider["peak_bytes"] / GIB, speed, name))
    return {group: sorted(of_group) for group, of_group in found.items()}


def frontier(of_group):
    """The points that are faster than every smaller one."""
    best = []
    for point in of_group:
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best


def _label(name, group):
    label = name.removeprefix("liger[cuda]").removeprefix(SERIES[group][0]).strip(", ")
    label = label.replace("memory ", "planned in ").replace("G,", " GiB,")
    return f"{label[:-1]} GiB" if label.endswith("G") else label


# Where a label may be: its offset from the dot, in points, and its alignment.
PLACES = (((6, -11), "left"), ((6, 5), "left"), ((-6, 5), "right"), ((-6, -11), "right"))


def annotate(figure, axes, labels, dots):
    """Draws (GiB, speed, text) in the first place that overlaps no label and no dot; leaves out those without
    one."""
    # The layout, which places depend on.
    figure.canvas.draw()
    dots = [axes.transData.transform(dot) for dot in dots]
    taken = []
    for gib, speed, text in labels:
        for offset, side in PLACES:
            label = axes.annotate(
                text, (gib, speed), offset, textcoords="offset points", fontsize=8, ha=side, in_layout=False
            )
            box = label.get_window_extent()
            inside = axes.bbox.contains(*box.p0) and axes.bbox.contains(*box.p1)
            if inside and not any(map(box.overlaps, taken)) and not any(box.contains(*dot) for dot in dots):
                taken.append(box)
                break
            label.remove()


def draw(found, title, ranks=1):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels = []
    for group, (label, provider) in SERIES.items():
        if not found[group]:
            continue
        line = frontier(found[group])
        axes.plot(*zip(*(p[:2] for p in line), strict=True), color=color(provider), alpha=0.5)
        axes.plot(*zip(*(p[:2] for p in found[group]), strict=True), "o", color=color(provider), label=label)
        named = (p for p in found[group] if p in line or "compiled" in p[2])
        labels += [(gib, speed, text) for gib, speed, name in named if (text := _label(name, group))]
    axes.set_xlabel("peak memory of a step, GiB" + (" of one rank" if ranks > 1 else ""))
    axes.set_ylabel("thousand tokens/s" + (f" of {ranks} ranks" if ranks > 1 else ""))
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12, y=0.12)
    axes.legend(frameon=False, loc="best")
    dots = [p[:2] for of_group in found.values() for p in of_group]
    annotate(figure, axes, sorted(labels, key=lambda label: -label[1]), dots)
    return figure


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", type=parse_shape, metavar="BATCHxTOKENS")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--title", default="Training steps: speed for memory")
    parsed = parser.parse_args(arguments)
    results = [json.loads(path.read_text()) for path in parsed.results]
    ranks, found = ranks_of(results, parsed.shape), points(results, parsed.shape)
    if len(ranks) > 1:
        parser.error(f"results of {ranks} ranks in one picture; name results of one number of ranks")
    if not any(found.values()):
        parser.error(
            f"no result of {parsed.shape[0]}x{parsed.shape[1]} in {[str(p) for p in parsed.results]}"
        )
    draw(found, parsed.title, *ranks).savefig(parsed.output, dpi=110)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
