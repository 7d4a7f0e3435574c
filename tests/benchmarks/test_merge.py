# SPDX-License-Identifier: BSD-3-Clause
"""Results of several runs as one, and a few rows at a time."""

import json

import pytest

from liger_bench import cli
from liger_bench.reports import merge, report


def provider(ratio, mib=100.0, group="other", **more):
    found = {
        "group": group,
        "status": "ok",
        "ms": {"median": ratio},
        "ratios": {"GEMMs": ratio},
        "peak_mib": mib,
    }
    return {**found, **more}


def result(rows, device="a GPU", **facts):
    facts = {
        "device": device,
        "size": "full",
        "dtype": "bfloat16",
        "date": "now",
        "commit": "a" * 40,
        **facts,
    }
    records = [
        {
            "name": name,
            "op": "op",
            "ceilings": ["GEMMs"],
            "providers": {**p, "GEMMs": provider(1.0, 0, "ceiling")},
        }
        for name, p in rows.items()
    ]
    return {"schema": 2, "environment": facts, "rows": records}


MISSING = {"group": "other", "status": "missing", "reason": "not installed: quack"}


def test_runs_are_merged():
    first = result({"a": {"liger": provider(1.1, group="ours"), "quack": MISSING}}, quack=None)
    second = result(
        {"a": {"liger": provider(1.2, group="ours"), "quack": provider(1.4)}, "b": {}}, quack="0.6.5"
    )
    both = merge.merged([first, second])
    assert [row["name"] for row in both["rows"]] == ["a", "b"]
    providers = both["rows"][0]["providers"]
    assert {n: p["ratios"]["GEMMs"] for n, p in providers.items()} == {
        "liger": 1.1,
        "quack": 1.4,
        "GEMMs": 1.0,
    }
    assert list(providers)[-1] == "GEMMs"
    assert both["environment"]["quack"] == "0.6.5" and len(both["environment"]["runs"]) == 2
    assert merge.merged([first]) == first
    with pytest.raises(ValueError, match="different device: a GPU and another"):
        merge.merged([first, result({}, device="another")])


def test_one_column_per_peer():
    failed = {"group": "other", "status": "failed", "reason": "TypeError: a | b\nmore"}
    wrong = provider(1.5, status="wrong", reason="relative error: dinput 0.04")
    rows = {
        "a": {"x": provider(1.2, group="ours"), "y": provider(1.1, 64.0, "ours"), "p": failed, "r": MISSING},
        "b": {"x": provider(1.2, group="ours"), "p": provider(2.0), "q": wrong},
    }
    lines = report._compared_table(result(rows)["rows"], "GEMMs").splitlines()
    assert lines[0].endswith("peak MiB beyond the inputs. Not installed: r.")
    assert lines[2] == "| row | GEMMs, ms | liger | p | q |"
    assert lines[4] == "| a | 1 | 1.10, 64 | did not run: TypeError: a \\| b |  |"
    assert lines[5] == "| b | 1 | 1.20, 100 | 2.00, 100 | relative error: dinput 0.04 |"


def test_a_few_rows_at_a_time(tmp_path, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, words in zip(files, ("softcap", "smoothing"), strict=True):
        arguments = [
            "--heads",
            "--self-test",
            "--peers",
            "none",
            "--rows",
            words,
            "--json",
            str(file),
            "--no-plots",
        ]
        assert cli.main([*arguments]) == 0
    both = tmp_path / "both.json"
    sources = [str(file) for file in files]
    assert cli.main(["--from", *sources]) == 2
    assert cli.main(["--from", *sources, "--json", str(both), "--no-plots"]) == 0
    names = [row["name"] for row in json.loads(both.read_text())["rows"]]
    assert len(names) == 2 and "softcap" in names[0] and "smoothing" in names[1]
    assert "Times relative to three GEMMs" in both.with_suffix(".md").read_text()
    assert cli.main(["--heads", "--self-test", "--rows", "no such row"]) == 2
    assert "no row has no such row in its name" in capsys.readouterr().err
