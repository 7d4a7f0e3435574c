"""``python benchmarks/run.py ...`` is ``liger bench ...``: see docs/lab/README.md."""

import sys

from liger_bench.cli import main

sys.exit(main())
