"""One picture per op: time and peak memory of every provider at the size that users meet, the whole pass.

The other sizes are in the tables of the report.
"""

from .verdict import time_of

# The palette of Okabe and Ito, which colour-blind readers can tell apart; black is for ceilings. By the beginning of a
# provider's name, the longest that fits.
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


def color(name):
    family = max((key for key in COLORS if name.startswith(key)), key=len, default=None)
    return COLORS.get(family, "black")


def shown(records):
    """The record of an op that its picture shows: its first of forward and backward together, else of the device."""
    of_device = [record for record in records if record["kind"] == "device"] or records
    whole = [record for record in of_device if "forward and backward" in record["work"]]
    return (whole or of_device)[0]


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


def _text(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _draw_bars(axes, label, values, names):
    bars = axes.barh(names, [values.get(name, 0.0) for name in names], color=[color(name) for name in names])
    texts = [_text(values[name]) if name in values else "" for name in names]
    axes.bar_label(bars, texts, padding=2, fontsize=8)
    axes.margins(x=0.2)
    axes.set_xlabel(label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _figure(record):
    from matplotlib.figure import Figure

    (speed_label, rates), (memory_label, peaks) = speed(record), memory(record)
    times = {name: time_of(record["providers"][name]) for name in rates}
    names = sorted(times, key=times.get)
    figure = Figure(figsize=(9, 1.6 + 0.24 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.invert_yaxis()
    _draw_bars(left, speed_label, rates, names)
    _draw_bars(right, memory_label, peaks, names)
    return figure


def plot(result, stem):
    """One PNG per op beside ``stem``, a path without suffix; returns the paths."""
    paths = []
    for op in dict.fromkeys(record["op"] for record in result["rows"] if record["contests"]):
        record = shown([record for record in result["rows"] if record["op"] == op])
        figure = _figure(record)
        facts = result["environment"]
        commit = (facts["commit"] or "unknown commit")[:12]
        figure.suptitle(f"{record['name']}\n{facts['device']}, {facts['dtype']}, {commit}", fontsize=10)
        paths.append(stem.with_name(f"{stem.name}-{op}.png"))
        figure.savefig(paths[-1], dpi=110)
    return paths
