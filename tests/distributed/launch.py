# SPDX-License-Identifier: BSD-3-Clause
"""Runs tests on all ranks and collects what each of them reported."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ranks import PATIENCE

REPORT = "LIGER_TEST_REPORT"
# Seconds for the tests of a file with few tests, for each test of a file with many, and for the other ranks
# after one has failed: they may wait for it in vain.
FILE_TIMEOUT, TEST_TIMEOUT, STRAGGLER_TIMEOUT = 300, 7, 15


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(rank, world, port, node_ids, folder, root):
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        REPORT: str(folder / f"{rank}.jsonl"),
    }
    # After a failure the ranks are out of step: they stop, and a new set of ranks runs what is left.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["-o", f"timeout={2 * PATIENCE.seconds}", "-o", "timeout_method=thread", *node_ids]
    with open(folder / f"{rank}.log", "wb") as log:
        return subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait(processes, tests):
    """Ends them all; returns what was wrong with those that did not end by themselves."""
    deadline = time.monotonic() + max(FILE_TIMEOUT, TEST_TIMEOUT * tests)
    while any(p.poll() is None for p in processes):
        if any(p.poll() for p in processes):
            deadline = min(deadline, time.monotonic() + STRAGGLER_TIMEOUT)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    stuck = [rank for rank, p in enumerate(processes) if p.poll() is None]
    for rank in stuck:
        processes[rank].kill()
        processes[rank].wait()
    return [f"rank {rank} did not end by itself" for rank in stuck]


def run(node_ids, root, world):
    """Runs the tests on ``world`` new ranks. Returns ``{node id: [(outcome, text) of each rank]}``.

    A test that some rank did not report, because it or an earlier one went wrong, is not there; the first of
    them is, as failed, with the output of the ranks.
    """
    with tempfile.TemporaryDirectory(prefix="liger-ranks-") as name:
        folder, port = Path(name), _free_port()
        processes = [_start(rank, world, port, node_ids, folder, root) for rank in range(world)]
        try:
            faults = _wait(processes, len(node_ids))
        finally:
            for process in processes:
                process.kill()
        reports = []
        for rank in range(world):
            path = folder / f"{rank}.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            reports.append({r["node_id"]: (r["outcome"], r["text"]) for r in map(json.loads, lines)})
        outcomes = {n: [r[n] for r in reports] for n in node_ids if all(n in r for r in reports)}
        lost = next((n for n in node_ids if n not in outcomes), None)
        if lost is not None and not any(o == "failed" for ranks in outcomes.values() for o, _ in ranks):
            logs = [(folder / f"{rank}.log").read_text(errors="replace")[-6000:] for rank in range(world)]
            outcomes[lost] = [
                reports[rank].get(lost, ("failed", "\n".join([*faults, logs[rank]]))) for rank in range(world)
            ]
        return outcomes
