"""``liger bench``: runs the benchmark suite, which is in benchmarks/ of a checkout and not in the wheel.

The suite defines arguments and exit codes; the exit code is 2 if there is no suite.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

SUMMARY = "time, memory and host time of every op beside its peers, on this machine's GPU (in a checkout)"
VARIABLE = "LIGER_BENCHMARKS"


def _holds_suite(folder: Path) -> bool:
    return (folder / "liger_bench" / "cli.py").is_file()


def suite_folder() -> Path | None:
    """The folder of the suite, or None.

    LIGER_BENCHMARKS, if set; else the first that contains the suite of: benchmarks/ in the current folder or a parent
    of it, benchmarks/ of the checkout of an editable install.
    """
    if given := os.environ.get(VARIABLE):
        folders = [Path(given).resolve()]
    else:
        here = Path.cwd()
        sources = Path(__file__).resolve().parents[2]
        folders = [folder / "benchmarks" for folder in (here, *here.parents, sources)]
    return next((folder for folder in folders if _holds_suite(folder)), None)


def _missing_suite() -> str:
    given = os.environ.get(VARIABLE)
    reason = (
        f"no benchmark suite in {given}, which {VARIABLE} names"
        if given
        else "the benchmark suite is not part of the installed package"
    )
    return (
        f"{reason}. Clone the repository of liger-ops, and in its folder type\n\n"
        "    liger bench\n\n"
        f"From any other folder: {VARIABLE}=/path/to/the/clone/benchmarks liger bench"
    )


def main(argv: list[str]) -> int:
    """Runs the suite with these arguments; returns its exit code."""
    folder = suite_folder()
    if folder is None:
        if {"-h", "--help"} & set(argv):
            print(
                f"usage: liger bench [options] [op ...]\n\nMeasures {SUMMARY}.\n\nNot here: {_missing_suite()}"
            )
            return 0
        print(f"liger bench: {_missing_suite()}", file=sys.stderr)
        return 2
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("liger_bench.cli").main(argv)
