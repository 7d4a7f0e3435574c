# SPDX-License-Identifier: BSD-3-Clause
"""A run as Markdown: the goals, the verdict, and one table per row."""

from .verdict import FASTEST_PEER, time_of

# Ops whose providers are also compared in one table, and the ceiling that its times are relative to.
COMPARED = {"heads": "three GEMMs"}
WORDS = {True: "yes", False: "no", None: "-"}


def number(value, digits=3):
    return "-" if value is None else f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:.0f}"


def _table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _device_cells(record, provider):
    time = provider["ms"]
    speed = f"{record['nbytes'] / time['median'] / 1e9:.2f}" if record["nbytes"] else "-"
    ratios = [provider["ratios"].get(name) for name in record["ceilings"]]
    errors = {
        name: "not finite" if value is None else f"{value:.1e}"
        for name, value in provider.get("errors", {}).items()
    }
    peak = provider.get("peak_mib")
    return [
        number(time["median"], 4),
        f"{number(time['q25'], 4)} - {number(time['q75'], 4)}",
        speed,
        *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
        "-" if peak is None else f"{peak:.0f}",
        number(provider.get("latency_ms", {}).get("median"), 4),
        ", ".join(f"{name} {value}" for name, value in errors.items()) or "-",
    ]


def _row_table(record):
    host = record["kind"] == "host"
    ceilings = [f"x {name}" for name in record["ceilings"]]
    header = ["provider", "host us", "quartiles"] if host else [
        "provider", "ms", "quartiles", "TB/s", *ceilings, "peak MiB", "latency ms", "relative error",
    ]  # fmt: skip
    rows = []
    for name, provider in record["providers"].items():
        if provider["status"] == "missing":
            continue
        if provider["status"] == "failed":
            rows.append([name, f"failed: {_reason(provider, 160)}", *[""] * (len(header) - 2)])
            continue
        label = name if provider["status"] == "ok" else f"{name} (WRONG RESULT)"
        if host:
            time = provider["host_us"]
            rows.append([label, number(time["median"]), f"{number(time['q25'])} - {number(time['q75'])}"])
        else:
            rows.append([label, *_device_cells(record, provider)])
    return f"### {record['name']}\n\n{_table(header, rows)}"


def _reason(provider, length):
    return provider["reason"].strip().splitlines()[0][:length].replace("|", "\\|")


def _compared_cell(provider, ceiling):
    if provider is None:  # it does not take the options of this row
        return ""
    if provider["status"] == "missing":
        return "not installed"
    if provider["status"] == "failed":
        return f"did not run: {_reason(provider, 80)}"
    if provider["status"] == "wrong":
        return _reason(provider, 80)
    peak = provider.get("peak_mib")
    ratio = f"{provider['ratios'].get(ceiling, float('nan')):.2f}"
    return ratio if peak is None else f"{ratio}, {peak:.0f}"


def _compared_table(records, ceiling):
    """One line per row, one column per peer that is installed: time relative to a ceiling, and peak MiB."""
    peers, missing = {}, {}
    for record in records:
        for name, provider in record["providers"].items():
            if provider["group"] in ("liger-kernel", "other"):
                (missing if provider["status"] == "missing" else peers).setdefault(name)
    rows = []
    for record in records:
        providers = record["providers"]
        mine = [p for p in providers.values() if p["group"] == "ours"]
        right = [p for p in mine if p["status"] == "ok"]
        best = min(right, key=time_of) if right else next(iter(mine), None)
        limit = providers.get(ceiling, {}).get("ms", {}).get("median")
        cells = [_compared_cell(p, ceiling) for p in (best, *map(providers.get, peers))]
        rows.append([record["name"], number(limit, 4), *cells])
    text = f"Times relative to {ceiling}, and peak MiB beyond the inputs."
    absent = [name for name in missing if name not in peers]
    if absent:
        text += f" Not installed: {', '.join(absent)}."
    return f"{text}\n\n{_table(['row', f'{ceiling}, ms', 'liger', *peers], rows)}"


def _goal_table(lines):
    rows = [[l["row"], l["asked"], l["provider"], l["measured"], f"**{WORDS[l['met']]}**"] for l in lines]
    return _table(["row", "asked", "ours", "measured", "met"], rows)


def _verdict_table(lines):
    rows = []
    for line in lines:
        latency = line["latency_speedup"]
        rows.append([
            line["row"], f"{line['baseline']}" + (f" ({line['label']})" if line["label"] else ""), line["ours"],
            f"{number(line['ours_time'], 4)} {line['unit']}", f"{number(line['baseline_time'], 4)} {line['unit']}",
            f"{line['speedup']:.2f}x", "-" if latency is None else f"{latency:.2f}x",
            "-" if line["ours_mib"] is None else f"{line['ours_mib']:.0f} / {line['baseline_mib']:.0f}",
            WORDS[line["faster"]], WORDS[line["no_more_memory"]], f"**{WORDS[line['wins']]}**",
        ])  # fmt: skip
    header = [
        "row", "against", "ours best", "ours", "theirs", "speed", "speed with host", "MiB ours / theirs", "faster",
        "no more memory", "faster and no more memory",
    ]  # fmt: skip
    return _table(header, rows)


def markdown(result):
    facts = [f"{key} {value}" for key, value in result["environment"].items() if value not in (None, False)]
    parts = ["# Benchmark results", "; ".join(facts)]
    goals = result["goals"]
    if goals:
        met = sum(line["met"] is True for line in goals)
        parts += [f"## Targets: {met} of {len(goals)} met", _goal_table(goals)]
    peers = [line for line in result["verdict"] if line["label"] == FASTEST_PEER]
    others = [line for line in result["verdict"] if line["label"] != FASTEST_PEER]
    for title, lines in (("Against liger-kernel", others), (f"Against {FASTEST_PEER}", peers)):
        if lines:
            won = sum(line["wins"] for line in lines)
            parts += [f"## {title}: {won} of {len(lines)} lines won", _verdict_table(lines)]
    for op in dict.fromkeys(record["op"] for record in result["rows"]):
        records = [record for record in result["rows"] if record["op"] == op]
        compared = [_compared_table(records, COMPARED[op])] if op in COMPARED else []
        parts += [f"## {op}", *compared, *map(_row_table, records)]
    return "\n\n".join(parts) + "\n"
