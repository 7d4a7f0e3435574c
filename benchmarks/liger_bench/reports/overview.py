# SPDX-License-Identifier: BSD-3-Clause
"""Pictures of the time and the memory of the most common ops."""

import statistics
from dataclasses import replace

from .chart import Bar, Group, draw
from .verdict import time_of

# The colour-blind safe palette of Okabe and Ito.
COLORS = {"liger-ops": "#0072B2", "liger-kernel": "#D55E00", "torch eager": "#777777"}


def _row(name, ours, theirs):
    return name, {ours: "liger-ops", theirs: "liger-kernel", "torch eager": "torch eager"}


# Label -> (row, its providers). NOTE says where liger-ops and liger-kernel do not do the same work.
OVERVIEW = {
    "fused_linear_ce\n16384 x 4096 x 128256": _row(
        "fused_linear_ce 16384x4096x128256", "liger[cuda]", "liger-kernel fp32 sum"
    ),
    "DPO\n8 x 1024 tokens": _row("dpo 8x1024x4096x128256", "liger[cuda]", "liger-kernel"),
    "GRPO\n8 x 1024 tokens": _row("grpo 8x1024x4096x128256", "liger[cuda]", "liger-kernel"),
    "cross_entropy\n8192 x 128256": _row(
        "cross_entropy forward and backward 8192x128256", "liger[cuda] inplace", "liger-kernel"
    ),
    "rms_norm\n16384 x 4096": _row(
        "rms_norm forward and backward 16384x4096", "liger[cuda]", "liger-kernel keeping dy"
    ),
    "rope\n4 x 32 + 8 heads x 4096": _row(
        "rope forward and backward q(4,32,4096,128) k(4,8,4096,128)", "liger[cuda] inplace", "liger-kernel"
    ),
    "swiglu\n16384 x 14336": _row(
        "swiglu forward and backward 16384x14336", "liger[cuda] inplace", "liger-kernel"
    ),
}
NOTE = (
    "dW is summed in float32, except by DPO and GRPO of liger-kernel, which sum it in bfloat16; rms_norm keeps "
    "its upstream gradient; cross_entropy, rope and swiglu may write over their inputs."
)
TIME = "device time, liger-kernel = 1; ms at the bars"


def _is_line(provider):
    """True if a ceiling is drawn as a line: it does only a part of the work, so its memory is not
    comparable."""
    return provider["group"] == "ceiling" and not provider.get("peak_mib")


def _group(record, label, names):
    """The bars of a record: the series of ``{name: series}`` in this order."""
    measured = {n: p for n, p in record["providers"].items() if p["status"] in ("ok", "wrong")}
    ceiling = next((n for n in record["ceilings"] if n in measured and _is_line(measured[n])), None)
    bars = [
        Bar(series, COLORS[series], time_of(measured[name]), measured[name].get("peak_mib"))
        for name, series in names.items()
        if name in measured
    ]
    return Group(label, bars, ceiling, ceiling and time_of(measured[ceiling]))


def _source(*facts):
    """Device, dtype and commits of runs, for the line below the title."""
    commits = dict.fromkeys((f["commit"] or "unknown commit")[:7] for f in facts)
    dtype = facts[0]["dtype"].removeprefix("torch.")
    return f"{facts[0]['device']}, {dtype}, {', '.join(commits)}"


def overview(results):
    """The figures of the rows of OVERVIEW, each from the first run with that row: time, and memory."""
    groups, facts = [], []
    for label, (name, providers) in OVERVIEW.items():
        for result in results:
            record = next((r for r in result["rows"] if r["name"] == name), None)
            if record is not None:
                groups.append(_group(record, label, providers))
                facts.append(result["environment"])
                break
    if not groups:
        return {}
    times = [{bar.series: bar.time for bar in group.bars} for group in groups]
    speedups = [
        t["liger-kernel"] / t["liger-ops"] for t in times if {"liger-kernel", "liger-ops"} <= t.keys()
    ]
    title = "How long do forward and backward take?"
    if speedups:
        # The median: one row with a slow peer must not carry the title.
        title = f"Forward and backward: {statistics.median(speedups):.2f} times the speed of liger-kernel (median)"
    note = f"{NOTE} {_source(*facts)}"
    timed = [Group(group.label, [replace(bar, mib=None) for bar in group.bars]) for group in groups]
    return {
        "overview": draw(timed, title, note, TIME, reference="liger-kernel"),
        "overview-memory": draw(groups, "How much memory do forward and backward take?", note),
    }
