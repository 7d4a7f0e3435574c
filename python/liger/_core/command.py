"""The ``liger`` command, as far as ``import liger`` must know it: an invalid environment variable raises there, before
any code of the command runs."""

from __future__ import annotations

import sys
from pathlib import Path


def is_command() -> bool:
    """Whether this process is the script ``liger`` or ``python -m liger.cli``."""
    name = sys.argv[0] if sys.argv else ""
    # "-m": Python imports the packages of a module before it knows the name of the file.
    return Path(name).stem == "liger" or (name == "-m" and "liger.cli" in sys.orig_argv)


def refuse_in_command(message: str) -> None:
    """In the command: ends the process with this line and exit code 2, as a wrong argument does. Elsewhere: nothing."""
    if is_command():
        print(f"liger: {message}", file=sys.stderr)
        sys.exit(2)
