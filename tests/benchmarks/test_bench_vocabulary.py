# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of sharded vocabularies: on two ranks, through gloo; a wrong result is marked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from liger_bench.devices import vocabulary as bench

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(folder, *arguments):
    """(records, Markdown table) of a run on two ranks."""
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS), "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = folder / "made" / "vocabulary.json"
    program = [
        "-m",
        "liger_bench.devices.vocabulary",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--json",
        path,
    ]
    sizes = ["--tokens", "60", "130", "--hidden", "16", "--vocabulary", "131"]
    done = subprocess.run(
        [sys.executable, *launch, *program, *sizes, *arguments],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = path.with_suffix(".md").read_text()
    assert table in done.stdout
    result = json.loads(path.read_text())
    assert result["environment"]["ranks"] == 2 and result["environment"]["dtype"] == "float32"
    return result["records"], table


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """131 classes: shards of different sizes. A quarter of the tokens is ignored."""
    records, table = run(tmp_path, "--rounds", "3", "--ignored", "0.25")
    assert [(r["op"], r["tokens"]) for r in records] == [(op, n) for n in (60, 130) for op in bench.OPS]
    for record in records:
        assert record["status"] == "ok" and record["error"] < 1e-5
        found = record["contestants"]
        assert set(found) == {bench.ONE, bench.SHARDED, bench.GEMMS}
        # Three rounds, of both ranks the slower one.
        assert all(len(c["samples_ms"]) == 3 and c["ms"] > 0 for c in found.values())
        assert record["speed"] > 0 and record["memory_met"] is None
        assert (
            f"| {record['name']} | {found[bench.ONE]['ms']:.2f} | {found[bench.SHARDED]['ms']:.2f} |" in table
        )


def contestants(peak):
    return {
        bench.ONE: {"ms": 20.0, "peak_mib": 1000.0, "workspace_mib": 500.0},
        bench.SHARDED: {"ms": 10.5, "peak_mib": peak, "workspace_mib": 400.0},
        bench.GEMMS: {"ms": 10.0},
    }


def test_wrong_results_are_marked():
    found = bench.verdict(contestants(900.0), 1.0, float("nan"))
    assert found["status"] == "wrong"
    record = {"name": "x", "contestants": contestants(900.0), **found}
    assert "| x (WRONG, error nan) |" in bench.markdown({"ranks": 2}, [record])
