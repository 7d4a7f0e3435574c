# SPDX-License-Identifier: BSD-3-Clause
"""liger_bench.expert_kernels on the CPU: the references and errors; a measurement needs a GPU."""

import pytest
import torch

from liger_bench import expert_kernels as bench
from liger_bench.harness import Options
from liger_bench.ops.experts import TINY


def test_checks():
    """The default path serves the calls here."""
    records = bench.check([(13, 2, 3, 16, 24), (40, 1, 3, 8, 8)], "cpu")
    assert len(records) == 2 * len(bench.ROUTINGS) * len(bench.FORMS) * 2
    assert [record for record in records if record["wrong"]] == []


def test_a_wrong_result_is_found(monkeypatch):
    found = bench.forced_results
    monkeypatch.setattr(bench, "forced_results", lambda *a: [1.05 * t for t in found(*a)])
    records = bench.check([(13, 2, 3, 16, 24)], "cpu")
    assert all("y" in record["wrong"] for record in records)


@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_works_call_what_exists(monkeypatch, shape):
    """Each kernel is called with operands of its sizes; the op computes by the default path."""
    options = Options(device="cpu", size="self-test")
    inputs = bench._inputs(options, shape, 14)()
    slots, sizes = inputs["index"].numel() + 1, (shape.hidden, shape.intermediate)
    called = []

    def kernel(name, *shapes):
        results = [torch.zeros(s, dtype=torch.bfloat16) for s in shapes]

        def call(*arguments):
            called.append(name)
            return results[0] if len(results) == 1 else tuple(results)

        return call

    hidden, inner = sizes
    monkeypatch.setattr(bench.sm90, "gate_up", kernel("gate_up", (slots, inner), (slots, 2 * inner)))
    monkeypatch.setattr(bench.sm90, "rows", kernel("rows", (slots, hidden)))
    monkeypatch.setattr(bench.sm90, "sum_choices", kernel("sum", (14, hidden)))
    monkeypatch.setattr(bench.sm90, "grad_product_", kernel("grad", (slots, inner), (slots,)))
    monkeypatch.setattr(bench.sm90, "grad_matrix", kernel("matrix", sizes))
    monkeypatch.setattr(
        bench, "milliseconds", lambda works, *_: {n: len([w()]) * 1.0 for n, w in works.items()}
    )
    record = bench.measure(shape, 14, options)
    assert called.count("matrix") == 2 and called.count("grad") == 1
    assert "step, default" in bench.text_of(record) and "gate_up" in bench.text_of(record)
