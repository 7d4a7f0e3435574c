"""``python benchmarks/run.py ...`` is ``liger bench ...``: see docs/performance/README.md."""

import sys

from liger.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
