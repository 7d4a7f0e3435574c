# SPDX-License-Identifier: BSD-3-Clause
"""Runs the checks of many model classes, each in a process of its own with a time limit and a memory limit.

These processes are forks of a server, which has imported transformers. The server is a new process without
GPUs: autograd fails in a fork of a process that has run a backward on a machine with a GPU, even one of CPU
tensors.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import transformers

from .checks import CHECKS
from .report import run

# Bytes that one process may allocate. Not of address space, of which the libraries of a CUDA build of torch
# take most.
MEMORY = 8 << 30


def scan(
    classes: Iterable[tuple[str, str]],
    jobs: int = 1,
    limit_s: float = 120.0,
    checks: tuple[str, ...] = tuple(CHECKS),
    progress: Callable[[dict[str, Any]], None] = lambda result: None,
) -> list[dict[str, Any]]:
    """The reports of :func:`model_scan.report.run`, in the order of ``classes``.

    Args:
        classes: pairs (model type, class name).
        jobs: processes at a time.
        limit_s: seconds for one class; a class that takes longer is reported as not built.
        checks: names of the checks to run.
        progress: called with every report as it arrives.

    Raises:
        RuntimeError: the server ended before all reports, for example without memory.
    """
    classes, results = list(classes), dict[tuple[str, str], Any]()
    # The models are on the CPU; a backend that needs a GPU would be refused there.
    environment = {name: value for name, value in os.environ.items() if name != "LIGER_BACKEND"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    ours, theirs = multiprocessing.Pipe()
    with ours:
        with theirs:
            server = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import _serve; _serve({theirs.fileno()})"],
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        try:
            for _ in dict.fromkeys(classes):
                try:
                    if not results:
                        ours.send((classes, jobs, limit_s, checks))
                    report = ours.recv()
                except (EOFError, ConnectionError) as error:
                    raise RuntimeError(
                        f"scan: the process of the checks ended with exit code {server.wait()} after "
                        f"{len(results)} of {len(classes)} classes"
                    ) from error
                results[report["type"], report["class"]] = report
                progress(report)
        finally:
            server.terminate()
            server.wait()
    return [results[pair] for pair in classes]


def _serve(descriptor: int) -> None:
    """The server: reads the arguments of :func:`scan` from a connection, and sends each report."""
    # An exit, unlike a signal, ends the processes of the classes as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    torch.set_num_threads(1)  # A fork must not inherit a pool of threads.
    with Connection(descriptor) as connection:
        classes, jobs, limit_s, checks = connection.recv()
        _run_all(classes, jobs, limit_s, checks, connection.send)


def _run_all(classes, jobs, limit_s, checks, send) -> None:
    """Forks a process per class, at most ``jobs`` at a time, and sends the reports in the order in which they
    end."""
    context = multiprocessing.get_context("fork")
    waiting, running = iter(dict.fromkeys(classes)), dict[Any, Any]()
    _fill(waiting, running, jobs, context, checks)
    while running:
        ready = wait(list(running), timeout=min(1.0, limit_s))
        for connection in list(running):
            pair, process, started = running[connection]
            if connection in ready:
                report = _receive(connection, pair)
            elif time.monotonic() - started > limit_s:
                report = _failed(pair, f"it took longer than {limit_s:g} s")
            else:
                continue
            process.kill()
            process.join()
            connection.close()
            del running[connection]
            send(report)
        _fill(waiting, running, jobs, context, checks)


def _fill(waiting, running, jobs, context, checks) -> None:
    while len(running) < jobs:
        pair = next(waiting, None)
        if pair is None:
            return
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(pair, checks, theirs), daemon=True)
        process.start()
        theirs.close()
        running[ours] = pair, process, time.monotonic()


def _work(pair, checks, connection: Connection):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    model_type, class_name = pair
    connection.send(run(model_type, class_name, checks))


def _receive(connection, pair):
    try:
        return connection.recv()
    except EOFError:
        return _failed(pair, "its process ended without a result (out of memory, or a crash)")


def _failed(pair, reason):
    return {"type": pair[0], "class": pair[1], "not built": reason}
