# SPDX-License-Identifier: BSD-3-Clause
"""One picture per op: how long does its whole pass take with every provider, and how much memory?

A picture shows the size that users meet; the other sizes are in the tables of the report.
"""

from .chart import Bar, Group, draw, save
from .verdict import SAME_MEMORY_MIB, judge, time_of

# The colour-blind safe palette of Okabe and Ito; black is for ceilings. Keys are prefixes of provider names,
# and the longest match counts.
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
# Ops whose rows are different losses. Their figure has a group of bars per loss: liger, liger-kernel, eager
# torch.
SEVERAL = ("preference",)
LABELS = {"dpo": "DPO", "orpo": "ORPO", "simpo": "SimPO", "kto": "KTO", "grpo": "GRPO", "jsd": "JSD + CE"}
COMPARED = {"liger[cuda]": "liger-ops", "liger-kernel": "liger-kernel", "torch eager": "torch eager"}


def color(name):
    family = max((key for key in COLORS if name.startswith(key)), key=len, default=None)
    return COLORS.get(family, "black")


def shown(records):
    """The record in the figure of an op: the first of forward and backward together, else the first device
    record."""
    of_device = [record for record in records if record["kind"] == "device"] or records
    whole = [record for record in of_device if "forward and backward" in record["work"]]
    return (whole or of_device)[0]


def is_line(provider):
    """True if a ceiling is drawn as a line: it does only a part of the work, so its memory is not
    comparable."""
    return provider["group"] == "ceiling" and not provider.get("peak_mib")


def _dominated(name, measured):
    """True if another variant of the same backend is at least as fast and as small as this one of liger, such
    as "liger[cuda] small". The variant without suffix is always shown."""
    backend = name.partition("]")[0]
    if measured[name]["group"] != "ours" or name == backend + "]":
        return False
    mine = time_of(measured[name]), measured[name].get("peak_mib") or 0.0
    others = [
        (time_of(p), p.get("peak_mib") or 0.0)
        for n, p in measured.items()
        if n != name and n.startswith(backend) and p["group"] == "ours"
    ]
    return any(time <= mine[0] and mib <= mine[1] for time, mib in others)


def _measured(record):
    return {n: p for n, p in record["providers"].items() if p["status"] in ("ok", "wrong")}


def _label(name):
    """Not "liger", which readers take for liger-kernel."""
    return name.replace("liger[", "liger-ops[", 1)


def group_of(record, label, names=None):
    """The bars of a record: the series of ``{name: series}`` in this order, or of all providers, fastest
    first."""
    measured = _measured(record)
    ceiling = next((n for n in record["ceilings"] if n in measured and is_line(measured[n])), None)
    if names is None:
        kept = [n for n, p in measured.items() if not is_line(p) and not _dominated(n, measured)]
        kept.sort(key=lambda n: time_of(measured[n]))
        names = {n: _label(n) + ("" if measured[n]["status"] == "ok" else " (wrong result)") for n in kept}
    bars = [
        Bar(series, color(name), time_of(measured[name]), measured[name].get("peak_mib"))
        for name, series in names.items()
        if name in measured
    ]
    return Group(label, bars, ceiling, ceiling and time_of(measured[ceiling]))


def message(record):
    """The title: speed and memory of liger relative to liger-kernel, or a neutral title without such a
    result."""
    contests = [c for c in record["contests"] if c["baseline"].startswith("liger-kernel")]
    line = judge(record, contests[0]) if contests else None
    if line is None:
        return f"{record['work']}: how long, and how much memory?"
    text = f"{record['work']}: {line['speedup']:.2f}x the speed of {line['baseline']}"
    if line["no_more_memory"] is None:
        return text
    more = line["ours_mib"] - line["baseline_mib"]
    if abs(more) <= SAME_MEMORY_MIB:
        return f"{text}, the same memory"
    amount = f"{abs(more):.0f} MiB" if abs(more) < 1024 else f"{abs(more) / 1024:.1f} GiB"
    return f"{text}, {amount} {'more' if more > 0 else 'less'}"


def source(*facts):
    """Device, dtype and commits of runs, for the line below the title."""
    commits = dict.fromkeys((f["commit"] or "unknown commit")[:7] for f in facts)
    dtype = facts[0]["dtype"].removeprefix("torch.")
    return f"{facts[0]['device']}, {dtype}, {', '.join(commits)}"


def picture(op, records, facts):
    """The figure of an op."""
    time = "host time, us" if shown(records)["kind"] == "host" else "device time, ms"
    if op in SEVERAL and len(records) > 1:
        groups = [
            group_of(record, LABELS.get(record["work"], record["work"]), COMPARED) for record in records
        ]
        groups = [group for group in groups if group.bars]
        if groups:
            sizes = records[0]["name"].partition(" ")[2]
            title = "A loss and its gradients: how long, and how much memory?"
            return draw(groups, title, f"{sizes}, {source(facts)}", time)
    record = shown(records)
    return draw([group_of(record, None)], message(record), f"{record['name']}, {source(facts)}", time)


def plot(result, stem):
    """One PNG per op beside ``stem``, a path without suffix; returns the paths."""
    paths = []
    for op in dict.fromkeys(record["op"] for record in result["rows"] if record["contests"]):
        records = [record for record in result["rows"] if record["op"] == op]
        figure = picture(op, records, result["environment"])
        paths.append(stem.with_name(f"{stem.name}-{op}.png"))
        save(figure, paths[-1])
    return paths
