# SPDX-License-Identifier: BSD-3-Clause
"""The kinds of pictures: lines over sizes, stacked bars, differences of losses.

Panels are one above the other: the letters of a narrow picture stay legible on a phone.
"""

import re
import statistics
import textwrap

from .results import GIB, cells_of, ordered

# The colour-blind safe palette of Okabe and Ito.
COLORS = {
    "liger": "#0072B2",
    "liger, tiled MLP": "#56B4E9",
    "liger, recompute": "#009E73",
    "liger-kernel": "#D55E00",
    "transformers": "#777777",
    "torch eager": "#777777",
    "TRL": "#777777",
    "transformers, compiled": "#CC79A7",
    "unpatched": "#777777",
    "nudged": "#E69F00",
}
OTHERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#777777")
GREY = "#555555"
WIDTH = 5.4  # inches
# Steps of the running median of differences between losses.
SMOOTHED = 15


def color(name, index=0):
    return COLORS.get(name) or OTHERS[index % len(OTHERS)]


def named(method):
    """A method in a legend: not "liger", which readers take for liger-kernel."""
    return re.sub(r"^liger(?!-)", "liger-ops", method)


def figure(height=4.4, columns=1, rows=1, title="", source="", width=WIDTH, **how):
    """(figure, array of axes) with a title, and below it all what names the machine."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    axes = made.subplots(rows, columns, squeeze=False, **how)
    heading = textwrap.fill(title, int(10 * width), break_on_hyphens=False)
    made.suptitle(heading, x=0.01, ha="left", fontsize=11, fontweight="bold")
    if source:
        below = textwrap.fill(source, int(17 * width), break_on_hyphens=False)
        made.supxlabel(below, x=0.01, ha="left", fontsize=7, color=GREY)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=9)
    return made, axes


def source(result):
    from .tables import environments

    return environments(result)


def _legend(panel):
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8, frameon=False)


def _draw_lines(panel, cells, value, methods, label):
    """A line per method over the order of its cells, and a cross where its memory runs out first."""
    sizes = sorted({c["order"] for c in cells})
    for index, method in enumerate(methods):
        of_method = sorted((c for c in cells if c["method"] == method), key=lambda c: c["order"])
        points = [(c["order"], value(c)) for c in of_method if c["status"] == "ok"]
        points = [point for point in points if point[1] is not None]
        shade = color(method, index)
        if points:
            panel.plot(*zip(*points, strict=True), "o-", color=shade, label=named(method), markersize=4)
        full = [c["order"] for c in of_method if c["status"] == "oom"]
        if full:
            panel.plot(
                min(full), 0.02 + 0.045 * index, "X", color=shade, markersize=8, clip_on=False,
                transform=panel.get_xaxis_transform(), label=None if points else f"{named(method)} (OOM)",
            )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [f"{v:g}" for v in sizes], rotation=60, fontsize=8)
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.set_xlabel(f"{label}; X: out of memory", fontsize=9)
    panel.grid(axis="y", color="#eeeeee")


def lines_over_sizes(result, panels, title, label):
    """One panel per ``{label of the axis: function of a measured cell that returns a number or None}``."""
    made, axes = figure(3.2 * len(panels) + 0.6, rows=len(panels), title=title, source=source(result))
    for panel, (name, value) in zip(axes[:, 0], panels.items(), strict=True):
        _draw_lines(panel, result["cells"].values(), value, ordered(result, "method"), label)
        panel.set_ylabel(name, fontsize=9)
    _legend(axes[0][0])
    return made


def memory_of_parts(results, title, label):
    """One panel of peak memory over sizes per ``{name: result}``, two side by side."""
    columns = min(2, len(results))
    rows = -(-len(results) // columns)
    first = next(iter(results.values()))
    made, axes = figure(2.5 * rows + 0.8, columns, rows, title=title, source=source(first))
    for panel in axes.flat[len(results) :]:
        panel.set_visible(False)
    for panel, (name, result) in zip(axes.flat, results.items(), strict=False):
        _draw_lines(panel, result["cells"].values(), gibibytes, ordered(result, "method"), label)
        panel.set_ylabel(f"{name}: peak, GiB", fontsize=9)
    _legend(axes[0][0])
    return made


def gibibytes(cell):
    return None if cell.get("peak_bytes") is None else cell["peak_bytes"] / GIB


def training_lines(result, label):
    """Tokens per second and peak memory over sizes."""
    panels = {
        "thousand tokens/s (higher is better)": lambda c: c["tokens_per_second"] / 1e3,
        "peak memory, GiB (lower is better)": gibibytes,
    }
    from . import experiment

    return {"": lines_over_sizes(result, panels, experiment(result["experiment"]).title, label)}


def stacked_bars(groups, title, label, note=""):
    """``groups``: {name of a bar: {part: height}}; parts have the same colour in all bars. Negative parts are
    drawn below zero."""
    made, axes = figure(4.6, title=title, source=note, width=max(6.0, 1.2 * len(groups) + 3))
    panel = axes[0][0]
    parts = list(dict.fromkeys(part for bars in groups.values() for part in bars))
    for index, part in enumerate(parts):
        for place, bars in enumerate(groups.values()):
            height = bars.get(part, 0.0)
            before = [bars.get(other, 0.0) for other in parts[:index]]
            bottom = sum(h for h in before if (h < 0) == (height < 0))
            panel.bar(place, height, 0.7, bottom, color=OTHERS[index % len(OTHERS)], label=part)
    panel.set_xticks(range(len(groups)), groups, fontsize=8)
    panel.set_ylabel(label, fontsize=9)
    panel.axhline(0, color="black", linewidth=0.6)
    known = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    panel.legend(
        known.values(), known.keys(), fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1)
    )
    return made


def _running_median(values):
    """The median of SMOOTHED values around each; of fewer at both ends."""
    half = SMOOTHED // 2
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def loss_differences(result, title, reference="transformers", yardstick="nudged"):
    """Per size: running medians of the differences of losses from the reference, on a logarithmic scale."""
    sizes = ordered(result, "size")
    rows = -(-len(sizes) // 2)
    made, axes = figure(2.3 * rows + 1.0, 2, rows, title=title, source=source(result))
    for panel in axes.flat[len(sizes) :]:
        panel.set_visible(False)
    for panel, size in zip(axes.flat, sizes, strict=False):
        curves = {c["method"]: c["losses"] for c in cells_of(result, size=size) if c["status"] == "ok"}
        for index, (method, losses) in enumerate(curves.items()):
            if reference not in curves or method == reference:
                continue
            gaps = [max(abs(a - b), 1e-8) for a, b in zip(losses, curves[reference], strict=False)]
            style = "--" if method == yardstick else "-"
            panel.plot(
                range(1, len(gaps) + 1), _running_median(gaps), style, color=color(method, index),
                linewidth=1.3, label=named(method),
            )  # fmt: skip
        panel.set_title(size, loc="left", fontsize=9)
        panel.set_yscale("log")
        panel.set_xlabel("step", fontsize=8)
    _legend(axes[0][0])
    return made


def value_lines(groups, title, note):
    """Two panels, time and memory, per ``{label of the axis: {name: [(size, ms, MiB or None)]}}``."""
    made, axes = figure(5.0 * len(groups) + 0.8, rows=2 * len(groups), title=title, source=note)
    names = ("ms (lower is better)", "peak memory, MiB")
    for row, (label, series) in zip(axes.reshape(-1, 2), groups.items(), strict=True):
        for panel, column, name in zip(row, (1, 2), names, strict=True):
            for index, (method, points) in enumerate(series.items()):
                shown = [(p[0], p[column]) for p in points if p[column] is not None]
                if shown:
                    shade = color(method, index)
                    panel.plot(
                        *zip(*shown, strict=True), "o-", color=shade, label=named(method), markersize=4
                    )
            panel.set_ylim(bottom=0)
            panel.set_xlabel(label, fontsize=9)
            panel.set_ylabel(name, fontsize=9)
            panel.grid(axis="y", color="#eeeeee")
    _legend(axes[0][0])
    return made


def bars(result, title):
    """Two panels, tokens per second and peak memory: a group of bars per size, a bar per method."""
    made, axes = figure(6.4, rows=2, title=title, source=source(result))
    sizes, methods = ordered(result, "size"), ordered(result, "method")
    values = {
        "thousand tokens/s (higher is better)": lambda c: c["tokens_per_second"] / 1e3,
        "peak memory, GiB (lower is better)": gibibytes,
    }
    for panel, (name, value) in zip(axes[:, 0], values.items(), strict=True):
        for index, method in enumerate(methods):
            cells = {c["size"]: c for c in cells_of(result, method=method) if c["status"] == "ok"}
            heights = [(value(cells[size]) or 0.0) if size in cells else 0.0 for size in sizes]
            places = [i + (index - (len(methods) - 1) / 2) * 0.8 / len(methods) for i in range(len(sizes))]
            panel.bar(places, heights, 0.76 / len(methods), color=color(method, index), label=named(method))
        panel.set_xticks(range(len(sizes)), sizes, fontsize=8)
        panel.set_ylabel(name, fontsize=9)
    _legend(axes[0][0])
    return made


def speed_over_memory(result, title):
    """A panel per size: a point per method, at its peak memory and its tokens per second."""
    cells = [c for c in result["cells"].values() if c["status"] == "ok"]
    sizes = [size for size in ordered(result, "size") if any(c["size"] == size for c in cells)]
    made, axes = figure(2.9 * len(sizes) + 0.8, rows=max(len(sizes), 1), title=title, source=source(result))
    methods = ordered(result, "method")
    for panel, size in zip(axes[:, 0], sizes, strict=False):
        for index, method in enumerate(methods):
            for cell in (c for c in cells if (c["method"], c["size"]) == (method, size)):
                place = gibibytes(cell) or 0.0, cell["tokens_per_second"] / 1e3
                panel.plot(*place, "o", color=OTHERS[index % len(OTHERS)], label=named(method), markersize=7)
        panel.set_title(size, loc="left", fontsize=9)
        panel.set_xlim(left=0)
        panel.set_xlabel("peak memory, GiB (left is better)", fontsize=9)
        panel.set_ylabel("thousand tokens/s", fontsize=9)
        panel.grid(color="#eeeeee")
        _legend(panel)
    return made
