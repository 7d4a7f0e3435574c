# SPDX-License-Identifier: BSD-3-Clause
"""Comparison of speed and memory between liger and its peers, and errors of providers of liger."""

# As a baseline: the fastest correct peer of a row.
FASTEST_PEER = "the fastest peer"
# Smaller differences count as equal memory: rounding of allocation sizes, and a few statistics per row.
SAME_MEMORY_MIB = 1.0


def time_of(provider):
    """The compared value: device time in ms, or host time in us."""
    return (provider.get("ms") or provider.get("host_us") or {}).get("median")


def _no_more_memory(mine, theirs):
    if mine is None or theirs is None:
        return None
    return mine <= theirs + SAME_MEMORY_MIB


def _baseline(record, name):
    """The name of the provider that liger is compared with, or None if it has no result."""
    right = {n: p for n, p in record["providers"].items() if p["status"] == "ok"}
    if name != FASTEST_PEER:
        return name if name in right else None
    peers = [n for n, p in right.items() if p["group"] in ("liger-kernel", "other")]
    return min(peers, key=lambda n: time_of(right[n]), default=None)


def judge(record, contest):
    """One line of the verdict, or None if liger or the baseline has no result in the row.

    Ours is the fastest of those that are right and take no more memory; if none is both faster and as small,
    the fastest of all.
    """
    against = _baseline(record, contest["baseline"])
    named = contest["ours"]
    mine = {
        name: provider
        for name, provider in record["providers"].items()
        if provider["group"] == "ours" and provider["status"] == "ok" and (not named or name in named)
    }
    if against is None or not mine:
        return None
    baseline = record["providers"][against]
    theirs, limit = time_of(baseline), baseline.get("peak_mib")

    def rank(name):
        wins = (
            time_of(mine[name]) < theirs and _no_more_memory(mine[name].get("peak_mib"), limit) is not False
        )
        return not wins, time_of(mine[name])

    best = min(mine, key=rank)
    fits = _no_more_memory(mine[best].get("peak_mib"), limit)
    latencies = [p.get("latency_ms", {}).get("median") for p in (mine[best], baseline)]
    return {
        "row": record["name"],
        "label": FASTEST_PEER if contest["baseline"] == FASTEST_PEER else contest["label"],
        "ours": best,
        "baseline": against,
        "unit": "us" if record["kind"] == "host" else "ms",
        "ours_time": time_of(mine[best]),
        "baseline_time": theirs,
        "speedup": theirs / time_of(mine[best]),
        "latency_speedup": latencies[1] / latencies[0] if None not in latencies else None,
        "ours_mib": mine[best].get("peak_mib"),
        "baseline_mib": limit,
        "faster": time_of(mine[best]) < theirs,
        "no_more_memory": fits,
        "wins": time_of(mine[best]) < theirs and fits is not False,
    }


def verdict(records):
    """The lines of all comparisons with results on both sides."""
    lines = [judge(record, contest) for record in records for contest in record["contests"]]
    return [line for line in lines if line is not None]


def faults(records):
    """Descriptions of errors of the providers of liger."""
    return [
        f"{record['name']}: {name} {provider['status']}: {provider['reason']}"
        for record in records
        for name, provider in record["providers"].items()
        if provider["group"] in ("ours", "op alone") and provider["status"] != "ok"
    ]
