# SPDX-License-Identifier: BSD-3-Clause
"""Configurations of autotuned kernels, compiled in several processes."""

import subprocess
from types import SimpleNamespace

import pytest

from experiments.measurement import Measurement
from liger_bench.devices import tuning

MODULE = """
import pathlib
import triton

configurations = [triton.Config({"BLOCK": 2**i}) for i in range(5)]


@triton.autotune(configs=configurations, key=[])
@triton.jit
def kernel(BLOCK: "tl.constexpr"):
    pass


def work():
    blocks = [str(c.kwargs["BLOCK"]) for c in kernel.configs]
    (pathlib.Path(__file__).parent / f"{blocks[0]}.txt").write_text(" ".join(blocks))


def fail():
    raise SystemExit(3)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    (tmp_path / "autotuned.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield "autotuned"
    tuning.compile_in_parallel.cache_clear()


def test_processes_share_the_configurations(module, tmp_path):
    for _ in range(2):
        tuning.compile_in_parallel(module, "work", 2)
    assert {p.name: p.read_text() for p in tmp_path.glob("*.txt")} == {"1.txt": "1 4 16", "2.txt": "2 8"}


def test_a_failure_is_an_error(module):
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        tuning.compile_in_parallel(module, "fail", 1)


def test_more_processes_than_configurations():
    autotune = tuning.part_of_configurations(lambda configs, key: (configs, key), 4, 5)
    assert autotune(["a", "b"], key="k") == (["a"], "k")


def test_a_timeout_keeps_what_the_process_has_printed(tmp_path):
    made = Measurement.__new__(Measurement)
    (tmp_path / "log").write_text("compiling")
    made.cell, made._left = SimpleNamespace(seconds=5.0), 9.0
    made._record, made._log = tmp_path / "record.json", tmp_path / "log"
    assert made._read(None) == {"status": "timeout", "reason": "not done after 5 s", "traceback": "compiling"}
