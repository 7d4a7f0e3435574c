"""Runs the benchmarks: ``python benchmarks/run.py [op ...] [--quick] [--plots] [--json PATH] [--compile]``.

Prints one table per row and, at the end, the verdict against liger-kernel; writes the same as Markdown and JSON.
The exit status is 1 if one of our own providers failed or gave wrong results. See docs/performance/README.md.
"""

import argparse
import importlib
import json
import re
import sys
from pathlib import Path

import torch
from harness import Options, Row
from measure import MIB, Cpu, Gpu, measure_all
from report import environment, faults, markdown, plot, verdict

OPS = ("rms_norm", "swiglu", "rope", "cross_entropy", "fused_linear_ce")
RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 1


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description="Benchmarks of liger beside its peers."
    )
    parser.add_argument("ops", nargs="*", metavar="op", help=f"of {', '.join(OPS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes: under two minutes on an H200")
    parser.add_argument(
        "--self-test", action="store_true", help="tiny sizes on the CPU with the torch backend"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile as a further provider (slow to start)"
    )
    parser.add_argument(
        "--backends", default="cuda,triton", help="backends of liger to measure (default %(default)s)"
    )
    parser.add_argument(
        "--plots", action="store_true", help="one PNG per op beside the JSON file (needs matplotlib)"
    )
    parser.add_argument(
        "--json", type=Path, help="result file (default: benchmarks/results/<date>-<device>.json)"
    )
    parsed = parser.parse_args(arguments)
    unknown = [op for op in parsed.ops if op not in OPS]
    if unknown:
        parser.error(f"unknown op {', '.join(unknown)}, expected some of {', '.join(OPS)}")
    if not parsed.self_test and not torch.cuda.is_available():
        parser.error("no CUDA device; --self-test runs tiny sizes on the CPU")
    return parsed


def options_of(parsed):
    if parsed.self_test:
        return Options("cpu", "self-test", ("torch",), parsed.compile)
    return Options(
        "cuda", "quick" if parsed.quick else "full", tuple(parsed.backends.split(",")), parsed.compile
    )


def ceiling_row(options):
    """The copy speed of the device, far from the size of any cache."""
    nbytes = options.pick(2048 * MIB, 2048 * MIB, 2 * MIB)
    inputs = {"like": torch.empty(0, device=options.device)}
    return Row(
        "ceilings", f"device copy of {nbytes // 2 // MIB} MiB", lambda: inputs, [], nbytes=nbytes, contests=()
    )


def main(arguments=None):
    parsed = parse(arguments)
    options = options_of(parsed)
    facts = environment(options)
    name = re.sub(r"[^\w.]+", "-", f"{facts['date'][:16].replace(':', '')}-{facts['device']}-{options.size}")
    path = parsed.json or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"schema": SCHEMA, "environment": facts, "rows": [], "verdict": []}

    def save(records):
        # After every row: a run that is cut short leaves what it has measured.
        result["rows"], result["verdict"] = records, verdict(records)
        path.write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(result))

    rows = [ceiling_row(options)]
    for op in parsed.ops or OPS:
        rows += importlib.import_module(f"bench_{op}").rows(options)
    measure_all(rows, Gpu() if options.device == "cuda" else Cpu(), save)
    print(markdown(result))
    print(f"written: {path} and {path.with_suffix('.md')}", file=sys.stderr)
    if parsed.plots:
        for picture in plot(result, path.with_suffix("")):
            print(f"written: {picture}", file=sys.stderr)
    problems = faults(result["rows"])
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
