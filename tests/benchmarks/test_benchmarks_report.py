# SPDX-License-Identifier: BSD-3-Clause
"""What a benchmark run concludes, contests with peers and targets, and the command that starts it."""

from pathlib import Path

import pytest
from forked_python import python

from liger_bench import OPS, cli, environment, harness, suite
from liger_bench.harness import Options
from liger_bench.reports import goals, report, verdict

ROOT = Path(__file__).parents[2]

# --- verdict ------------------------------------------------------------------------------------------------


def record_of(**providers):
    """providers: name -> (group, ms, MiB)"""
    return {
        "name": "a row",
        "kind": "device",
        "providers": {
            name: {"group": group, "status": "ok", "ms": {"median": ms}, "peak_mib": mib}
            for name, (group, ms, mib) in providers.items()
        },
    }


def judged(record, baseline="base", ours=()):
    return verdict.judge(record, {"baseline": baseline, "label": "", "ours": list(ours)})


def test_verdict_prefers_what_wins_in_both_to_what_is_fastest():
    record = record_of(base=("liger-kernel", 2.0, 100), big=("ours", 1.0, 200), small=("ours", 1.5, 100.5))
    line = judged(record)
    assert (line["ours"], line["wins"], line["faster"], line["no_more_memory"]) == ("small", True, True, True)
    assert line["speedup"] == pytest.approx(2.0 / 1.5)
    line = judged(record, ours=["big"])
    assert (line["ours"], line["wins"], line["faster"], line["no_more_memory"]) == ("big", False, True, False)


def test_verdict_of_the_slower_and_of_no_memory_figures():
    line = judged(record_of(base=("liger-kernel", 2.0, 100), mine=("ours", 2.5, 1)))
    assert (line["wins"], line["faster"], line["no_more_memory"]) == (False, False, True)
    line = judged(record_of(base=("liger-kernel", 2.0, None), mine=("ours", 1.5, None)))
    assert (line["wins"], line["no_more_memory"]) == (True, None)
    assert judged(record_of(mine=("ours", 1.0, 1))) is None
    assert judged(record_of(base=("liger-kernel", 1.0, 1))) is None


def test_the_fastest_peer_is_the_fastest_right_one():
    record = record_of(
        base=("liger-kernel", 2.0, 100),
        quick=("other", 1.5, 300),
        copy=("ceiling", 1.0, 0),
        mine=("ours", 1.2, 200),
    )
    assert judged(record, baseline=harness.FASTEST_PEER)["baseline"] == "quick"
    record["providers"]["quick"]["status"] = "wrong"
    line = judged(record, baseline=harness.FASTEST_PEER)
    assert (line["baseline"], line["faster"], line["wins"]) == ("base", True, False)


# --- targets ------------------------------------------------------------------------------------------------


def test_targets_are_of_rows_that_exist():
    rows = {row.name: row for row in suite.rows_of(OPS, Options("cpu"))}
    for goal in goals.every_goal():
        names = {p.name for p in rows[goal.row].providers}
        assert goal.metric in ("TB/s", "us", goals.COPY) or goal.metric.removeprefix("x ") in names
        assert not goal.exact or goals.EAGER in names


def goal_record(**providers):
    """providers: name -> (ratio to the ceiling, MiB, error of the gradient)"""
    return {
        "name": "a row",
        "kind": "device",
        "nbytes": 4e9,
        "providers": {
            name.replace("_", " "): {
                "group": "other" if name == "torch_eager" else "ours",
                "status": "ok",
                "ms": {"median": 2.0 * ratio},
                "ratios": {"three GEMMs": ratio, "device copy": ratio},
                "peak_mib": mib,
                "errors": {"loss": 1.0, "dweight": error},
            }
            for name, (ratio, mib, error) in providers.items()
        },
    }


def reached(record, *goal, **more):
    (line,) = goals.reached([record], [goals.Goal("a row", *goal, **more)])
    return line


