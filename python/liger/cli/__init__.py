"""The ``liger`` command: one file per subcommand.

Each file has ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit code. bench has ``main(argv)``
instead: it passes all arguments to the benchmark suite.
"""

from __future__ import annotations

import argparse
import os
import sys

from . import bench, demo, info, models, plan

COMMANDS = {
    "info": (info, "versions, devices, what was built, and which backend serves each op"),
    "plan": (plan, "memory of the lm_head and its chunks, or of the activations of a model"),
    "models": (models, "what liger.patch replaces in every model of transformers, and whether it is equal"),
    "demo": (demo, "train a Llama with and without liger on this machine and compare"),
}


BENCH = "time, memory and host time of every op beside its peers, on this machine's GPU (in a checkout)"


def main(argv: list[str] | None = None) -> int:
    """Runs ``liger`` with the given arguments (default: those of the process); returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["bench"]:
        return bench.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="liger", description="Memory-saving training ops for large language models."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, summary) in COMMANDS.items():
        module.add_arguments(
            subparsers.add_parser(
                name,
                help=summary,
                description=module.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    subparsers.add_parser("bench", help=BENCH, add_help=False)
    arguments = parser.parse_args(argv)
    try:
        code = COMMANDS[arguments.command][0].run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the pipe, such as head, has what it wants. The interpreter flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
