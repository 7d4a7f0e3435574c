# SPDX-License-Identifier: BSD-3-Clause
"""Every op vs. its peers: forward, backward and both, peak memory, host time, on the GPU of this machine.

Each row is measured in one process, in turns, from cold caches, vs. the ceiling that the machine sets.
The peers that are installed take part: liger-kernel, QuACK, cut-cross-entropy, what torch has. The report
says which of the project's targets were met. It goes to the terminal and, with the figures as JSON, to a file
that --json names.
Exit code: 0, 1 if one of our own kernels failed or gave wrong results, 2 for a wrong argument or without a
GPU.
"""

import argparse
import sys
from pathlib import Path

from . import OPS

PEERS = ("liger-kernel", "quack", "TRL", "unsloth_zoo", "cut-cross-entropy", "torch", "transformers", "none")


def _names(text):
    return tuple(name for name in text.split(",") if name)


def _parser():
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*", metavar="op", help=f"of {', '.join(OPS)} (default: all)")
    parser.add_argument(
        "--heads", action="store_true", help="the lm_heads of current models alone: the same as heads"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="other sizes, one growing at a time: hidden size and tokens 4096 to 16384, vocabulary 40960 to 163840",
    )
    parser.add_argument(
        "--backends",
        type=_names,
        default=("cuda", "triton"),
        help="backends of liger to measure (cuda,triton; and torch, which joins small rows in any case)",
    )
    parser.add_argument(
        "--peers", type=_names, help=f"only peers whose names begin so: {','.join(PEERS)} (default: all)"
    )
    parser.add_argument(
        "--rows",
        action="append",
        default=[],
        metavar="WORDS",
        help="only rows with these words in their names, such as gemma or Qwen3-4B; may be given several times",
    )
    parser.add_argument("--minutes", type=float, help="no row starts after this time")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile as a further peer (slow to start)"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="result file; the others get its name (default: a temporary folder)",
    )
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="tiny sizes on the CPU, torch backend: tests the suite itself",
    )
    return parser


def _complaint(arguments):
    """What is wrong with the arguments, or None."""
    # Not at the top: --help takes no time without torch.
    import torch

    from liger._core.op.backend import BACKENDS

    for kind, given, known in (("op", arguments.ops, OPS), ("backend", arguments.backends, BACKENDS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            return f"unknown {kind} {', '.join(unknown)}, expected some of {', '.join(known)}"
    for name in arguments.peers or ():
        # "torch F.rms_norm" and "liger" are as good as "torch" and "liger-kernel".
        if not any(peer.startswith(name) or name.startswith(peer) for peer in PEERS):
            return f"unknown peer {name}, expected some of {', '.join(PEERS)}"
    if not arguments.self_test and not torch.cuda.is_available():
        return "no CUDA device; --self-test runs tiny sizes on the CPU"
    return None


def main(argv=None):
    """Runs the suite with the given arguments (default: the arguments of the process); returns the exit
    code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(argv)
    if arguments.heads:
        arguments.ops = [*arguments.ops, "heads"]
    complaint = _complaint(arguments)
    if complaint is not None:
        print(f"benchmarks/run.py: {complaint}", file=sys.stderr)
        return 2
    from . import suite
    from .harness import Options

    options = Options(
        device="cpu" if arguments.self_test else "cuda",
        size="self-test" if arguments.self_test else "quick" if arguments.quick else "full",
        backends=("torch",) if arguments.self_test else arguments.backends,
        compile=arguments.compile,
        sweep=arguments.sweep,
        peers=arguments.peers,
    )
    if arguments.rows and not suite.rows_of(arguments.ops or OPS, options, arguments.rows):
        print(f"benchmarks/run.py: no row has {' or '.join(arguments.rows)} in its name", file=sys.stderr)
        return 2
    return suite.run(arguments.ops, options, arguments.json, arguments.rows, arguments.minutes)