def test_a_target_is_met_by_one_provider_in_all_it_asks():
    record = goal_record(quick=(1.02, 3000, 2e-3), rough=(1.01, 900, 4e-3), torch_eager=(1.3, 9000, 2e-3))
    line = reached(record, "x three GEMMs", 1.03, 1000, exact=True)
    assert line["met"] is False
    assert reached(record, "x three GEMMs", 1.03, 1000)["met"] is True
    record["providers"]["slow"] = goal_record(slow=(1.05, 1000.5, 2.04e-3))["providers"]["slow"]
    # Small and exact but slow comes nearer than what breaks another condition.
    line = reached(record, "x three GEMMs", 1.03, 1000, exact=True)
    assert (line["provider"], line["met"]) == ("slow", False)
    line = reached(record, "x three GEMMs", 1.06, 1000, exact=True)
    assert (line["provider"], line["met"]) == ("slow", True)
    assert line["asked"] == "<= 1.06 x three GEMMs, <= 1000 MiB, as exact as one float32 sum"
    assert line["measured"] == "1.050 x three GEMMs, 1000 MiB, error 1.02x"


def test_a_target_of_memory_relative_to_another_provider():
    record = goal_record(mine=(1.1, 900.5, 2e-3))
    base = goal_record(base=(1.0, 900, 2e-3))["providers"]["base"]
    record["providers"]["base"] = {**base, "group": "ceiling"}
    line = reached(record, "x three GEMMs", 1.2, no_more_than="base")
    assert line["met"] is True and line["measured"] == "1.100 x three GEMMs, 900 of 900 MiB"
    assert line["asked"] == "<= 1.2 x three GEMMs, no more memory than base"
    record["providers"]["mine"]["peak_mib"] = 902
    assert reached(record, "x three GEMMs", 1.2, no_more_than="base")["met"] is False
    assert reached(record, "x three GEMMs", 1.2, no_more_than="gone")["met"] is None


def test_targets_of_speed_and_of_host_time():
    record = goal_record(mine=(1.04, 1, 1e-3))
    assert reached(record, "of copy speed", 0.96)["met"] is True
    assert reached(record, "of copy speed", 0.97)["met"] is False
    assert reached(record, "TB/s", 1.9)["met"] is True and reached(record, "TB/s", 1.95)["met"] is False
    record["providers"]["mine"] = {"group": "ours", "status": "ok", "host_us": {"median": 30.0}}
    assert reached(record, "us", 25)["met"] is False and reached(record, "us", 30)["met"] is True


def test_a_target_that_cannot_be_told_or_was_not_measured():
    record = goal_record(mine=(1.0, None, 1e-3))
    assert reached(record, "x three GEMMs", 1.03, 1000)["met"] is None
    assert reached(record, "x three GEMMs", 1.03, exact=True)["met"] is None
    assert reached(record, "x three GEMMs", 0.9, 1000)["met"] is False
    assert goals.reached([record], [goals.Goal("another row", "us", 1)]) == []
    record["providers"]["mine"]["status"] = "wrong"
    assert goals.reached([record], [goals.Goal("a row", "TB/s", 1)]) == []
    line = {"row": "a row", "asked": ">= 1 TB/s", "provider": "mine", "measured": "2 TB/s", "met": True}
    text = report.markdown(
        {"environment": {}, "rows": [], "verdict": [], "goals": [line, {**line, "met": None}]}
    )
    assert "## Targets: 1 of 2 met" in text and "| a row | >= 1 TB/s | mine | 2 TB/s | **yes** |" in text


# --- the command --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"), [('{"schema": 1}', "results of schema 1"), ("{", "benchmarks/run.py: ")]
)
def test_results_that_cannot_be_read_are_refused(text, words, tmp_path, capsys):
    path = tmp_path / "old.json"
    path.write_text(text)
    assert cli.main(["--from", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_a_copy_without_history_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.delenv("LIGER_COMMIT", raising=False)
    monkeypatch.setattr(environment, "CHECKOUT", tmp_path)
    facts = environment.environment(Options("cpu"))
    assert facts["commit"] is None and facts["modified"] is None


# --- how it starts ------------------------------------------------------------------------------------------


def test_run_py_is_the_command():
    done = python(ROOT / "benchmarks/run.py", "--from", "no-such.json")
    assert done.returncode == 2 and "benchmarks/run.py: no such file" in done.stderr
