# SPDX-License-Identifier: BSD-3-Clause
"""Bar charts with a panel for time above one for peak memory, and one horizontal bar per provider.

They are as narrow as a phone shows them: the letters stay legible at 390 pixels.
"""

import io
import statistics
import textwrap
from dataclasses import dataclass

# Bars longer than this multiple of the median are truncated, so that differences between the others remain
# visible.
OUTLIER = 4
GREY = "#555555"
WIDTH = 5.4  # inches
DASHED = (0, (3, 2))


@dataclass
class Bar:
    """``time`` is in the unit of the axis; ``mib`` is None where memory was not measured."""

    series: str
    color: str
    time: float
    mib: float | None = None


@dataclass
class Group:
    """Bars with one label; if ``label`` is None, each bar has the name of its series.

    ``ceiling_time`` is drawn as a line with the name ``ceiling``.
    """

    label: str | None
    bars: list[Bar]
    ceiling: str | None = None
    ceiling_time: float | None = None


def _text(value):
    if 0 < value < 0.01:
        return "< 0.01"
    return "0" if value == 0 else f"{value:#.3g}" if value < 100 else f"{value:,.0f}"


def _limit(values):
    """(end of the axis, length from which bars are truncated)"""
    large = [value for value in values if value > max(values) / 1e4]
    whole = OUTLIER * statistics.median(large) if large else 0.0
    longest = max((value for value in values if value <= whole), default=1.0)
    return 1.3 * longest or 1.0, whole


def _panel(axes, positions, bars, values, texts, label):
    end, whole = _limit([value for value in values if value is not None])
    cut = False
    for position, bar, value, text in zip(positions, bars, values, texts, strict=True):
        if value is None:
            continue
        inside = value > whole
        cut = cut or inside
        axes.barh(position, end if inside else value, height=0.82, color=bar.color)
        axes.annotate(
            f"{text} »" if inside else text, (end if inside else value, position), (-3 if inside else 5, 0),
            textcoords="offset points", va="center", ha="right" if inside else "left", fontsize=9,
            color="white" if inside else "black", zorder=4,
            bbox=None if inside else {"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    axes.set_xlim(0, end)
    axes.set_xlabel(f"{label}\n(lower is better{'; » bar cut' if cut else ''})", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _positions(groups):
    """Vertical positions of the bars of each group, from the top, with half a row between groups."""
    rows, row = [], 0.0
    for group in groups:
        rows.append([row + i for i in range(len(group.bars))])
        row += len(group.bars) + 0.6
    return rows


def _name_rows(axes, groups, rows):
    ticks, labels = [], []
    for group, of_group in zip(groups, rows, strict=True):
        if group.label is None:
            ticks += of_group
            labels += [bar.series for bar in group.bars]
        else:
            ticks.append(sum(of_group) / len(of_group))
            labels.append(group.label)
    axes.set_yticks(ticks, labels)
    axes.set_ylim(rows[-1][-1] + 0.6, -0.6)


def _legend(axes, groups):
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    series = {bar.series: bar.color for group in groups if group.label is not None for bar in group.bars}
    handles = [Patch(color=color, label=name) for name, color in series.items()]
    ceilings = dict.fromkeys(group.ceiling for group in groups if group.ceiling)
    if ceilings:
        handles.append(Line2D([], [], color="black", linestyle=DASHED, label=" or ".join(ceilings)))
    if handles:
        axes.legend(
            handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, columnspacing=1.2,
            handlelength=1.4, fontsize=9, frameon=False,
        )  # fmt: skip


def draw(groups, title, source, time_label=None, reference=None):
    """The figure; without ``time_label`` of memory alone. With ``reference``, a series, times are drawn as
    multiples of its time in the group; the numbers at the bars are the measured ones in any case."""
    from matplotlib.figure import Figure

    rows = _positions(groups)
    bars = [bar for group in groups for bar in group.bars]
    positions = [row for of_group in rows for row in of_group]
    units = []
    for group in groups:
        unit = next((bar.time for bar in group.bars if bar.series == reference), 1.0)
        units += [unit] * len(group.bars)
    has_memory = any(bar.mib is not None for bar in bars)
    # In GiB if most values are that large.
    divisor, name = 1.0, "MiB"
    if has_memory and statistics.median(bar.mib or 0.0 for bar in bars) >= 1024:
        divisor, name = 1024.0, "GiB"

    number = (time_label is not None) + has_memory
    figure = Figure(figsize=(WIDTH, 1.3 + number * (0.7 + 0.22 * (positions[-1] + 1))), layout="constrained")
    panels = list(figure.subplots(number, 1, squeeze=False)[:, 0])
    heading = textwrap.fill(title, 54, break_on_hyphens=False)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11, fontweight="bold")
    below = textwrap.fill(source, 84, break_on_hyphens=False)
    figure.supxlabel(below, x=0.01, ha="left", fontsize=8, color=GREY)
    if time_label is not None:
        times = [bar.time / unit for bar, unit in zip(bars, units, strict=True)]
        _panel(panels[0], positions, bars, times, [_text(bar.time) for bar in bars], time_label)
        for group, of_group in zip(groups, rows, strict=True):
            if group.ceiling and reference is None:
                x = [group.ceiling_time] * 2
                panels[0].plot(x, [of_group[0] - 0.5, of_group[-1] + 0.5], color="black", linestyle=DASHED)
    if has_memory:
        sizes = [None if bar.mib is None else bar.mib / divisor for bar in bars]
        texts = ["" if size is None else _text(size) for size in sizes]
        _panel(panels[-1], positions, bars, sizes, texts, f"peak memory beyond the inputs, {name}")
    for axes in panels:
        _name_rows(axes, groups, rows)
    timed = time_label is not None and reference is None
    _legend(panels[0], groups if timed else [Group(g.label, g.bars) for g in groups])
    return figure


def save(figure, path):
    """Writes a PNG of few colours, a third of the bytes: pictures are in the repository."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=160)
    Image.open(drawn).convert("RGB").quantize(96).save(path, optimize=True)
