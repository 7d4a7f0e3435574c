"""``python -m liger.cli``: the ``liger`` command where its script is not on PATH."""

import sys

from . import main

sys.exit(main())
