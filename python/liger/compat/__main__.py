# SPDX-License-Identifier: BSD-3-Clause
"""``python -m liger.compat train.py ...`` and ``python -m liger.compat -m package.module ...``."""

import runpy
import sys
from pathlib import Path

_USAGE = "usage: python -m liger.compat (SCRIPT | -m MODULE) [ARGUMENT ...]"


def main() -> None:
    """Runs the script or module of the command line as ``__main__``, with liger_kernel importable."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return
    if not arguments or arguments == ["-m"]:
        sys.exit(_USAGE)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        # As python -m: the current folder, which this process already has in front of sys.path.
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0])
    if not script.exists():
        sys.exit(f"python -m liger.compat: there is no file {script}")
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
