# SPDX-License-Identifier: BSD-3-Clause
"""What liger.patch replaces in every causal and image-text model of transformers, and whether it is equal.

Builds each model type tiny and random on the CPU, in a process of its own, and compares it with a patched
copy: loss and gradients, in training with dropout, checkpointing, images, packed positions and more.
docs/reference/models.md is the result for all types. The exit code is 1 if a patched model gives other
numbers.
"""

import argparse
import os
import sys
from pathlib import Path

from tqdm import tqdm

from liger.cli._quiet import quiet_patching
from liger_cli.arguments import positive

from . import models, runner, table


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m model_scan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types, such as llama; default: all")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the page to this file, not to stdout"
    )
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for one model class")
    return parser


def main(argv=None):
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.write is not None and not arguments.write.absolute().parent.is_dir():
        parser.error(f"--write {arguments.write}: no such folder")
    classes = models.model_classes()
    unknown = sorted(set(arguments.types) - {model_type for model_type, _ in classes})
    if unknown:
        parser.error(f"transformers has no causal model of type {', '.join(unknown)}")
    if arguments.types:
        classes = [pair for pair in classes if pair[0] in arguments.types]

    def progress(report):
        found = report.get("not built") or "; ".join(_differs(report)) or f"loss: {report['loss']}"
        bar.write(f"{report['type']} {report['class']}: {found}", file=sys.stderr)
        bar.update()

    with quiet_patching(), tqdm(total=len(classes), unit="class", disable=None) as bar:
        reports = runner.scan(classes, arguments.jobs, arguments.limit_s, progress=progress)
    page = table.render(reports)
    if arguments.write is None:
        print(page)
    else:
        arguments.write.write_text(page)
    return int(any(_differs(report) for report in reports))


def _differs(report):
    return [f"{name} {why}" for name, why in report.get("checks", {}).items() if why.startswith("differs")]


if __name__ == "__main__":
    sys.exit(main())
