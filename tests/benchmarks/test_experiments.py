# SPDX-License-Identifier: BSD-3-Clause
"""The experiments run end to end in tiny sizes on the CPU; their driver resumes, infers, and records
failures."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from experiments import (
    MODULES,
    driver,
    experiment,
    process,
    recomputation,
    report,
    results,
    setting_curves,
    tables,
)
from experiments.cells import Cell, Experiment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Statuses of a cell on this machine: packages of some methods may not be installed.
FINE = {"ok", "missing"}


def run_tiny(folder, cache, *names):
    environment = os.environ | {
        "PYTHONPATH": str(BENCHMARKS),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "experiments", *names, "--tiny", "--out", folder, "--cache", cache]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(folder, name):
    """Every cell is measured, ours among them, and there is a page and, with matplotlib, a picture."""
    result = results.load(results.path_of(folder, name, True), name, True)
    cells = experiment(name).cells(True)
    assert set(result["cells"]) == {cell.key for cell in cells}
    # The kernels of liger-kernel do not run on a CPU.
    bad = {
        k: c["reason"]
        for k, c in result["cells"].items()
        if c["status"] not in FINE and not k.startswith("liger-kernel")
    }
    assert not bad
    assert result["environments"] == [result["environments"][0]]
    assert result["environments"][0]["torch"] == torch.__version__
    page, *images = report.write(folder, name, tiny=True)
    for size in results.ordered(result, "size"):
        assert size in page.read_text() or name in ("E1", "E11", "E15", "E17")
    return result, images


def check_first_losses(result):
    for size in results.ordered(result, "size"):
        losses = {c["method"]: c["first_loss"] for c in results.cells_of(result, size=size, status="ok")}
        assert {"transformers", "liger"} <= set(losses)
        assert losses["liger"] == pytest.approx(losses["transformers"], rel=1e-5)


def check_curves(result):
    (planned,) = results.cells_of(result, method="liger, planned checkpointing")
    assert ", 2 keep all (" in planned["plan"], planned["plan"]
    for size in results.ordered(result, "size"):
        found = setting_curves.verdicts(setting_curves.curves_of(result, size))
        ours = {method: one["agrees"] for method, one in found.items() if method.startswith("liger")}
        assert len(ours) >= 3 and all(ours.values()), ours


def check_plans(result):
    check_first_losses(result)
    plans = [c for c in result["cells"].values() if c["method"].startswith("liger, plan")]
    planned = sum(len(row.memories) for row in recomputation.TINY_ROWS)
    assert len(plans) == planned and all(c["predicted_bytes"] > 0 and sum(c["layers"]) == 2 for c in plans)
    text = experiment("E16").table(result)
    assert all(f"| {c['method']}, {c['size']} | " in text for c in plans)


def check_scaling(result):
    """Methods have the same first loss; ranks send what is predicted, also with the plan of four ranks."""
    cells = [c for c in result["cells"].values() if c["status"] == "ok"]
    for size in {c["size"] for c in cells if c["method"] == "transformers"}:
        check_first_losses({**result, "cells": {c["method"]: c for c in cells if c["size"] == size}})
    assert all(c["sent_bytes"] == pytest.approx(c["predicted_sent_bytes"], rel=0.02, abs=1024) for c in cells)
    sequences = [c for c in cells if c["size"] == "one sequence 8B 1x32, 4 GPUs"]
    tiled, planned = sorted(sequences, key=lambda c: "layers" in c)
    assert planned["layers"][0] < sum(planned["layers"]) and planned["sent_bytes"] < tiled["sent_bytes"]
    assert planned["losses"][:2] == pytest.approx(tiled["losses"][:2], rel=1e-5)
    assert f"liger, tiled MLP, planned on 4: {planned['plan']}." in experiment("E15").table(result)


CHECKS = {"E13": check_curves, "E15": check_scaling, "E16": check_plans}
CHECKS |= dict.fromkeys(("E2", "E3", "E4"), check_first_losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_an_experiment_runs(name, tmp_path):
    run_tiny(tmp_path, tmp_path / "cache", name)
    result, images = check(tmp_path, name)
    assert any(c["status"] == "ok" for c in result["cells"].values())
    assert all(path.stat().st_size > 5000 for path in images)
    CHECKS.get(name, lambda result: None)(result)


@pytest.mark.slow
def test_a_second_run_measures_nothing_again(tmp_path):
    run_tiny(tmp_path, tmp_path / "cache", "E3")
    path = tmp_path / "E3-tiny.json"
    before = path.read_text()
    said = run_tiny(tmp_path, tmp_path / "cache", "E3")
    assert said.splitlines()[-1] == f"E3: complete, {path}" and path.read_text() == before


# --- the driver ---------------------------------------------------------------------------------------------


def fake(monkeypatch, measure, cells):
    """An experiment in place of E3."""
    made = Experiment("E3", "a title", lambda tiny: cells, measure, tables.training, lambda result: {})
    for module in (driver, process):
        monkeypatch.setattr(module, "experiment", lambda name: made)


def fill(folder, **options):
    said = []
    run = driver.Run(folder, folder / "cache", tiny=True, fork=True, **options)
    left = driver.fill(run, ["E3"], said.append)
    path = results.path_of(folder, "E3", True)
    return left, json.loads(path.read_text())["cells"] if path.is_file() else {}, "\n".join(said)


def sizes(method, count, **options):
    return [Cell(method, str(order), order, **options) for order in range(1, count + 1)]


def test_out_of_memory_is_a_result_and_larger_sizes_are_not_tried(monkeypatch, tmp_path):
    def measure(cell, machine):
        (tmp_path / cell.key).touch()
        if cell.order >= 2 and cell.method == "large":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return {"value": cell.order}

    fake(monkeypatch, measure, sizes("large", 4) + sizes("small", 4))
    left, cells, _ = fill(tmp_path)
    assert left == 0
    assert [cells[f"large @ {i}"]["status"] for i in (1, 2, 3, 4)] == ["ok", "oom", "oom", "oom"]
    assert "inferred" not in cells["large @ 2"] and cells["large @ 3"]["inferred"]
    assert not (tmp_path / "large @ 3").exists()
    assert all(cells[f"small @ {i}"]["value"] == i for i in (1, 2, 3, 4))


def test_failures_crashes_and_missing_packages_are_results(monkeypatch, tmp_path):
    def measure(cell, machine):
        if cell.method == "refusing":
            raise ValueError("not with this model\nand more")
        os._exit(7)

    cells = [Cell("refusing", "1"), Cell("crashing", "1"), Cell("absent", "1", needs=("no_such_module",))]
    fake(monkeypatch, measure, cells)
    left, found, said = fill(tmp_path)
    assert left == 0
    assert found["refusing @ 1"]["reason"] == "ValueError: not with this model\nand more"
    assert found["crashing @ 1"]["status"] == "failed" and "exit code 7" in found["crashing @ 1"]["reason"]
    assert found["absent @ 1"]["reason"] == "not installed: no_such_module"
    assert "refusing @ 1: failed (ValueError: not with this model)" in said
    # They are not measured again unless that is asked for.
    monkeypatch.setattr(process, "outcome", lambda *_: {"status": "ok", "again": True})
    assert "again" not in fill(tmp_path)[1]["refusing @ 1"]
    assert fill(tmp_path, retry=True)[1]["refusing @ 1"]["again"]


def test_cells_of_two_gpus(monkeypatch, tmp_path):
    """Each sees one GPU, a cell of two GPUs both; after an error for lack of memory no larger one runs."""

    def measure(cell, machine):
        if cell.key == "b @ 1":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES", "")}

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cells = [*sizes("a", 2), *sizes("b", 2), Cell("both", "1", gpus=2), *sizes("c", 1)]
    fake(monkeypatch, measure, cells)
    left, found, _ = fill(tmp_path, gpus=2, parallel=True)
    assert left == 0 and found["b @ 2"]["inferred"]
    gpus = {key: record["gpu"] for key, record in found.items() if record["status"] == "ok"}
    assert gpus.pop("both @ 1") == "0,1"
    assert set(gpus) == {"a @ 1", "a @ 2", "c @ 1"} and set(gpus.values()) <= {"0", "1"}


def test_cells_of_other_code_are_measured_again(monkeypatch, tmp_path):
    """In their place and with what is known of others, but an old size that lacked memory is tried again."""
    lacks = True

    def measure(cell, machine):
        if lacks and cell.order == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"value": lacks}

    absent = Cell("b", "1", needs=("no_such_module",))
    fake(monkeypatch, measure, [*sizes("a", 2), Cell("b", "1")])
    assert fill(tmp_path)[1]["a @ 2"]["inferred"]
    lacks = False
    assert fill(tmp_path, stale=True)[1]["b @ 1"]["value"]  # of the same code
    monkeypatch.setattr(driver.stale, "digest_of", lambda *_: "other")
    fake(monkeypatch, measure, [*sizes("a", 2), absent])
    assert driver.expected_seconds(absent, [absent], {}) == absent.expected
    left, found, said = fill(tmp_path, stale=True)
    assert found["a @ 2"] == {**found["a @ 2"], "value": False, "code": "other"}
    assert len(json.loads((tmp_path / "E3-tiny.json").read_text())["environments"]) == 1
    # A record is better than none.
    assert left == 1 and found["b @ 1"]["value"] and "not installed: no_such_module" in said


def test_the_same_work_is_measured_once(monkeypatch, tmp_path):
    """In another experiment the record is copied, unless it is of another device, or of a cell that did not
    run alone for one that is to."""
    calls = tmp_path / "calls"

    def measure(cell, machine):
        with calls.open("a") as file:
            file.write(f"{cell.key}, ")
        return {"value": cell.order}

    cells = {"E3": [Cell("a", "other", work="none"), Cell("a", "1", 1.0, work="steps")]}

    def experiment(name):
        return Experiment(name, "a title", lambda tiny: cells[name], measure, tables.training, dict)

    for module in (driver, process):
        monkeypatch.setattr(module, "experiment", experiment)
    monkeypatch.setattr(driver, "MODULES", ("E3", "E4"))
    run = driver.Run(tmp_path, tmp_path / "cache", tiny=True, fork=True)
    driver.fill(run, ["E3"], print)

    def filled(**options):
        """E4 anew, and the cells that were measured for it."""
        cells["E4"] = [Cell("b", "2", 2.0, work="steps", **options)]
        calls.unlink(missing_ok=True)
        (tmp_path / "E4-tiny.json").unlink(missing_ok=True)
        driver.fill(run, ["E4"], print)
        result = json.loads((tmp_path / "E4-tiny.json").read_text())
        return result, calls.read_text() if calls.exists() else ""

    result, measured = filled()
    assert result["cells"]["b @ 2"] == {
        **result["cells"]["b @ 2"],
        "value": 1.0,
        "measured_in": "E3",
        "size": "2",
    }
    assert len(result["environments"]) == 1 and not measured
    assert filled(alone=True)[1] == "b @ 2, "
    run.facts = {**run.facts, "device": "another"}
    assert filled()[1] == "b @ 2, "


@pytest.mark.parametrize("name", MODULES)
def test_records_of_the_same_work_are_alike(name):
    """Cells that name their work are measured by training.measure, but for parts of liger.patch."""
    if any(cell.work for cell in driver.experiment(name).cells(False)):
        assert name in ("E2", "E3", "E4", "E5", "E10", "E14", "E16")


def test_nothing_runs_beside_a_cell_that_is_alone(monkeypatch, tmp_path):
    def measure(cell, machine):
        begin = time.monotonic()
        time.sleep(0.3)
        return {"span": (begin, time.monotonic())}

    fake(monkeypatch, measure, [*sizes("a", 1), Cell("b", "1", alone=True), *sizes("c", 1)])
    assert fill(tmp_path, gpus=2, parallel=True)[0] == 0
    found = fill(tmp_path)[1]
    spans = {key: record["span"] for key, record in found.items()}
    begin, end = spans.pop("b @ 1")
    assert all(other[1] <= begin or other[0] >= end for other in spans.values())
    (one, other) = spans.values()
    assert one[0] < other[1] and other[0] < one[1]
