"""One picture per op: speed on the left, peak memory on the right; lines where a size grows, else bars."""

from .verdict import time_of

# The palette of Okabe and Ito, which colour-blind readers can tell apart; black is for ceilings. By the beginning of a
# provider's name, the longest that fits; variants of one differ by marker and dash.
COLORS = {
    "liger[cuda]": "#0072B2",
    "liger[triton]": "#56B4E9",
    "liger[torch]": "#009E73",
    "liger-kernel": "#D55E00",
    "liger-kernel CuTe": "#E69F00",
    "quack": "#CC79A7",
    "cut-cross-entropy": "#C9BC1A",
    "torch": "#777777",
}
STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ("--", "v"), (":", "P"))
POINTS_OF_A_LINE = 3


def style(names):
    """{name: keyword arguments of a line}, distinct as long as there are enough styles."""
    taken, styles = {}, {}
    for name in names:
        family = max((key for key in COLORS if name.startswith(key)), key=len, default=None)
        dash, marker = STYLES[taken.get(family, 0) % len(STYLES)]
        taken[family] = taken.get(family, 0) + 1
        styles[name] = {"color": COLORS.get(family, "black"), "linestyle": dash, "marker": marker}
    return styles


def lines_of(records):
    """[(work and fixed sizes, name of the size that grows, records in its order)] for all that make a line."""
    groups = {}
    for record in records:
        for axis in record["shape"]:
            fixed = tuple((name, value) for name, value in record["shape"].items() if name != axis)
            groups.setdefault((record["work"], axis, fixed), {})[record["shape"][axis]] = record
    found = []
    for (work, axis, fixed), points in groups.items():
        if len(points) >= POINTS_OF_A_LINE:
            title = ", ".join([work, *(f"{name} {value}" for name, value in fixed)])
            found.append((title, axis, [points[value] for value in sorted(points)]))
    return found


def speed(record):
    """(label of the axis, {provider: value}) of a row."""
    measured = {n: p for n, p in record["providers"].items() if p["status"] in ("ok", "wrong")}
    if record["kind"] == "host":
        return "host time, us (lower is better)", {name: time_of(p) for name, p in measured.items()}
    if record["nbytes"]:
        rates = {name: record["nbytes"] / time_of(p) / 1e9 for name, p in measured.items()}
        return "TB/s (higher is better)", rates
    ceiling = next((name for name in record["ceilings"] if name in measured), None)
    if ceiling is None:
        return "device time, ms (lower is better)", {name: time_of(p) for name, p in measured.items()}
    ratios = {name: p["ratios"][ceiling] for name, p in measured.items()}
    return f"time, multiple of {ceiling} (lower is better)", ratios


def memory(record):
    """As ``speed``, of the peak memory of the providers that are no ceiling."""
    peaks = {
        name: p["peak_mib"]
        for name, p in record["providers"].items()
        if p["status"] in ("ok", "wrong") and p["group"] != "ceiling" and p.get("peak_mib") is not None
    }
    return "peak memory beyond the inputs, MiB (lower is better)", peaks


def _draw_lines(axes, title, axis_name, records, styles, quantity):
    label, _ = quantity(records[0])
    sizes = [record["shape"][axis_name] for record in records]
    points = [quantity(record)[1] for record in records]
    names = dict.fromkeys(name for values in points for name in values)
    if not names:
        axes.set_axis_off()
    for name in names:
        values = [values.get(name, float("nan")) for values in points]
        axes.plot(sizes, values, label=name, markersize=4, linewidth=1.2, **styles[name])
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(axis_name, fontsize=8)
    axes.set_ylabel(label.replace(" (", "\n("), fontsize=8)
    axes.set_xticks(sizes)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=7)


def _draw_bars(axes, record, styles, quantity):
    label, values = quantity(record)
    if not values:
        axes.set_axis_off()
        return
    colors = [styles[name]["color"] for name in values]
    bars = axes.barh(range(len(values)), list(values.values()), color=colors)
    axes.bar_label(bars, [f"{value:.4g}" for value in values.values()], padding=2, fontsize=7)
    axes.set_yticks(range(len(values)), list(values), fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(record["name"], fontsize=9)
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(axis="x", labelsize=7)


def _figure(records):
    from matplotlib.figure import Figure

    lines = lines_of(records)
    on_lines = {record["name"] for _, _, points in lines for record in points}
    bars = [record for record in records if record["name"] not in on_lines]
    styles = style(dict.fromkeys(name for record in records for name in record["providers"]))
    heights = [3.2] * len(lines) + [1 + 0.2 * len(record["providers"]) for record in bars]
    figure = Figure(figsize=(13, sum(heights) + 1), layout="constrained")
    panels = figure.subplots(len(heights), 2, height_ratios=heights, squeeze=False)
    for (title, axis_name, points), pair in zip(lines, panels, strict=False):
        for axes, quantity in zip(pair, (speed, memory), strict=True):
            _draw_lines(axes, title, axis_name, points, styles, quantity)
    for record, pair in zip(bars, panels[len(lines) :], strict=True):
        for axes, quantity in zip(pair, (speed, memory), strict=True):
            _draw_bars(axes, record, styles, quantity)
    if lines:
        shown = {}
        for axes in panels[: len(lines)].flat:
            shown |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(shown.values(), shown, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def plot(result, stem):
    """One PNG per op beside ``stem``, a path without suffix; returns the paths."""
    paths = []
    for op in dict.fromkeys(record["op"] for record in result["rows"] if record["contests"]):
        figure = _figure([record for record in result["rows"] if record["op"] == op])
        facts = result["environment"]
        commit = (facts["commit"] or "unknown commit")[:12]
        figure.suptitle(f"{op}: {facts['device']}, {facts['dtype']}, {commit}", fontsize=11)
        paths.append(stem.with_name(f"{stem.name}-{op}.png"))
        figure.savefig(paths[-1], dpi=110)
    return paths
