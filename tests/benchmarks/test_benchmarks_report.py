# SPDX-License-Identifier: BSD-3-Clause
"""What a benchmark run concludes, contests with peers and targets, and the command that starts it."""

from pathlib import Path

import pytest
from forked_python import python

from liger_bench import OPS, harness, suite
from liger_bench.harness import Options
from liger_bench.reports import goals, verdict

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


@pytest.mark.parametrize(
    ("metric", "met", "missed", "limits"),
    [
        ("x three GEMMs", 1.2, 1.0, {"no_more_than": "base"}),
        ("of copy speed", 0.96, 0.97, {}),
        ("TB/s", 1.9, 1.95, {}),
        ("x three GEMMs", 1.2, 1.0, {"mib": 900}),
    ],
)
def test_targets_of_every_kind(metric, met, missed, limits):
    record = goal_record(mine=(1.04, 900.5, 2e-3))
    base = goal_record(base=(1.0, 900, 2e-3))["providers"]["base"]
    record["providers"]["base"] = {**base, "group": "ceiling"}
    assert reached(record, metric, met, **limits)["met"] is True
    assert reached(record, metric, missed, **limits)["met"] is False
    for mib, expected in ((902, False), (None, None)):
        record["providers"]["mine"]["peak_mib"] = mib
        assert reached(record, metric, met, **limits)["met"] is (expected if limits else True)


# --- how it starts ------------------------------------------------------------------------------------------


def test_run_py_is_the_command():
    done = python(ROOT / "benchmarks/run.py", "no_such_op")
    assert done.returncode == 2 and "benchmarks/run.py: unknown op no_such_op" in done.stderr
