# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark suite behind ``benchmarks/run.py``; docs/lab/README.md says what it measures and how.

It is run from a checkout and is not part of the wheel.
"""

from pathlib import Path

# The modules bench_<op>.py with a function rows(options); the others are programs of their own.
OPS = tuple(
    file.stem.removeprefix("bench_")
    for file in sorted(Path(__file__).parent.glob("bench_*.py"))
    if "\ndef rows(" in file.read_text()
)
