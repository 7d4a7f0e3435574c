# SPDX-License-Identifier: BSD-3-Clause
"""Results of several runs as one: rows measured a few at a time, or peers that are not installed together."""

RAN = ("ok", "wrong")


def _joined(first, second):
    """A row of two runs. Of a provider that both have, the first result that ran counts."""
    providers = dict(first["providers"])
    for name, provider in second["providers"].items():
        if name not in providers or (providers[name]["status"] not in RAN and provider["status"] in RAN):
            providers[name] = provider
    # Ceilings stay last.
    ordered = sorted(providers, key=lambda name: name in first["ceilings"])
    return {**first, "providers": {name: providers[name] for name in ordered}}


def merged(results):
    """The results of runs on one kind of device, with the rows of all. Times of providers of different runs
    are of different moments and maybe of different devices of that kind, so ratios to ceilings are what to
    compare."""
    facts, rows = {}, {}
    for result in results:
        theirs = result["environment"]
        for name in ("device", "size", "dtype"):
            if facts and theirs[name] != facts[name]:
                raise ValueError(f"runs of different {name}: {facts[name]} and {theirs[name]}")
        # The facts of the first run, and the versions of peers that it did not have.
        facts = {**theirs, **{name: value for name, value in facts.items() if value is not None}}
        for row in result["rows"]:
            known = rows.get(row["name"])
            rows[row["name"]] = row if known is None else _joined(known, row)
    runs = [f"{r['environment']['date']} at {(r['environment']['commit'] or 'unknown')[:7]}" for r in results]
    if len(runs) > 1:
        facts["runs"] = runs
    return {**results[0], "environment": facts, "rows": list(rows.values())}
