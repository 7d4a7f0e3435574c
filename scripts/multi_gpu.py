#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Whatever needs several GPUs, in pieces: each file of tests/distributed on all of them, then experiment E15.

    python scripts/multi_gpu.py --minutes 8

The folder ``--out`` has what earlier pieces have finished, and the next piece goes on from there; it may move
to another machine in between. Files that failed run again if their outcomes are deleted from tests.json.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
# Exit codes: of pytest for a file whose tests need what is not installed; of a file that had a whole piece.
NO_TESTS, TIMEOUT = 5, 124


def files():
    """The files of tests/distributed."""
    return sorted((ROOT / "tests" / "distributed").rglob("test_*.py"))


def run_file(path, ranks, log, deadline):
    """The exit code of pytest for a file; None if the deadline came first."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    environment = {**os.environ, "LIGER_TEST_RANKS": str(ranks)}
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        return child.wait(None if deadline is None else max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # also the ranks, which would keep their GPUs
        child.wait()
        return None


def run_tests(paths, ranks, out, deadline=None):
    """Runs the files that have no outcome yet; returns {file: exit code} of all outcomes on so many ranks.

    A file that the deadline cuts off has no outcome, but for the first one of a piece: a whole piece is not
    enough for it.
    """
    state = out / "tests.json"
    outcomes = json.loads(state.read_text()) if state.is_file() else {}
    done = outcomes.setdefault(str(ranks), {})
    for number, path in enumerate(path for path in paths if path.name not in done):
        begin, log = time.monotonic(), out / f"{path.stem}-{ranks}.log"
        code = run_file(path, ranks, log, deadline)
        if code is None and number:
            break
        done[path.name] = TIMEOUT if code is None else code
        state.write_text(json.dumps(outcomes, indent=1))
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        print(f"{path.name}: {done[path.name]}, {time.monotonic() - begin:.0f} s, {last}", flush=True)
        if code is None:
            break
    return done


def main(arguments=None):
    """Returns 1 if tests have failed or E15 could not run; what is left for another piece is no error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="of this piece (default: no limit)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "multi_gpu", metavar="DIR")
    gpus = torch.cuda.device_count()
    default = next((n for n in (8, 4) if n <= gpus), 2)
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=default, help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="E15 in tiny sizes on the CPU")
    given = parser.parse_args(arguments)
    deadline = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    given.out.mkdir(parents=True, exist_ok=True)
    paths = files()
    done = run_tests(paths, given.ranks, given.out, deadline)
    left = [path.name for path in paths if path.name not in done]
    failed = [name for name, code in done.items() if code not in (0, NO_TESTS)]
    print(f"tests on {given.ranks} ranks: {len(left)} of {len(paths)} files left, failed: {failed or 'none'}")
    if left:
        return bool(failed)
    command = [sys.executable, "-m", "experiments", "E15", "--out", str(given.out.resolve())]
    if deadline is not None:
        command += ["--minutes", str((deadline - time.monotonic()) / 60)]
    code = subprocess.call([*command, *["--tiny"] * given.tiny], cwd=ROOT / "benchmarks")
    return bool(failed or code)


if __name__ == "__main__":
    sys.exit(main())
