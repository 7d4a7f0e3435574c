"""What liger.patch replaces in every causal and image-text model of transformers, and whether it is equal.

Builds each model type tiny and random on the CPU, in a process of its own, and compares it with a patched copy:
loss and gradients, in training with dropout, checkpointing, images, packed positions and more. docs/models.md is the
result for all types. The exit code is 1 if a patched model gives other numbers.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ._arguments import positive
from ._quiet import quiet_patching


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types, such as llama; default: all")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the page to this file, not to stdout"
    )
    parser.add_argument("--jobs", type=positive(int), default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--limit-s", type=positive(float), default=300.0, help="seconds for one model class")


def run(arguments: argparse.Namespace) -> int:
    if arguments.write is not None:
        is_folder = arguments.write.is_dir()
        if is_folder or not arguments.write.absolute().parent.is_dir():
            why = "is a folder" if is_folder else "no such folder"
            print(f"liger models: --write {arguments.write}: {why}", file=sys.stderr)
            return 2
    try:
        from ..transformers.scan import models, runner, table
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        print("liger models needs transformers: pip install 'liger-ops[transformers]'", file=sys.stderr)
        return 2
    classes = models.model_classes()
    unknown = sorted(set(arguments.types) - {model_type for model_type, _ in classes})
    if unknown:
        print(f"liger models: transformers has no causal model of type {', '.join(unknown)}", file=sys.stderr)
        return 2
    if arguments.types:
        classes = [pair for pair in classes if pair[0] in arguments.types]
    with quiet_patching():
        reports = runner.scan(classes, arguments.jobs, arguments.limit_s, progress=_progress)
    page = table.render(reports)
    if arguments.write is None:
        print(page)
    else:
        arguments.write.write_text(page)
    return int(any(_differs(report) for report in reports))


def _progress(report):
    found = report.get("not built") or "; ".join(_differs(report)) or f"loss: {report['loss']}"
    print(f"{report['type']} {report['class']}: {found}", file=sys.stderr, flush=True)


def _differs(report):
    return [f"{name} {why}" for name, why in report.get("checks", {}).items() if why.startswith("differs")]
