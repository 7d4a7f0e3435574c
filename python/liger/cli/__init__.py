"""The ``liger`` command: one file per subcommand.

Each has ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit code.
"""

import argparse

from . import bench, demo, info, plan

COMMANDS = {
    "info": (info, "versions, devices, what was built, and which backend serves each op"),
    "plan": (plan, "how fused_linear_ce cuts a batch into chunks, and the memory that takes"),
    "bench": (bench, "time, memory and host time of every op beside its peers, on this machine's GPU"),
    "demo": (demo, "train a Llama with and without liger on this machine and compare"),
}


def main(argv=None):
    """Runs ``liger`` with the given arguments (default: those of the process); returns the exit code."""
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
    arguments = parser.parse_args(argv)
    return COMMANDS[arguments.command][0].run(arguments)
