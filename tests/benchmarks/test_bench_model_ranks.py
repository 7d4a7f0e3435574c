"""``bench_model --own-processes`` and ``--ranks``: a contestant in processes of its own, and the driver that
resumes, limits and compares."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from planned_llama import FEWEST

from liger_bench import bench_model, model_ranks
from liger_bench.processes import rendezvous

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PLAIN, OURS = "transformers", "liger[torch]"


def ok(loss, group="ours", ms=10.0):
    spread = {"median": ms, "q25": ms, "q75": ms, "n": 4}
    return {
        "group": group, "status": "ok", "first_loss": loss, "ms": spread, "host_ms": spread, "peak_bytes": None,
    }  # fmt: skip


@pytest.fixture
def drive(monkeypatch, tmp_path):
    """Runs ``--ranks 2`` with ``results`` {contestant: record, or None for one that is cut off}; returns the
    exit code, the rows and the names that were started."""
    path = tmp_path / "ranks.json"

    def run(results, *arguments, shapes=("2x16",)):
        started = []

        def fake(spec, ranks, seconds, fork):
            assert ranks == 2
            started.append(spec["name"])
            return results[spec["name"]]

        monkeypatch.setattr(model_ranks, "run", fake)
        names = [word for name in (PLAIN, OURS) for word in ("--only", name)]
        code = bench_model.main(
            ["--self-test", "--ranks", "2", *shapes, *names, *arguments, "--json", str(path)]
        )
        return code, json.loads(path.read_text())["rows"] if path.exists() else [], started

    return run


def test_results_are_kept_and_not_measured_again(drive, capsys):
    results = {PLAIN: ok(6.0, "plain"), OURS: ok(6.001)}
    code, (row,), started = drive(results)
    assert code == 0 and started == [PLAIN, OURS]
    assert (row["batch"], row["sequence"], row["ranks"]) == (2, 16, 2)
    assert row["providers"][OURS]["status"] == "ok"
    printed = capsys.readouterr()
    assert (
        f"| {OURS} | 10.0 | 10.0 - 10.0 | 10.0 | 6.4 | - |" in printed.out
        and "FSDP2 on 2 ranks" in printed.out
    )
    assert f"2x16 {OURS}: 10 ms, 6.4 thousand tokens/s" in printed.err
    assert drive(results)[2] == []
    _, rows, started = drive(results, shapes=("2x16", "1x32"))
    assert started == [PLAIN, OURS] and [row["batch"] for row in rows] == [2, 1]


def test_a_failure_is_measured_again_but_out_of_memory_is_not(drive):
    results = {
        PLAIN: {"status": "failed", "reason": "OutOfMemoryError: CUDA out of memory"},
        OURS: {"status": "failed", "reason": "RuntimeError: no"},
    }
    code, (row,), _ = drive(results)
    assert code == 1 and row["providers"][OURS]["group"] == "ours"
    code, (row,), started = drive({OURS: ok(6.0)})
    assert code == 0 and started == [OURS] and row["providers"][OURS]["status"] == "ok"


def test_the_first_losses_are_compared(drive):
    code, (row,), _ = drive({PLAIN: ok(6.0, "plain"), OURS: ok(6.1)})
    assert code == 1
    assert row["providers"][OURS]["status"] == "wrong"
    assert row["providers"][OURS]["reason"] == "loss 6.1, unpatched 6"


def test_the_limit_leaves_contestants_for_the_next_run(drive, capsys):
    code, rows, started = drive({PLAIN: ok(6.0, "plain"), OURS: None}, "--minutes", "1")
    assert code == 0 and started == [PLAIN, OURS]
    assert list(rows[0]["providers"]) == [PLAIN]
    assert f"no time left for 2x16 {OURS}" in capsys.readouterr().err
    assert drive({OURS: ok(6.0)}, "--minutes", "0.001")[2] == []
    code, (row,), started = drive({OURS: ok(6.0)})
    assert started == [OURS] and list(row["providers"]) == [PLAIN, OURS]


def test_a_contestant_that_takes_too_long_is_a_failure(drive):
    code, (row,), _ = drive({PLAIN: ok(6.0, "plain"), OURS: None})
    assert code == 1 and row["providers"][OURS]["reason"] == "not done after 240 s"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--ranks", "0"], "--ranks is 0, expected at least 1"),
        (["--minutes", "3"], "--minutes needs --own-processes or --ranks"),
        (["--ranks", "2", "--graphs"], "cannot be combined"),
        (["--ranks", "2", "--only", "nobody"], "no contestant ['nobody']"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench_model.main(["--self-test", *arguments])
    assert message in capsys.readouterr().err


def test_the_others_are_ended_when_a_rank_fails(monkeypatch):
    monkeypatch.setattr(model_ranks, "STRAGGLER", 0.2)
    codes = "raise SystemExit(3)", "import time; time.sleep(60)"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    start = time.monotonic()
    assert model_ranks._wait(processes, 50)
    assert time.monotonic() - start < 30 and all(p.poll() is not None for p in processes)


def test_ranks_that_take_too_long_are_ended():
    processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])]
    assert not model_ranks._wait(processes, 0.2)
    assert processes[0].poll() is not None


def test_a_process_of_its_own(tmp_path):
    path, name = tmp_path / "own.json", f"{OURS}, memory 1G, recompute, step in backward"
    arguments = ["--self-test", "--own-processes", "2x16", "--memory", "1G", "--optimizer", "in-backward"]
    assert bench_model.main([*arguments, "--only", name, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ranks"] == 1
    assert row["providers"][name]["status"] == "ok" and f"{FEWEST} of 2" in row["providers"][name]["plan"]
    assert name in path.with_suffix(".md").read_text() and "FSDP2" not in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_two_ranks(tmp_path):
    path, planned = tmp_path / "ranks.json", f"{OURS}, memory 1G, recompute"
    arguments = ["--self-test", "--ranks", "2", "2x16", "--memory", "1G", "--json", str(path)]
    arguments += ["--only", PLAIN, "--only", planned]
    assert bench_model.main(arguments) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert list(row["providers"]) == [PLAIN, planned]
    for provider in row["providers"].values():
        assert provider["status"] == "ok" and provider["ms"]["n"] == model_ranks.ROUNDS
    assert row["providers"][planned]["first_loss"] == pytest.approx(
        row["providers"][PLAIN]["first_loss"], rel=1e-5
    )
    assert f"{FEWEST} of 2" in row["providers"][planned]["plan"]


FAILING = """
import json, sys, torch
from pathlib import Path
from liger_bench import model_ranks

def warm_up(self, batches):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

model_ranks.Trainee.warm_up = warm_up
model_ranks._measure_rank(json.loads(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_says_so(tmp_path):
    spec = {
        "size": "8b", "self_test": True, "checkpointing": True, "backends": ["torch"], "entry": {}, "name": OURS,
        "shape": [2, 16],
    }  # fmt: skip
    with rendezvous(1) as (ranks,):
        done = subprocess.run(
            [sys.executable, "-c", FAILING, json.dumps(spec), str(tmp_path / "record.json")],
            env=os.environ | ranks | {"PYTHONPATH": str(BENCHMARKS)},
            timeout=120,
        )
    assert done.returncode == 1
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["status"] == "failed" and "out of memory" in record["reason"]
