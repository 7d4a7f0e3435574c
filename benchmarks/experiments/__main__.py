# SPDX-License-Identifier: BSD-3-Clause
"""``python -m experiments E3 E4 --minutes 8 --out DIR``: docs/lab/experiments.md."""

import argparse
import sys
import time
from pathlib import Path

from liger_bench.devices.processes import count_gpus
from liger_bench.environment import CHECKOUT, RESULTS

from . import IMPORTANCE, MODULES, experiment

FOLDER = RESULTS / "experiments"
CACHE = CHECKOUT / "build" / "experiments"


def parser():
    made = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    made.add_argument("names", nargs="*", metavar="E", help=f"of {', '.join(MODULES)}, or all")
    made.add_argument(
        "--minutes", type=float, help="no cell runs longer than that in all (default: no limit)"
    )
    made.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="results (%(default)s)")
    made.add_argument("--only", action="append", default=[], metavar="METHOD", help="repeatable")
    made.add_argument("--sizes", nargs="+", default=[], metavar="SIZE", help="as --list names them")
    made.add_argument("--retry", action="store_true", help="measures cells again that are not ok")
    made.add_argument(
        "--stale",
        action="store_true",
        help="measures missing cells and cells of other code, by importance; of all experiments if none is named",
    )
    made.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU: a test, no measurement")
    made.add_argument("--list", action="store_true", help="names experiments, or cells with their status")
    made.add_argument("--plot", action="store_true", help="measures nothing: tables and pictures of results")
    made.add_argument("--docs", action="store_true", help="measures nothing: tables and pictures of pages")
    made.add_argument(
        "--cache", type=Path, default=CACHE, metavar="DIR", help="tokens of the text (%(default)s)"
    )
    made.add_argument(
        "--parallel", action="store_true", help="a cell on each GPU at a time, instead of one cell"
    )
    made.add_argument(
        "--no-fork", action="store_true", help="starts every process anew instead of forking it"
    )
    return made


def list_cells(run, names, every=False):
    """Prints the experiments with the cells that are to be measured and how long they take; with ``every``
    all of their cells."""
    from . import driver

    total, count = 0.0, 0
    for name in names:
        sheet = driver.Sheet(run, name)
        seconds = sum(cell.gpus * sheet.expected(cell) for cell in sheet.todo)
        total, count = total + seconds, count + len(sheet.todo)
        title = experiment(name).title
        print(f"{name}: {title}, {len(sheet.todo)} of {len(sheet.every)} cells, {seconds:.0f} GPU-seconds")
        for cell in driver.selected(run, name) if every else sheet.todo if run.stale else ():
            status = sheet.result["cells"].get(cell.key, {}).get("status", "missing")
            needs = f"{cell.gpus} x " if cell.gpus > 1 else ""
            alone = ", alone" if cell.alone else ""
            print(f"  {cell.key}: {status}, {needs}{sheet.expected(cell):.0f} s{alone}")
    print(f"{count} cells to measure, about {total / 60:.0f} GPU-minutes")


def main(arguments=None):
    """Returns 0, 2 for wrong arguments; cells that are left are no error."""
    given = parser().parse_args(arguments)
    every = list(IMPORTANCE) if given.stale else list(MODULES)
    names = every if given.names in ([], ["all"]) else given.names
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        print(f"experiments: no {', '.join(unknown)}, expected some of {', '.join(MODULES)}", file=sys.stderr)
        return 2
    if given.docs:
        from . import report

        report.write_docs(given.out)
        report.write_summaries(given.out)
        return 0
    if given.plot:
        from . import report

        for name in names:
            for path in report.write(given.out, name, given.tiny):
                print(f"written: {path}")
        return 0
    measures = not given.list
    if measures and not given.names and not given.stale:
        print("experiments: name the experiments to run, or all; --list names them", file=sys.stderr)
        return 2
    from . import driver

    gpus = count_gpus() if measures else 0
    if measures and not given.tiny and gpus == 0:
        print("experiments: no CUDA device; --tiny runs tiny sizes on the CPU", file=sys.stderr)
        return 2
    limit = float("inf") if given.minutes is None else time.monotonic() + 60 * given.minutes
    run = driver.Run(
        given.out, given.cache, given.tiny, tuple(given.only), tuple(given.sizes), given.retry, given.stale, limit,
        gpus,
        fork=False if given.no_fork else None, parallel=given.parallel,
    )  # fmt: skip
    try:
        if given.list:
            list_cells(run, names, every=bool(given.names) and not given.stale)
        else:
            driver.fill(run, names)
    except ValueError as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
