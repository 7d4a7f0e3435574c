# SPDX-License-Identifier: BSD-3-Clause
"""``python -m liger_cli``: the ``liger`` command, for environments without the script on PATH."""

import sys

from . import main

sys.exit(main())
