# SPDX-License-Identifier: BSD-3-Clause
"""The report of ``devices/vocabulary.py``: one table."""

ONE, SHARDED = "one device", "sharded"
SPEED_GOAL = 0.92


def _met(value):
    return {True: "met", False: "missed", None: "not measured"}[value]


def markdown(facts, records):
    ranks = facts["ranks"]
    known = (f"{name} {value}" for name, value in facts.items() if value not in (None, False))
    lines = [f"# The lm_head with its vocabulary sharded over {ranks} devices", "", "; ".join(known), ""]
    lines += [
        f"| row | one device, ms | {ranks} devices, ms | of {ranks} x the speed of one | goal >= {SPEED_GOAL} "
        "| x GEMMs of a shard | peak MiB of one | peak MiB of each | goal: no more | workspace MiB of one | of each |"
    ]
    lines += ["|---|" + "---|" * 10]
    for record in records:
        name = record["name"]
        if record["status"] == "wrong":
            name += f" (WRONG, error {record['error']:.2g})"
        if "contestants" not in record:
            lines.append(f"| {name} | {record['status']} |" + " |" * 9)
            continue
        one, sharded = (record["contestants"][n] for n in (ONE, SHARDED))
        lines.append(
            f"| {name} | {one['ms']:.2f} | {sharded['ms']:.2f} | {record['speed']:.3f} | {_met(record['speed_met'])} "
            f"| {record['of_gemms']:.3f} | {one['peak_mib']:.0f} | {sharded['peak_mib']:.0f} "
            f"| {_met(record['memory_met'])} | {one['workspace_mib']:.0f} | {sharded['workspace_mib']:.0f} |"
        )
    return "\n".join(lines) + "\n"
