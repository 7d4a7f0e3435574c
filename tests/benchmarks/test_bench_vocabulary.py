# SPDX-License-Identifier: BSD-3-Clause
"""Verdicts of the benchmark of sharded vocabularies; E15 runs it in tiny sizes."""

from liger_bench.devices import vocabulary as bench


def contestants(peak):
    return {
        bench.ONE: {"ms": 20.0, "peak_mib": 1000.0, "workspace_mib": 500.0},
        bench.SHARDED: {"ms": 10.5, "peak_mib": peak, "workspace_mib": 400.0},
        bench.GEMMS: {"ms": 10.0},
    }


def test_wrong_results_are_marked():
    assert bench.verdict(contestants(900.0), 1.0, float("nan"))["status"] == "wrong"
    found = bench.verdict(contestants(1000.5), 0.95, 1e-3)
    assert (
        found["status"] == "ok" and found["memory_met"] and found["speed_met"] and found["of_gemms"] == 1.05
    )
    assert not bench.verdict(contestants(1002.0), 0.95, 1e-3)["memory_met"]
