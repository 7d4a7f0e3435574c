# SPDX-License-Identifier: BSD-3-Clause
"""The ``liger`` command: its arguments and help, which need neither torch nor the package liger.

``import liger`` imports torch, which takes seconds. So the help is apart from the commands themselves: those
are the modules of ``liger.cli``, imported when one runs.
"""

import argparse
import difflib
import importlib
import importlib.metadata
import os
import sys

from .commands import COMMANDS


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        print(f"liger {importlib.metadata.version('liger-ops')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="liger", description="Memory-saving training ops for large language models."
    )
    parser.add_argument("-V", "--version", action=_Version, nargs=0, help="print the version")
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    for name, command in COMMANDS.items():
        command.add_arguments(
            subparsers.add_parser(
                name,
                help=command.summary,
                description=command.description,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs ``liger`` with the given arguments (default: the arguments of the process); returns the exit
    code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    if not argv:
        parser.print_help()
        return 0
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, 1)
        meant = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(COMMANDS)}"
        parser.error(f"unknown command '{argv[0]}', {meant}")
    arguments = parser.parse_args(argv)
    try:
        importlib.import_module("liger")
    # An environment variable with an invalid value, or two copies.
    except (ValueError, RuntimeError) as error:
        print(f"liger: {error}", file=sys.stderr)
        return 2
    try:
        code = importlib.import_module(f"liger.cli.{arguments.command}").run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as head, has what it wants; the interpreter flushes stdout again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
