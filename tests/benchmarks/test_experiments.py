"""The experiments run end to end in tiny sizes on the CPU; their driver resumes, infers, and records every
failure."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from experiments import (
    MODULES,
    __main__,
    driver,
    experiment,
    process,
    report,
    results,
    sharded_training,
    tables,
)
from experiments.cells import Cell, Experiment, Machine, coarse_first

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Statuses of a cell on this machine: packages of some methods may not be installed.
FINE = {"ok", "missing"}
# Training steps; the others run in slow tests.
QUICK = ("E3",)


def run_tiny(folder, cache, *names):
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "experiments", *names, "--tiny", "--out", folder, "--cache", cache]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(folder, name):
    """Every cell is measured, ours among them, and there is a page and, with matplotlib, a picture."""
    result = results.load(results.path_of(folder, name, True), name, True)
    cells = experiment(name).cells(True)
    assert set(result["cells"]) == {cell.key for cell in cells}
    bad = {k: c["reason"] for k, c in result["cells"].items() if c["status"] not in FINE}
    assert not bad
    assert result["environments"] == [result["environments"][0]]
    assert result["environments"][0]["torch"] == torch.__version__
    page, *images = report.write(folder, name, tiny=True)
    for size in results.ordered(result, "size"):
        assert size in page.read_text() or name in ("E1", "E11")
    return result, images


@pytest.fixture(scope="module")
def tiny_results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiments")
    run_tiny(folder, folder / "cache", *QUICK)
    return folder


@pytest.mark.parametrize("name", QUICK)
def test_an_experiment_runs(name, tiny_results):
    result, images = check(tiny_results, name)
    measured = [c for c in result["cells"].values() if c["status"] == "ok"]
    assert measured
    if images:
        assert all(path.stat().st_size > 5000 for path in images)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODULES if name not in QUICK])
def test_another_experiment_runs(name, tmp_path):
    run_tiny(tmp_path, tmp_path / "cache", name)
    result, _ = check(tmp_path, name)
    assert any(c["status"] == "ok" for c in result["cells"].values())
    if name in ("E2", "E4"):
        check_first_losses(result)
    if name == "E13":
        module = importlib.import_module("experiments.setting_curves")
        for size in results.ordered(result, "size"):
            found = module.verdicts(module.curves_of(result, size))
            ours = {method: one["agrees"] for method, one in found.items() if method.startswith("liger")}
            assert len(ours) >= 4 and all(ours.values()), ours


def test_a_second_run_measures_nothing_again(tiny_results):
    before = (tiny_results / "E3-tiny.json").read_text()
    said = run_tiny(tiny_results, tiny_results / "cache", "E3")
    assert said.splitlines() == [
        *(line for line in said.splitlines() if "missing" in line),
        f"E3: complete, {tiny_results / 'E3-tiny.json'}",
    ]
    assert (tiny_results / "E3-tiny.json").read_text() == before


def check_first_losses(result):
    for size in results.ordered(result, "size"):
        losses = {c["method"]: c["first_loss"] for c in results.cells_of(result, size=size, status="ok")}
        assert {"transformers", "liger"} <= set(losses)
        assert losses["liger"] == pytest.approx(losses["transformers"], rel=1e-5)


def test_training_methods_start_from_the_same_loss(tiny_results):
    check_first_losses(json.loads((tiny_results / "E3-tiny.json").read_text()))


def test_every_part_of_the_ablation_is_in_a_set():
    from experiments import ablation

    sets = ablation.methods()
    assert sets["unpatched"] == () and len(set(sets.values())) == len(sets)
    whole = tuple(ablation.PARTS)
    assert whole in sets.values()
    for part in ablation.PARTS:
        assert (part,) in sets.values()
        assert tuple(p for p in whole if p != part) in sets.values()
    options = ablation.options(("RMSNorm",))
    assert options["rms_norm"] and options["fused_add_rms_norm"]
    assert not options["rope"] and not options["fused_linear_cross_entropy"]


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


@pytest.mark.parametrize("message", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling"])
def test_out_of_memory_of_libraries(message):
    assert process.failure(RuntimeError(message))["status"] == "oom"
    assert process.failure(ValueError("not supported"))["status"] == "failed"


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


def test_a_cell_that_takes_too_long_is_ended(monkeypatch, tmp_path):
    def measure(cell, machine):
        time.sleep(60)

    fake(monkeypatch, measure, sizes("slow", 2, seconds=0.5))
    start = time.monotonic()
    left, cells, _ = fill(tmp_path)
    assert time.monotonic() - start < 30 and left == 0
    assert cells["slow @ 1"]["status"] == cells["slow @ 2"]["status"] == "timeout"
    assert cells["slow @ 2"]["inferred"]


def test_the_limit_of_a_run_leaves_cells_for_the_next(monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "LEAST", 0.0)

    def measure(cell, machine):
        time.sleep(0 if cell.order == 1 else 60)
        return {}

    fake(monkeypatch, measure, sizes("steady", 3, seconds=90))
    left, cells, said = fill(tmp_path, deadline=time.monotonic() + 3)
    assert left == 2 and list(cells) == ["steady @ 1"]
    assert "2 cells left: steady @ 2, steady @ 3" in said


def test_a_cell_that_will_not_fit_the_limit_is_not_started(monkeypatch, tmp_path):
    """Proportional to its size; the smaller cell of another method still fits."""
    monkeypatch.setattr(driver, "LEAST", 0.0)
    cells = [Cell("a", "1", 1), Cell("a", "100", 100), Cell("b", "1", 1), Cell("c", "2", 2)]
    fake(monkeypatch, lambda cell, machine: time.sleep(0.5), cells)
    result = {
        "cells": {"a @ 1": {"status": "ok", "seconds": 2.0}, "c @ 2": {"status": "oom", "seconds": 1.0}}
    }
    assert driver.expected_seconds(result, cells[1], cells) == 200.0
    assert driver.expected_seconds(result, cells[2], cells) == 0.0
    monkeypatch.setattr(process, "outcome", lambda *_: time.sleep(0.5) or {"status": "ok"})
    left, found, _ = fill(tmp_path, deadline=time.monotonic() + 20)
    assert left == 1 and list(found) == ["a @ 1", "b @ 1", "c @ 2"]


def test_methods_and_sizes_can_be_selected(monkeypatch, tmp_path):
    fake(monkeypatch, lambda cell, machine: {}, sizes("a", 2) + sizes("b", 2))
    assert list(fill(tmp_path, only=("b",), sizes=("2",))[1]) == ["b @ 2"]
    with pytest.raises(ValueError, match=r"no method \['c'\] for --only, expected some of \['a', 'b'\]"):
        fill(tmp_path, only=("c",))


def test_cells_run_side_by_side(monkeypatch, tmp_path):
    """One on each GPU; not before a smaller one of the same ladder has ended; one of two GPUs alone."""

    def measure(cell, machine):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        begin = time.monotonic()
        time.sleep(0.5)
        if cell.key == "b @ 1":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"gpu": seen, "from": begin, "to": time.monotonic()}

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cells = [*sizes("a", 2), *sizes("b", 2), Cell("both", "1", gpus=2), *sizes("c", 1)]
    fake(monkeypatch, measure, cells)
    left, found, _ = fill(tmp_path, gpus=2, parallel=True)
    assert left == 0
    records = {key: record for key, record in found.items() if record["status"] == "ok"}
    assert set(records) == {"a @ 1", "a @ 2", "both @ 1", "c @ 1"} and found["b @ 2"]["inferred"]

    def overlap(one, other):
        return records[one]["from"] < records[other]["to"] and records[other]["from"] < records[one]["to"]

    assert not overlap("a @ 1", "a @ 2") and overlap("a @ 2", "c @ 1")
    assert not any(overlap("both @ 1", other) for other in records if other != "both @ 1")
    assert {record["gpu"] for key, record in records.items() if key != "both @ 1"} == {"0", "1"}
    assert records["both @ 1"]["gpu"] == ""


@pytest.mark.parametrize(("fails", "status"), [(None, "ok"), (0, "oom"), (1, "oom")])
def test_ranks_of_a_cell_are_forked(monkeypatch, tmp_path, fails, status):
    """The first rank writes the record, or the one that fails: the others then do not wait for it."""

    def measure(cell, machine):
        sharded_training.start(machine)
        if dist.get_rank() == fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        total = torch.ones(())
        dist.all_reduce(total)
        dist.destroy_process_group()
        return {"ranks": int(total)}

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    fake(monkeypatch, measure, [Cell("two ranks", "1", gpus=2)])
    left, cells, _ = fill(tmp_path)
    assert left == 0
    record = cells["two ranks @ 1"]
    assert record["status"] == status and record.get("ranks") == (2 if fails is None else None)


def test_results_of_another_experiment_are_refused(tmp_path):
    path = tmp_path / "E3.json"
    path.write_text('{"schema": 1, "experiment": "E4"}')
    with pytest.raises(ValueError, match="schema 1 of E4, expected 1 of E3"):
        results.load(path, "E3", False)


def test_sweeps_have_points_over_their_range_first():
    assert coarse_first([1, 2, 3, 4, 5]) == [1, 3, 5, 2, 4]


def test_arguments(capsys, tmp_path):
    assert __main__.main(["E99"]) == 2
    assert "no E99, expected some of E" in capsys.readouterr().err
    assert __main__.main([]) == 2
    assert __main__.main(["E3", "--list", "--tiny", "--out", str(tmp_path)]) == 0
    assert "liger @ 1x16: -" in capsys.readouterr().out
    assert __main__.main(["--list"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == list(MODULES)
    if not torch.cuda.is_available():
        assert __main__.main(["E3", "--out", str(tmp_path)]) == 2
        assert "--tiny" in capsys.readouterr().err


def test_tokens_are_those_of_the_demo_and_kept(tmp_path):
    from experiments import text

    machine = Machine("cpu", True, tmp_path)
    first = text.batches(machine, 512, 2, 3, 8)
    assert first.shape == (2, 3, 8) and first.max() < 512 and first.unique().numel() > 10
    (path,) = tmp_path.glob("tokens-*.pt")
    written = path.stat().st_mtime_ns
    assert torch.equal(text.batches(machine, 512, 2, 3, 8), first)
    assert path.stat().st_mtime_ns == written


RANKS = """
import sys
import torch
import torch.distributed as dist
from experiments import process, sharded_training
from experiments.cells import Cell, Experiment

def measure(cell, machine):
    sharded_training.start(machine)
    if dist.get_rank() == 1:
        raise torch.OutOfMemoryError("of rank 1")
    dist.barrier()

made = Experiment("E3", "", None, measure, None, None)
process.experiment = lambda name: made
process.run("E3", Cell("m", "1", gpus=2), sys.argv[1], True, sys.argv[1], True)
"""


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_alone_ends_the_others(tmp_path):
    script, path = tmp_path / "ranks.py", tmp_path / "record.json"
    script.write_text(RANKS)
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS), "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, path]
    subprocess.run([sys.executable, *launch], env=environment, capture_output=True, timeout=120)
    record = json.loads(path.read_text())
    assert record["status"] == "oom" and record["reason"] == "OutOfMemoryError: of rank 1"
