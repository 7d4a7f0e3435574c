"""Runs the checks of many model classes, each in a process of its own with a time limit and a memory limit."""

from __future__ import annotations

import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import transformers

from .checks import CHECKS
from .report import run

MEMORY = 8 << 30  # bytes of address space of one process


def scan(
    classes: Iterable[tuple[str, str]],
    jobs: int = 1,
    limit_s: float = 120.0,
    checks: tuple[str, ...] = tuple(CHECKS),
    progress: Callable[[dict[str, Any]], None] = lambda result: None,
) -> list[dict[str, Any]]:
    """The reports of :func:`liger.transformers.scan.report.run`, in the order of ``classes``.

    Args:
        classes: pairs (model type, class name).
        jobs: processes at a time.
        limit_s: seconds for one class; a class that takes longer is reported as not built.
        checks: names of the checks to run.
        progress: called with every report as it arrives.
    """
    classes, results = list(classes), dict[tuple[str, str], Any]()
    torch.set_num_threads(1)  # A fork must not inherit a pool of threads.
    context = multiprocessing.get_context("fork")
    waiting, running = iter(classes), dict[Any, Any]()
    for pair in _fill(waiting, running, jobs, context, checks):
        results[pair] = None
    while running:
        ready = wait(list(running), timeout=min(1.0, limit_s))
        for connection in list(running):
            pair, process, started = running[connection]
            if connection in ready:
                results[pair] = _receive(connection, pair)
            elif time.monotonic() - started > limit_s:
                results[pair] = _failed(pair, f"it took longer than {limit_s:g} s")
            else:
                continue
            process.kill()
            process.join()
            connection.close()
            del running[connection]
            progress(results[pair])
        for pair in _fill(waiting, running, jobs, context, checks):
            results[pair] = None
    return [results[pair] for pair in classes]


def _fill(waiting, running, jobs, context, checks) -> Iterator[tuple[str, str]]:
    while len(running) < jobs:
        pair = next(waiting, None)
        if pair is None:
            return
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(pair, checks, theirs), daemon=True)
        process.start()
        theirs.close()
        running[ours] = pair, process, time.monotonic()
        yield pair


def _work(pair, checks, connection: Connection):
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
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
