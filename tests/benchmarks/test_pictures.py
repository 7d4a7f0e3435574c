# SPDX-License-Identifier: BSD-3-Clause
"""The pictures of benchmark results."""

import json

import pytest
import torch

from liger_bench import cli
from liger_bench.reports import overview

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


def test_pictures_are_of_the_newest_whole_runs(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    # A row of the overview, measured three times: last in a run of fewer sizes.
    name, _ = overview.OVERVIEW["swiglu\n16384 x 14336"]
    made = {"liger[cuda] inplace": BOTH["liger[cuda]"], "liger-kernel": BOTH["liger-kernel"]}
    for date, size in (("2026-01-01", "full"), ("2026-01-02", "full"), ("2026-01-03", "quick")):
        result = run_of(record_of(name, **made), date=date, size=size, commit=f"of {date}")
        (tmp_path / "results" / f"{date}.json").write_text(json.dumps(result))
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


def trained(group, ms, gib, status="ok"):
    return {"group": group, "status": status, "ms": {"median": ms}, "peak_bytes": gib << 30}


def test_speed_over_memory(tmp_path):
    providers = {
        "transformers": trained("plain", 40.0, 20),
        "liger-kernel": trained("liger-kernel", 20.0, 8),
        "liger[cuda]": trained("ours", 10.0, 8),
        "liger[cuda], memory 6G, recompute": trained("ours", 16.0, 6),
        "liger[cuda], recompute": trained("ours", 20.0, 7),
        "spoiled": trained("ours", 1.0, 1, "wrong"),
    }
    failed = {"group": "ours", "status": "failed", "reason": "out of memory"}
    rows = [{"batch": 4, "sequence": 16, "providers": {**providers, "failed": failed}}]
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"environment": {}, "rows": rows}))
    pytest.importorskip("transformers")
    from liger_bench.models import curve as model_curve

    picture = tmp_path / "curve.png"
    assert model_curve.main(["4x16", str(path), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    (axes,) = model_curve.draw(model_curve.points([json.loads(path.read_text())], (4, 16)), "t").axes
    assert "planned in 6 GiB, recompute" in [text.get_text() for text in axes.texts]
