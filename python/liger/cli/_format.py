# SPDX-License-Identifier: BSD-3-Clause
"""Formatting of byte counts and tables for terminal output."""


def human_bytes(count):
    """1536 -> '1.5 KiB'; powers of 1024."""
    if abs(count) < 1024:
        return f"{count} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def table(rows, header=None):
    """Rows of strings as aligned text: the first column to the left, the others to the right."""
    lines = [header, *rows] if header else list(rows)
    widths = [max(len(row[column]) for row in lines) for column in range(len(lines[0]))]
    text = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        )
        for row in lines
    ]
    if header:
        text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in text)
