# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark suite: ``python benchmarks/run.py --help``, and docs/lab/README.md."""

import sys

from liger_bench.cli import main

sys.exit(main())
