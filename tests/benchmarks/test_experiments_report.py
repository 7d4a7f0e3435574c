# SPDX-License-Identifier: BSD-3-Clause
"""Tables and the page of the experiments, from results that are made here."""

import json

import pytest

pytest.importorskip("transformers")

import liger_bench
from experiments import MODULES, experiment, ops, report, results, scaling, summary, tables
from liger_bench import suite
from liger_bench.harness import Options
from liger_bench.reports import overview


def record(method, order, status="ok", **values):
    measured = {
        "tokens_per_second": 1000.0 * order,
        "peak_bytes": order << 30,
        "first_loss": 5.0,
        "ms": {"median": 1.0},
    }
    known = measured if status == "ok" else {"reason": "a reason"}
    identity = {"method": method, "size": f"{order}x1024", "order": order, "status": status}
    return {**identity, **known, **values}


def result_of(*records):
    cells = {f"{r['method']} @ {r['size']}": r for r in records}
    facts = {"device": "a device", "torch": "2.11", "commit": "0123456789abcdef"}
    return {"schema": 1, "experiment": "E3", "tiny": False, "environments": [facts], "cells": cells}


SOME = result_of(
    record("transformers", 1),
    record("transformers", 2, "oom"),
    record("transformers", 4, "oom", inferred=True),
    record("liger", 1),
    record("liger", 2),
    record("liger", 4, first_loss=5.5),
    record("liger-kernel", 1, first_loss=5.5),
    record("liger-kernel", 2, "failed", reason="RuntimeError: a|b"),
)


def test_a_table_has_a_word_for_every_cell():
    lines = tables.training(SOME).splitlines()
    assert lines[0] == "| batch x tokens | transformers | liger | liger-kernel |"
    assert lines[2] == "| 1x1024 | 1.0 k, 1.00 GiB | 1.0 k, 1.00 GiB | 1.0 k, 1.00 GiB (WRONG LOSS 5.5) |"
    assert lines[3] == "| 2x1024 | OOM | 2.0 k, 2.00 GiB | failed: RuntimeError: a/b |"
    assert lines[4] == "| 4x1024 | OOM (not tried) | 4.0 k, 4.00 GiB |  |"
    assert lines[6] == (
        "liger, the fastest form at each size, vs. transformers: 1.00 times the tokens/s in 1.00 of the memory; "
        "vs. liger-kernel: 1.00 times the tokens/s in 1.00 of the memory."
    )
    assert "transformers: 1x1024, out of memory at 2x1024" in lines[8]
    assert "liger: 4x1024, the largest that was tried" in lines[8]


def test_an_op_without_its_public_function_is_not_liger():
    of = {"status": "ok", "peak_mib": 1}
    providers = {
        "liger[cuda]": {**of, "group": "ours", "ms": {"median": 2.0}},
        "liger[cuda] ops alone": {**of, "group": "op alone", "ms": {"median": 1.0}},
    }
    assert ops.best({"providers": providers}, "liger[") == providers["liger[cuda]"]


def test_the_page_has_results_between_its_markers(tmp_path):
    page = tmp_path / "docs" / "experiments.md"
    page.parent.mkdir()
    parts = [f"{a}\nold\n{b}\n" for a, b in map(report.markers, MODULES)]
    page.write_text("# Title\n\n" + "\n".join(parts) + "\nafter\n")
    results.write_text(tmp_path / "E3.json", json.dumps(SOME))
    for _ in range(2):  # The second time replaces what the first has written.
        report.write_docs(tmp_path, page, tmp_path / "docs" / "images")
    text = page.read_text()
    assert "old" not in text and text.endswith("\nafter\n")
    assert text.count(report.MISSING) == len(MODULES) - 1
    assert text.count("| 2x1024 | OOM |") == 1
    assert "Data: [E3.json](../E3.json)." in text and "commit 012345678" in text
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert 100 < max(map(len, prose)) <= 120
    for image in (page.parent / "images").glob("*.png"):
        assert f"(images/{image.name})" in text


