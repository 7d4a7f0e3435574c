# SPDX-License-Identifier: BSD-3-Clause
"""The check of cells whose code has changed, on a small tree of its own."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import liger_bench
from experiments import IMPORTANCE, MODULES, experiment
from liger_bench.reports import depends, stale

ROOT = Path(__file__).parents[2]
KERNEL = '#include "softmax/softmax.cuh"\n// The row is read once.\nvoid softmax() { log("a // b"); }\n'
PYTHON = '"""Softmax."""\n\n\ndef softmax(x):\n    """The softmax\n    of x."""\n    return x  # a copy\n'
SOFTMAX = "csrc/softmax/softmax.cu"
FILES = {
    SOFTMAX: KERNEL,
    "csrc/softmax/softmax.cuh": "#pragma once\nint width = 4;\n",
    "csrc/norm/rms_norm.cu": "void rms_norm() {}\n",
    "python/liger/ops/softmax.py": PYTHON,
}
PATHS = (SOFTMAX, "python/liger/ops/softmax.py")


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        write(tmp_path, name, text)
    return tmp_path


@pytest.mark.parametrize(
    "name, before, after, is_changed",
    [
        (SOFTMAX, "read once", "read a single time", False),
        (SOFTMAX, "void softmax() {", "void softmax()\n{  /* nothing */", False),
        ("python/liger/ops/softmax.py", "# a copy", "# the same", False),
        ("python/liger/ops/softmax.py", "The softmax\n    of x", "x", False),
        (SOFTMAX, "a // b", "a // c", True),
        ("csrc/softmax/softmax.cuh", "4", "8", True),
        ("python/liger/ops/softmax.py", "return x", "return -x", True),
        ("csrc/norm/rms_norm.cu", "{}", "{ return; }", False),
    ],
)
def test_a_change_of_code_is_one(root, name, before, after, is_changed):
    """Comments and white space are none, and neither is a file that nothing includes."""
    digest = stale.Tree(root).digest(PATHS)
    assert before in FILES[name]
    write(root, name, FILES[name].replace(before, after))
    assert (stale.Tree(root).digest(PATHS) != digest) is is_changed


def test_a_record_has_the_digest_of_its_code():
    record = {"method": "softmax", "size": "sizes"}
    assert stale.is_stale("E17", record)
    code = stale.digest_of("E17", "softmax", "sizes")
    assert not stale.is_stale("E17", {**record, "code": code})
    assert stale.is_stale("E17", {"method": "rope", "size": "sizes", "code": code})


def test_other_methods_depend_on_the_benchmark_alone():
    ours, theirs = (depends.paths("E3", method, "4x1024") for method in ("liger", "liger-kernel"))
    assert set(theirs) < set(ours) and not any(path.startswith(("csrc", "python")) for path in theirs)
    plan, plain = (depends.paths("E16", method, "4x8192") for method in ("liger, plan", "liger"))
    assert set(plain) < set(plan)


def test_every_cell_has_its_files_and_every_name_a_file():
    assert set(depends.OPS) == set(liger_bench.OPS)
    assert sorted(IMPORTANCE) == sorted(MODULES)
    files = stale.tree().files
    for name in MODULES:
        for cell in experiment(name).cells(False):
            for path in depends.paths(name, cell.method, cell.size):
                assert any(file.startswith(path) for file in files), path


def test_every_word_is_in_a_cell():
    for name, (_, _, by_word) in depends.EXPERIMENTS.items():
        keys = [cell.key for cell in experiment(name).cells(False)]
        assert all(any(word in key for key in keys) for word in by_word), name


def test_every_kernel_belongs_to_a_benchmark():
    tree = stale.Tree(ROOT)
    known = set().union(*map(tree.closure, [*depends.OPS.values(), depends.VOCABULARY]))
    kernels = [f for f in tree.files if f.startswith("csrc/") and f.endswith((".cu", ".cuh"))]
    kernels += [f for f in tree.files if f.startswith("triton_kernels/")]
    left = {f for f in kernels if f not in known and not f.startswith("csrc/host/")}
    # rescale multiplies gradients by an upstream gradient that is not 1, which no benchmark has.
    assert left <= {
        "csrc/rescale/rescale.cu",
        "csrc/rescale/rescale.cuh",
        "triton_kernels/rescale.py",
        "triton_kernels/__init__.py",
    }


def test_what_was_tried_has_no_table_and_no_result(tmp_path):
    write(tmp_path, "README.md", "[run](benchmarks/results/experiments/E1.json)\n")
    text = "# Softmax\n\n| a | b |\n\n## Tried without gain\n\n- Two rows at a time: 1.02x.\n\n## Tables\n\n| c |\n"
    write(tmp_path, "docs/lab/a.md", text)
    assert stale.complaints(tmp_path) == ["README.md: no result experiments/E1.json"]
    write(tmp_path, "benchmarks/results/experiments/E1.json", "{}")
    write(tmp_path, "docs/lab/a.md", text.replace("1.02x.\n", "1.02x.\n\n| d |\n"))
    assert stale.complaints(tmp_path) == ["docs/lab/a.md: 'Tried without gain' has a table or a result file"]


def test_pages_keep_these_rules():
    assert stale.complaints() == []
