"""``liger models``: what liger.patch replaces in the models of transformers, and whether it is equal."""

from __future__ import annotations

import argparse
import sys

from ._quiet import quiet_patching


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
    # A dependency of transformers.
    from tqdm import tqdm

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