def test_summaries_have_the_fastest_form(tmp_path):
    """Of steps that are measured; of ops the speed relative to liger-kernel as users call it."""
    named = {**SOME, "experiment": "E16"}
    cells = [
        record(m, 1, size="4x8192", tokens_per_second=s) for m, s in (("liger", 9e3), ("liger, plan", 1e4))
    ]
    for cell in cells:
        cell["environment"] = 0
    named["cells"] = {c["method"]: c for c in [*cells, record("liger-kernel", 1, "oom", size="4x8192")]}
    results.write_text(tmp_path / "E16.json", json.dumps(named))
    table, machine = summary.steps(tmp_path)
    lines = table.splitlines()
    assert machine == "device a device, torch 2.11, commit 012345678"
    assert lines[2:] == ["| Llama-3.2-1B, 4 x 8192, a plan |  | out of memory | 10.0k, 1.0 GiB |"]
    times = {"liger[cuda]": ("ours", 1.0), "liger-kernel": ("liger-kernel", 2.0), "quack": ("other", 1.5)}
    times |= {"liger-kernel CuTe": ("liger-kernel", 1.2), "device copy": ("ceiling", 0.9)}
    providers = {
        n: {
            "group": g,
            "status": "ok",
            "ms": {"median": ms},
            "ratios": {"device copy": ms / 0.9},
            "peak_mib": 3.0,
        }
        for n, (g, ms) in times.items()
    }
    row = {"op": "softmax", "work": "w", "kind": "device", "name": "softmax forward and backward 8x8"}
    row |= {"ceilings": ["device copy"], "providers": providers}
    result = {
        **SOME,
        "experiment": "E17",
        "cells": {"a": {"method": "softmax", "status": "ok", "rows": [row]}},
    }
    results.write_text(tmp_path / "E17.json", json.dumps(result))
    assert summary.op_times(tmp_path).splitlines()[2] == (
        "| softmax 8x8 | 2.00 | 3 / 3 | 1.20 liger-kernel CuTe | 1.11 of device copy |"
    )


def test_projections_have_times_where_steps_are_measured(tmp_path):
    """Of one GPU, and of the eight that share a sequence; those of other cells are of no use."""
    rows = scaling.blocks(tmp_path)[scaling.PAGE]["projections"].splitlines()
    assert rows[5] == "| 8B 16x512 | 8 | 40.32 | 0.00 | 0.093 |  |  |" and "not measured yet" in rows[-1]
    assert sum("131072" in row for row in rows) == sum("524288" in row for row in rows) == 3
    sequence = "one sequence 8B 1x524288, 8 GPUs"
    cells = [
        record("liger", 1, size="FSDP2 8B 16x512, 1 GPU", ms={"median": 500.0}),
        record("liger", 2, size="FSDP2 8B 16x512, 2 GPUs", ms={"median": 900.0}),
        record(scaling.TILED, 1, size=sequence, ms={"median": 95e3}),
        record(scaling.PLANNED, 1, size=sequence, ms={"median": 80e3}),
    ]
    assert {f"{c['method']} @ {c['size']}" for c in cells} <= {c.key for c in scaling.cells(False)}
    results.write_text(tmp_path / "E15.json", json.dumps({**result_of(*cells), "experiment": "E15"}))
    text = scaling.blocks(tmp_path)[scaling.PAGE]["projections"]
    assert "| 8B 16x512 | 64 | 45.36 | 0.00 | 0.913 | 0.913 | 0.55 |" in text
    assert "| 8B 1x524288 on 8 GPUs | 512 | 45.99 | 112.74 | 1.191 | 95.000 | 1.00 |" in text
    assert "| 1B 16x1024 | 64 | 6.78 | 0.00 | 0.139 |  |  |" in text and "a device" in text
    assert all(marker in scaling.PAGE.read_text() for marker in report.markers("projections"))


def test_summaries_are_of_cells_and_rows_that_exist():
    sizes = {name: {cell.size for cell in experiment(name).cells(False)} for name in MODULES}
    assert all(size in sizes[name] for _, name, size in summary.STEPS)
    rows = {
        row.name: {p.name for p in row.providers} for row in suite.rows_of(liger_bench.OPS, Options("cpu"))
    }
    for name, providers in overview.OVERVIEW.values():
        assert providers.keys() - rows[name] <= {"torch eager"}, name
