# SPDX-License-Identifier: BSD-3-Clause
"""The check of figures whose code has changed, on a small repository of its own."""

import json
import subprocess
from pathlib import Path

import pytest

import liger_bench
from experiments import MODULES
from liger_bench.reports import depends, stale

ROOT = Path(__file__).parents[2]
KERNEL = '#include "softmax/softmax.cuh"\n// The row is read once.\nvoid softmax() { log("a // b"); }\n'
HEADER = "#pragma once\nint width = 4;\n"
PYTHON = '"""Softmax."""\n\n\ndef softmax(x):\n    """The softmax of x."""\n    return x  # a copy\n'


class Checkout:
    def __init__(self, folder):
        self.folder = folder
        self.git("init", "-q", "-b", "main")
        self.write("csrc/softmax/softmax.cu", KERNEL)
        self.write("csrc/softmax/softmax.cuh", HEADER)
        self.write("python/liger/ops/softmax.py", PYTHON)
        self.write("csrc/norm/rms_norm.cu", "void rms_norm() {}\n")
        self.write("docs/start/speed.md", "[run](../benchmarks/results/run.json)\n")
        self.measured = self.commit()

    def git(self, *arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=self.folder, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "A change")
        return self.git("rev-parse", "HEAD")

    def reasons(self, **facts):
        """{op: why it is stale} of a run of two ops at the first commit."""
        run = {"schema": 2, "environment": {"commit": self.measured, **facts}}
        run["rows"] = [{"op": "ceilings"}, {"op": "softmax"}, {"op": "rms_norm"}]
        self.write("benchmarks/results/run.json", json.dumps(run))
        found, others = stale.check(self.folder)
        assert others == 0
        assert all(pages == ["docs/start/speed.md"] for _, pages, _ in found)
        return {figure.subject: why for figure, _, why in found}


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


SOFTMAX = "csrc/softmax/softmax.cu"


@pytest.mark.parametrize(
    "name, before, after, is_changed",
    [
        (SOFTMAX, "read once", "read a single time", False),
        (SOFTMAX, "void softmax() {", "void softmax()\n{  /* nothing */", False),
        ("python/liger/ops/softmax.py", "# a copy", "# the same", False),
        ("python/liger/ops/softmax.py", "The softmax of x", "x", False),
        (SOFTMAX, "a // b", "a // c", True),
        ("csrc/softmax/softmax.cuh", "4", "8", True),
        ("python/liger/ops/softmax.py", "return x", "return -x", True),
    ],
)
@pytest.mark.parametrize("committed", [True, False])
def test_a_change_of_code_is_one(checkout, name, before, after, is_changed, committed):
    """Comments and white space are none."""
    text = (checkout.folder / name).read_text()
    assert before in text
    checkout.write(name, text.replace(before, after))
    if committed:
        checkout.commit()
    why = f"1 files changed: {name}" if is_changed else None
    assert checkout.reasons() == {"softmax": why, "rms_norm": None}


def test_other_commits_and_uncommitted_changes_are_stale(checkout):
    for commit in ("0123456789", None):
        assert checkout.reasons(commit=commit)["softmax"] == f"commit {commit} is not in this history"
    checkout.git("checkout", "-q", "-b", "side")
    checkout.write("notes", "")
    side = checkout.commit()
    checkout.git("checkout", "-q", "main")
    assert "is not in this history" in checkout.reasons(commit=side)["softmax"]
    assert "with changes on top" in checkout.reasons(modified=True)["softmax"]


def test_every_benchmark_has_its_files_and_every_name_a_file():
    assert set(depends.OPS) == set(liger_bench.OPS)
    assert set(depends.EXPERIMENTS) == set(MODULES)
    tables = [*depends.OPS.values(), *depends.MODELS.values(), depends.VOCABULARY, depends.SHARDED_MLP]
    tables += [paths for pair in depends.EXPERIMENTS.values() for paths in pair]
    files = stale.Repository(ROOT).files
    unknown = {name for table in tables for name in table if not any(file.startswith(name) for file in files)}
    assert not unknown


def test_every_kernel_belongs_to_a_benchmark():
    repository = stale.Repository(ROOT)
    tables = [*depends.OPS.values(), depends.VOCABULARY]
    known = set().union(*map(repository.closure, tables))
    kernels = [f for f in repository.files if f.startswith("csrc/") and f.endswith((".cu", ".cuh"))]
    kernels += [f for f in repository.files if f.startswith("triton_kernels/") and f.endswith(".py")]
    left = {f for f in kernels if f not in known and not f.startswith("csrc/host/")}
    # rescale multiplies gradients by an upstream gradient that is not 1, which no benchmark has.
    assert left <= {
        "csrc/rescale/rescale.cu",
        "csrc/rescale/rescale.cuh",
        "triton_kernels/rescale.py",
        "triton_kernels/__init__.py",
    }
