# SPDX-License-Identifier: BSD-3-Clause
"""What the pictures of benchmark results show: bars, the message, and the run that a row is from."""

import pytest
import torch

from liger_bench import cli
from liger_bench.reports import overview, plots

pytest.importorskip("matplotlib")


def provider(group, ms, mib, status="ok"):
    return {"group": group, "status": status, "ms": {"median": ms}, "peak_mib": mib}


def record_of(name="softmax forward and backward 8x8", **providers):
    return {
        "op": name.split()[0],
        "name": name,
        "work": name.rpartition(" ")[0],
        "kind": "device",
        "nbytes": 64,
        "ceilings": ["device copy"],
        "contests": [{"baseline": "liger-kernel", "label": "", "ours": []}],
        "providers": {key.replace("_", " "): value for key, value in providers.items()},
    }


def run_of(*records, date="2026-01-01", size="full", commit="abc"):
    facts = {"date": date, "size": size, "commit": commit, "device": "a device", "dtype": "bfloat16"}
    return {"schema": 2, "environment": facts, "rows": list(records)}


BOTH = {"liger[cuda]": provider("ours", 1.0, 64.0), "liger-kernel": provider("liger-kernel", 2.5, 64.5)}


def test_bars_are_ours_and_the_peers_fastest_first_and_a_ceiling_is_a_line():
    record = record_of(
        **BOTH,
        **{
            "liger[cuda] small": provider("ours", 1.5, 32.0),
            "liger[cuda] slow": provider("ours", 1.5, 64.0),
            "quack": provider("other", 0.5, 8.0, "wrong"),
            "torch eager": {"group": "other", "status": "failed"},
            "device copy": provider("ceiling", 0.25, 0.0),
        },
    )
    group = plots.group_of(record, None)
    assert [bar.series for bar in group.bars] == [
        "quack (wrong result)",
        "liger-ops[cuda]",
        "liger-ops[cuda] small",
        "liger-kernel",
    ]
    assert (group.ceiling, group.ceiling_time) == ("device copy", 0.25)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (64.0, 64.5, "2.50x the speed of liger-kernel, the same memory"),
        (64.0, 16.0, "2.50x the speed of liger-kernel, 48 MiB more"),
        (64.0, 2112.0, "2.50x the speed of liger-kernel, 2.0 GiB less"),
        (None, None, "2.50x the speed of liger-kernel"),
    ],
)
def test_the_message_is_speed_and_memory(ours, theirs, words):
    made = {"liger[cuda]": provider("ours", 1.0, ours), "liger-kernel": provider("liger-kernel", 2.5, theirs)}
    assert plots.message(record_of(**made)) == f"softmax forward and backward: {words}"


def test_pictures_are_of_the_newest_whole_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "results").mkdir()
    # A row of the overview, measured three times: last in a run of fewer sizes.
    name, _ = overview.OVERVIEW["swiglu\n16384 x 14336"]
    made = {"liger[cuda] inplace": BOTH["liger[cuda]"], "liger-kernel": BOTH["liger-kernel"]}
    for date, size in (("2026-01-01", "full"), ("2026-01-02", "full"), ("2026-01-03", "quick")):
        result = run_of(record_of(name, **made), date=date, size=size, commit=f"of {date}")
        (tmp_path / "results" / f"{date}.json").write_text(overview.json.dumps(result))
    found = overview.runs(tmp_path / "results")
    assert [r["environment"]["commit"] for r in found] == ["of 2026-01-02", "of 2026-01-01"]
    figures = overview.overview(found)
    title = figures["overview"].get_suptitle().replace("\n", " ")
    assert title == "Forward and backward: 2.50 times the speed of liger-kernel (median)"
    # One question each.
    assert [len(figure.axes) for figure in figures.values()] == [1, 1]
    monkeypatch.setattr(overview, "runs", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["--pictures", str(tmp_path / "picture")]) == 0
    made = {"picture-overview.png", "picture-overview-memory.png", "picture-swiglu.png"}
    assert {path.name for path in tmp_path.glob("*.png")} == made
