# SPDX-License-Identifier: BSD-3-Clause
"""The report of ``devices/sharded_mlp.py``: one table."""


def markdown(facts, framework, records):
    known = (f"{name} {value}" for name, value in facts.items() if value not in (None, False))
    lines = [f"# A gated MLP under {framework}, {facts['ranks']} GPUs", "", "; ".join(known), ""]
    lines += [
        "| tokens per rank | | ms | of regular | peak MiB | of regular | with weights and inputs, MiB |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for record in records:
        regular = record["contestants"]["regular"]
        for name, result in record["contestants"].items():
            if result["status"] == "failed":
                lines.append(f"| {record['tokens']} | {name} | failed: {result['reason']} | | | | |")
                continue
            wrong = "" if result["status"] == "ok" else f" (WRONG, error {result['error']:.2g})"
            lines.append(
                f"| {record['tokens']} | {name}{wrong} | {result['ms']:.2f} | {result['ms'] / regular['ms']:.3f} "
                f"| {result['peak_mib']:.0f} | {result['peak_mib'] / regular['peak_mib']:.2f} "
                f"| {result['absolute_mib']:.0f} |"
            )
    return "\n".join(lines) + "\n"
