# SPDX-License-Identifier: BSD-3-Clause
"""The picture of speed over memory."""

import json

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from liger_bench.models import curve as model_curve

GIB = 1024**3


def provider(group, ms, gib, status="ok"):
    return {"group": group, "status": status, "ms": {"median": ms}, "peak_bytes": gib * GIB}


@pytest.fixture
def result(tmp_path):
    providers = {
        "transformers": provider("plain", 40.0, 20),
        "liger-kernel": provider("liger-kernel", 20.0, 8),
        "liger[cuda]": provider("ours", 10.0, 8),
        "liger[cuda], memory 6G, recompute": provider("ours", 16.0, 6),
        "liger[cuda], recompute": provider("ours", 20.0, 7),
        "spoiled": provider("ours", 1.0, 1, "wrong"),
    }
    failed = {"group": "ours", "status": "failed", "reason": "out of memory"}
    rows = [{"batch": 4, "sequence": 16, "providers": {**providers, "failed": failed}}]
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"environment": {}, "rows": rows}))
    return path


def test_points_and_frontier(result):
    found = model_curve.points([json.loads(result.read_text())], (4, 16))
    assert [(gib, speed) for gib, speed, _ in found["ours"]] == [(6, 4.0), (7, 3.2), (8, 6.4)]
    assert [gib for gib, *_ in model_curve.frontier(found["ours"])] == [6, 8]
    assert [name for *_, name in found["plain"]] == ["transformers"]


def test_picture(result, tmp_path):
    picture = tmp_path / "curve.png"
    assert model_curve.main(["4x16", str(result), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    (axes,) = model_curve.draw(model_curve.points([json.loads(result.read_text())], (4, 16)), "t").axes
    assert "planned in 6 GiB, recompute" in [text.get_text() for text in axes.texts]


def with_ranks(result, path, ranks):
    found = json.loads(result.read_text())
    found["rows"][0]["ranks"] = ranks
    path.write_text(json.dumps(found))
    return path


def test_two_ranks(result, tmp_path):
    """Tokens are counted on both ranks, memory on one."""
    found = json.loads(with_ranks(result, tmp_path / "ranks.json", 2).read_text())
    points = model_curve.points([found], (4, 16))
    assert [(gib, speed) for gib, speed, _ in points["ours"]] == [(6, 8.0), (7, 6.4), (8, 12.8)]
    (axes,) = model_curve.draw(points, "t", *model_curve.ranks_of([found], (4, 16))).axes
    assert axes.get_xlabel().endswith("of one rank") and axes.get_ylabel().endswith("of 2 ranks")


def test_one_picture_is_of_one_number_of_ranks(result, tmp_path, capsys):
    other = with_ranks(result, tmp_path / "ranks.json", 2)
    with pytest.raises(SystemExit):
        model_curve.main(["4x16", str(result), str(other), "--output", str(tmp_path / "curve.png")])
    assert "results of [1, 2] ranks in one picture" in capsys.readouterr().err
