# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark suite behind ``benchmarks/run.py``; docs/lab/README.md says what it measures and how.

It is run from a checkout and is not part of the wheel.
"""

from pathlib import Path

# The modules of ops/ with a function rows(options); the others are their parts.
OPS = tuple(
    file.stem for file in sorted(Path(__file__).parent.glob("ops/*.py")) if "\ndef rows(" in file.read_text()
)
