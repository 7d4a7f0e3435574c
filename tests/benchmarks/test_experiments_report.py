# SPDX-License-Identifier: BSD-3-Clause
"""Tables and the page of the experiments, from results that are made here."""

import json

import pytest

pytest.importorskip("transformers")

import liger_bench
from experiments import (
    MODULES,
    experiment,
    long_context,
    ops,
    report,
    results,
    scaling,
    sharded_mlp,
    summary,
    tables,
)
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
        "liger, the fastest form at each size, vs. transformers: 1.00 times the tokens/s in 1.00 of the memory."
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
    assert text.count(summary.NOT_MEASURED) == len(MODULES) - 1
    assert text.count("| 2x1024 | OOM |") == 1
    assert "Data: [E3.json](../E3.json)." in text and "commit 012345678" in text
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert 100 < max(map(len, prose)) <= 120
    for image in (page.parent / "images").glob("*.png"):
        assert f"(images/{image.name})" in text


@pytest.fixture
def known_code(monkeypatch):
    """Records are of this code, but for those that say ``code="old"``."""
    monkeypatch.setattr(summary.stale, "is_stale", lambda name, cell: cell.get("code") == "old")


def at(size, method, status="ok", **values):
    return {**record(method, 1, status, size=size, **values), "environment": 0}


def steps_of(tmp_path, name, *records):
    """The lines of the table of steps, and the line below it."""
    cells = {f"{r['method']} @ {r['size']}": r for r in records}
    results.write_text(tmp_path / f"{name}.json", json.dumps({**SOME, "experiment": name, "cells": cells}))
    text, machines = summary.steps(tmp_path)
    assert tables.environments(machines) == "device a device, torch 2.11, commit 012345678"
    table, behind = text.split("\n\n")
    return table.splitlines()[2:], behind


def test_summaries_name_what_failed_and_what_is_wrong(tmp_path, known_code):
    """A method that fails has a word, a wrong loss is no speed to compare with, what is faster is said."""
    size = "Llama-3.2-1B, full 4x8192"
    records = [at(size, "transformers"), at(size, "liger-kernel", first_loss=5.5, tokens_per_second=9e3)]
    records += [
        at(size, "liger", tokens_per_second=2e3),
        at(size, "transformers, compiled", tokens_per_second=3e3),
    ]
    other = "Qwen3-1.7B, full 4x8192"
    records += [at(other, "liger", "oom"), at(other, "liger-kernel", "failed"), at(other, "transformers")]
    rows, behind = steps_of(tmp_path, "E14", *records)
    assert rows == [
        "| Llama-3.2-1B, 4 x 8192 | 1.0k, 1.0 GiB | 3.0k, 1.0 GiB | 9.0k, 1.0 GiB, wrong loss | 2.0k, 1.0 GiB |",
        "| Qwen3-1.7B, 4 x 8192 | 1.0k, 1.0 GiB |  | fails | out of memory |",
    ]
    assert behind == (
        "Where liger is behind: Llama-3.2-1B, 4 x 8192: transformers, compiled has 50% more tokens/s."
    )


def test_rows_of_earlier_code_are_marked(tmp_path, known_code):
    records = [at("4x8192", "transformers", code="old"), at("4x8192", "liger"), at("32x1024", "liger")]
    rows, behind = steps_of(tmp_path, "E16", *records)
    assert rows[0].startswith(r"| Llama-3.2-1B, 4 x 8192, a plan\* | 1.0k")
    assert behind.endswith(rf" {summary.OF_EARLIER}")
    rows, behind = steps_of(tmp_path, "E16", *records[1:])
    assert "*" not in rows[0] + behind


def test_the_newest_torch_has_a_folder_of_its_own(tmp_path, known_code):
    assert summary.newest(tmp_path) == summary.NOT_MEASURED
    folder = tmp_path / summary.NEWEST
    folder.mkdir()
    steps_of(folder, "E14", at("Llama-3.2-1B, full 4x8192", "liger"))
    assert "| Llama-3.2-1B, 4 x 8192 |  |  |  | 1.0k, 1.0 GiB |" in summary.newest(tmp_path)


def test_the_verdict_on_micro_batches():
    sizes = [(f"1B, micro-batch {b}x8192", b) for b in (2, 8)]
    cells = [
        record("liger", order, size=size, tokens_per_second=speed)
        for (size, order), speed in zip(sizes, (1e3, 1.1e3), strict=True)
    ]
    part = {"cells": {c["size"]: c for c in cells}}
    assert long_context.verdict(part).startswith(
        "Does the larger micro-batch pay? Yes, +10.0% from the smallest to the largest."
    )
    cells[1]["tokens_per_second"] = 1e3
    assert "pay? No, +0.0%" in long_context.verdict(part)


def test_a_tiled_mlp_that_is_larger_is_named():
    found = {"regular": 640.0, "liger, tiled": 656.0, "liger, plain": 600.0}
    cell = {"method": "zero3", "size": "2048 tokens", "order": 1, "status": "ok"}
    cell["contestants"] = {n: {"status": "ok", "ms": 1.0, "peak_mib": m} for n, m in found.items()}
    lines = sharded_mlp.table({"cells": {"a": cell}}).splitlines()
    assert lines[-1] == "Larger than the regular MLP: zero3, 2048 tokens: liger, tiled by 2%."


def test_summaries_have_the_fastest_form(tmp_path, known_code):
    """Of steps that are measured; of ops the speed relative to liger-kernel as users call it."""
    size = "4x8192"
    rows, _ = steps_of(
        tmp_path,
        "E16",
        at(size, "liger", tokens_per_second=9e3),
        at(size, "liger, plan", tokens_per_second=1e4),
        at(size, "liger-kernel", "oom"),
    )
    assert rows == ["| Llama-3.2-1B, 4 x 8192, a plan |  |  | out of memory | 10.0k, 1.0 GiB |"]
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
