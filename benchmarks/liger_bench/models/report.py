# SPDX-License-Identifier: BSD-3-Clause
"""The report of ``bench_model``: one table per shape."""

import json

GIB = 1024**3


def shape_of(record):
    return f"B={record['batch']} T={record['sequence']}"


def tokens_per_second(record, provider):
    """Of all ranks; batch and peak memory are per rank."""
    tokens = record["batch"] * record["sequence"] * record.get("ranks", 1)
    return tokens / provider["ms"]["median"] * 1e3


def _lines(record):
    for name, provider in record["providers"].items():
        if provider["status"] == "missing":
            continue
        if "ms" not in provider:
            yield f"| {name} | failed: {provider['reason'].splitlines()[0][:160]} | | | | | |"
            continue
        ms, peak, idle = provider["ms"], provider["peak_bytes"], provider.get("idle_bytes", 0)
        yield (
            f"| {name}{'' if provider['status'] == 'ok' else ' (WRONG LOSS)'} | {ms['median']:.1f} "
            f"| {ms['q25']:.1f} - {ms['q75']:.1f} | {provider['host_ms']['median']:.1f} "
            f"| {tokens_per_second(record, provider) / 1e3:.1f} | {'-' if peak is None else f'{peak / GIB:.2f}'} "
            f"| {'-' if peak is None or not idle else f'{(peak - idle) / GIB:.2f}'} |"
        )


def verdict(record):
    """One line: the fastest contestant with liger against the fastest and the smallest other; None without
    both."""
    measured = {n: p for n, p in record["providers"].items() if p["status"] == "ok"}
    mine = {n: p for n, p in measured.items() if p["group"] == "ours"}
    others = {n: p for n, p in measured.items() if p["group"] != "ours"}
    if not mine or not others:
        return None

    def speed(name):
        return tokens_per_second(record, measured[name])

    best, rival = max(mine, key=speed), max(others, key=speed)
    line = f"{best}: {speed(best) / speed(rival):.3f}x the tokens/s of {rival}"
    if measured[best]["peak_bytes"] is not None:
        small = min(others, key=lambda name: measured[name]["peak_bytes"])
        line += f", {measured[best]['peak_bytes'] / measured[small]['peak_bytes']:.3f}x the memory of {small}"
    return line


def markdown(facts, records, model, checkpointing=True):
    """The environment and one table per shape."""
    known = (f"{name} {value}" for name, value in facts.items() if value not in (None, False))
    without = "" if checkpointing else ", without checkpointing"
    ranks = max((record.get("ranks", 1) for record in records), default=1)
    sharded = f", FSDP2 on {ranks} ranks; batch, host time and peak of one rank" if ranks > 1 else ""
    parts = [f"# Training steps of {model}'s shape{without}{sharded}", "; ".join(known)]
    header = (
        "| | ms per step | quartiles | host ms | thousand tokens/s | peak GiB | above weights and optimizer |\n"
        "|---|---|---|---|---|---|---|"
    )
    for record in records:
        parts += [f"## {shape_of(record)}", "\n".join([header, *_lines(record)])]
        if (line := verdict(record)) is not None:
            parts.append(line)
        plans = [(n, p["plan"]) for n, p in record["providers"].items() if p.get("plan")]
        if plans:
            parts.append("\n".join(f"- {name}: {plan}" for name, plan in plans))
    return "\n\n".join(parts) + "\n"


def write(path, facts, records, size):
    """The results as JSON, and as Markdown beside it."""
    named = {"model": size.name, "checkpointing": size.checkpointing}
    path.write_text(json.dumps({"environment": facts, **named, "rows": records}, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(facts, records, **named))
