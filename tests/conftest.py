# SPDX-License-Identifier: BSD-3-Clause
"""Backends as a fixture: the same test files run for torch, triton and cuda, wherever each can run.

Without a GPU: torch on the CPU, and triton on the CPU when TRITON_INTERPRET=1. With a GPU: all three there.
"""

import gc
import os
from itertools import combinations
from operator import itemgetter
from zlib import crc32

# Before the first import of huggingface_hub. No test needs the hub, but importing bitsandbytes asks it for a
# kernel.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from cases import compiled, poison_memory

import liger
from liger._core.runtime.build_info import build_info
from liger._core.runtime.environment import triton_interpreted

GPU = torch.cuda.is_available()
# Workers of pytest-xdist share the cores: where each has threads for all of them, tests that compute on the
# CPU take several times as long.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(max(torch.get_num_threads() // WORKERS, 1))


def _runnable():
    if triton_interpreted():
        return [("triton", "cpu")]
    if GPU:
        return [("cuda", "cuda"), ("triton", "cuda"), ("torch", "cuda")]
    return [("torch", "cpu")]


@pytest.fixture
def backends_restored():
    before = liger.backend_report()
    yield
    assert liger.backend_report() == before, "the test left other backends behind"


@pytest.fixture(params=_runnable(), ids=lambda pair: "-".join(pair))
def device(request):
    """A device with one backend forced for every op; test functions that take it run once per runnable
    backend."""
    backend, name = request.param
    with liger.use_backend(backend):
        yield torch.device(name)


@pytest.fixture
def backend(device):
    return liger._core.op.backend._requested[0]


@pytest.fixture
def float64_device():
    """The device with the torch backend, which alone computes float64."""
    with liger.use_backend("torch"):
        yield torch.device("cuda" if GPU else "cpu")


@pytest.fixture
def sm90():
    """The device, with the engine of compute capability 9.0 in use; where it cannot run, the test is
    skipped."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a device of compute capability 9.0")
    if "90a" not in build_info()["cuda_archs"]:
        pytest.skip("built without kernels for 90a")
    with compiled() as device:
        yield device


@pytest.fixture(autouse=True)
def _seed():
    # torch.manual_seed keeps a traceback for each kind of device that is not there.
    (torch.manual_seed if GPU else torch.default_generator.manual_seed)(0)
    if GPU:
        poison_memory()


def covering(items, strength):
    """Of the tests of one function, some in which each ``strength`` values of as many of its parameters
    meet."""
    meetings = {}
    for item in items:
        # By identity: stacked parameters share their values, which need not be hashable.
        values = [
            (name, id(value))
            for name, value in sorted(item.callspec.params.items(), key=itemgetter(0))
            if name != "device"
        ]
        meetings[item] = set(combinations(values, strength))
    left, found = set().union(*meetings.values()), set()
    # By their names, so that a test added elsewhere does not change the choice; those with the most new
    # meetings first.
    ordered = sorted(items, key=lambda item: crc32(item.nodeid.encode()))
    for fewest in range(len(meetings[items[0]]), 0, -1):
        for item in ordered:
            if len(meetings[item] & left) >= fewest:
                found.add(item)
                left -= meetings[item]
    return found


def slow_variants(items):
    """All but a covering selection of the tests marked so, for each device."""
    by_function = {}
    for item in items:
        mark = item.get_closest_marker("covering")
        if mark and not item.get_closest_marker("slow"):
            # Triton's interpreter takes its time: with it each value occurs once.
            strength = 1 if triton_interpreted() else mark.args[0]
            key = item.nodeid.partition("[")[0], item.callspec.params.get("device"), strength
            by_function.setdefault(key, []).append(item)
    return {
        item
        for key, of_function in by_function.items()
        for item in set(of_function) - covering(of_function, key[-1])
    }


def repeated_variants(items):
    """Of each test with parameters two thirds, which differ between the minor versions of torch."""
    version = ".".join(torch.__version__.split(".")[:2])
    by_function = {}
    for item in items:
        if hasattr(item, "callspec"):
            key = item.nodeid.partition("[")[0], item.get_closest_marker("slow") is None
            by_function.setdefault(key, []).append(
                (crc32(f"{version} {item.nodeid}".encode()), item.nodeid, item)
            )
    for ranked in map(sorted, by_function.values()):
        yield from (item for *_, item in ranked[-(-len(ranked) // 3) :])


def pytest_collection_modifyitems(config, items):
    if not GPU:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    variants = slow_variants(items)
    # Markers, not keywords: those include the names of folders, and tests/packaging has tests without that
    # marker.
    for item in items:
        # Triton's interpreter takes its time: without the slow tests there is about every fourth, chosen by
        # its name, of those that have no selection of their own.
        left_out = (
            triton_interpreted()
            and crc32(item.nodeid.encode()) % 4
            and not item.get_closest_marker("covering")
        )
        if item.get_closest_marker("packaging") or left_out or item in variants:
            item.add_marker(pytest.mark.slow)
    # make test has run a covering selection of the others.
    for item in variants.union(repeated_variants(items)):
        item.add_marker(pytest.mark.repeated)


def pytest_collection_finish():
    # A full collection, which several tests ask for, would look at a million objects of imported modules and
    # collected tests: half a second each time.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """A table of what ran per backend."""
    counts = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if outcome != "skipped" and report.when != "call":
                continue
            name = next((f"{b}-{d}" for b in liger._core.op.backend.BACKENDS for d in ("cuda", "cpu")
                         if f"{b}-{d}" in report.nodeid.rpartition("[")[2]), "no backend")  # fmt: skip
            counts.setdefault(name, {}).setdefault(outcome, 0)
            counts[name][outcome] += 1
    terminalreporter.section("what ran per backend")
    for name, row in sorted(counts.items()):
        text = "  ".join(f"{row.get(o, 0):5d} {o}" for o in ("passed", "failed", "skipped"))
        terminalreporter.write_line(f"{name:12s} {text}")
