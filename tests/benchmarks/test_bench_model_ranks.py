# SPDX-License-Identifier: BSD-3-Clause
"""``bench_model --own-processes`` and ``--ranks``: a contestant in processes of its own, and the driver that
resumes and compares."""

import json

import pytest

pytest.importorskip("transformers")

from planned_llama import FEWEST

from liger_bench.models import bench_model
from liger_bench.models import ranks as model_ranks

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


@pytest.fixture
def new_processes(monkeypatch):
    """No forks: an earlier test may have started threads of autograd here, which a fork does not have."""
    monkeypatch.setattr(model_ranks, "may_fork", lambda preload: False)


def test_the_first_losses_are_compared(drive):
    code, (row,), _ = drive({PLAIN: ok(6.0, "plain"), OURS: ok(6.1)})
    assert code == 1
    assert row["providers"][OURS]["status"] == "wrong"
    assert row["providers"][OURS]["reason"] == "loss 6.1, unpatched 6"


def test_a_process_of_its_own(tmp_path, new_processes):
    path, name = tmp_path / "own.json", f"{OURS}, memory 1G, recompute, step in backward"
    arguments = ["--self-test", "--own-processes", "2x16", "--memory", "1G", "--optimizer", "in-backward"]
    assert bench_model.main([*arguments, "--only", name, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ranks"] == 1
    assert row["providers"][name]["status"] == "ok" and f"{FEWEST} of 2" in row["providers"][name]["plan"]
    assert name in path.with_suffix(".md").read_text() and "FSDP2" not in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_two_ranks(tmp_path, new_processes):
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
