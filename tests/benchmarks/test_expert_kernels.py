# SPDX-License-Identifier: BSD-3-Clause
"""liger_bench.expert_kernels on the CPU: the references and errors; a measurement needs a GPU."""

from liger_bench import expert_kernels as bench


def test_checks():
    """The default path serves the calls here."""
    records = bench.check([(13, 2, 3, 16, 24), (40, 1, 3, 8, 8)], "cpu")
    assert len(records) == 2 * len(bench.ROUTINGS) * len(bench.FORMS) * 2
    assert [record for record in records if record["wrong"]] == []


def test_a_wrong_result_is_found(monkeypatch):
    found = bench.results
    scales = {"kernels": 1.05, "default": 1}
    monkeypatch.setattr(bench, "results", lambda *a: [scales[a[-1]] * t for t in found(*a)])
    records = bench.check([(13, 2, 3, 16, 24)], "cpu")
    assert all("y" in record["wrong"] for record in records)
