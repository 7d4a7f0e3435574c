# SPDX-License-Identifier: BSD-3-Clause
"""Every test in this folder runs on several ranks at once: with nccl where there are as many GPUs, else with
gloo.

There are two ranks, or as many as ``RANKS`` of a file says. Under
``torchrun --nproc-per-node 2 -m pytest tests/distributed`` each process is a rank and runs the files for that
number of ranks. In plain pytest the ranks of a file are started once, when its first test is due; each test
then passes if it did on all ranks. So a time limit for a test is one for its file, and pytest-xdist needs
``--dist loadfile``.
"""

import json
import os
from pathlib import Path

import launch
import pytest
import ranks
import torch.distributed as dist

HERE = Path(__file__).parent
# Every failure in a file costs a new set of ranks for the tests behind it.
MAX_FAILURES = 3
_outcomes = {}


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.distributed)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _process_group():
    if not ranks.IS_RANK:
        yield
        return
    ranks.start()
    yield
    dist.destroy_process_group()


@pytest.fixture
def liger_kernel(monkeypatch):
    """Makes that name importable, in front of a package that is installed."""
    monkeypatch.setenv("LIGER_COMPAT_OVERRIDE", "1")
    import liger.compat

    try:
        liger.compat.install()
    except ImportError as error:
        pytest.skip(str(error))
    yield
    liger.compat.uninstall()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Outside of a rank: what the ranks made of this test, instead of the test."""
    world = getattr(pyfuncitem.module, "RANKS", ranks.DEFAULT_WORLD)
    if ranks.IS_RANK:
        if world != ranks.WORLD:
            pytest.skip(f"needs {world} ranks")
        return None
    this = pyfuncitem.nodeid
    if this not in _outcomes:
        of_file = [i.nodeid for i in pyfuncitem.session.items if i.path == pyfuncitem.path]
        failed = [n for n in of_file if any(o == "failed" for o, _ in _outcomes.get(n, ()))]
        if len(failed) >= MAX_FAILURES:
            pytest.fail(f"not run: {len(failed)} tests of this file have failed", pytrace=False)
        left = of_file[of_file.index(this) :]
        _outcomes.update(launch.run(left, pyfuncitem.config.rootpath, world))
    for rank, (outcome, text) in enumerate(_outcomes[this]):
        if outcome == "skipped":
            pytest.skip(text)
        if outcome != "passed":
            pytest.fail(f"on rank {rank}:\n{text}", pytrace=False)
    return True


def pytest_runtest_logreport(report):
    """In a rank that was started here: writes down the outcome of a test."""
    path = os.environ.get(launch.REPORT)
    if path is None or not (report.when == "call" or report.outcome != "passed"):
        return
    text = report.longrepr[2] if report.outcome == "skipped" else report.longreprtext
    with open(path, "a") as file:
        file.write(json.dumps({"node_id": report.nodeid, "outcome": report.outcome, "text": text}) + "\n")
