"""liger bench --tiles: a tiny model on the CPU with the reference, the engine on a GPU, report and refusals."""

import dataclasses
import json
import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from liger import cli
from liger._core.sm90_plan import TILE_CLASSES
from liger.debug import TileMassCounts, tile_mass_of_logits
from liger_bench import bench_tiles, tiles_report

# Sizes that the engine takes.
TINY = dataclasses.replace(bench_tiles.SELF_TEST, hidden=64, batch=4, steps=3)
# 2 x 95 targets, 1024 classes.
COLUMNS = -(-1024 // TILE_CLASSES)
TILES = 2 * COLUMNS


def test_self_test(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "made" / "tiles.json"
    assert bench_tiles.main(["--self-test", "--every", "2", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["counted_by"] == "reference" and result["environment"]["size"] == "tiles self-test"
    assert result["thresholds"] == [2.0**-12, 2.0**-16, 2.0**-20]
    assert result["size"]["vocab"] == 1024 >= result["tokenizer_entries"] > 300
    assert [record["step"] for record in result["steps"]] == [0, 2, 4, 5]
    for record in result["steps"]:
        assert record["tiles"] == TILES
        assert record["loss"] == pytest.approx(math.log(1024), abs=0.3)
        assert record["shares"] == [below / TILES for below in record["below"]]
    table = path.with_suffix(".md").read_text()
    assert table in capsys.readouterr().out
    assert "| 0 | 6.9" in table and "\n| 5 | " in table and "2^-20" in table
    picture = path.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG")

    path.with_suffix(".png").unlink()
    path.with_suffix(".md").write_text("")
    assert bench_tiles.main(["--from", str(path)]) == 0
    assert path.with_suffix(".md").read_text() == table and path.with_suffix(".png").is_file()


def test_the_counts_are_those_of_the_logits_before_the_step():
    trainee = bench_tiles.Trainee(TINY, "cpu")
    with torch.no_grad():
        trainee.model.lm_head.weight.mul_(30)
    tokens = torch.arange(4 * 96).view(4, 96) % 190  # all in the first tile
    logits = trainee.model(input_ids=tokens).logits.detach()
    expected = tile_mass_of_logits(logits[:, :-1], tokens[:, 1:])
    assert expected.tiles == 3 * COLUMNS and expected.tiles_without_target == 3 * (COLUMNS - 1)
    assert expected.below_without_target[0] > 0
    weight = trainee.model.lm_head.weight.detach().clone()
    loss, counts = trainee.counted_by_the_reference(tokens)
    assert counts == expected
    assert loss == pytest.approx(
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item(),
        rel=1e-4,
    )
    assert not torch.equal(trainee.model.lm_head.weight, weight)
    assert trainee.schedule.get_last_lr()[0] == TINY.learning_rate


def test_sizes():
    small, large = bench_tiles.SIZES["demo"], bench_tiles.SIZES["1b"]
    assert small.steps == large.steps == 2000
    assert (large.vocab, large.hidden, large.layers, large.intermediate) == (128256, 2048, 16, 8192)
    for size in (small, large, TINY):
        # What the engine takes.
        assert size.hidden % 64 == 0 and size.tokens >= 256


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_tiles.Trainee, "step", lambda self, tokens: torch.tensor(torch.nan))
    path = tmp_path / "tiles.json"
    assert bench_tiles.main(["--self-test", "--json", str(path)]) == 1
    assert "the loss of step 0 is nan" in capsys.readouterr().err
    assert len(json.loads(path.read_text())["steps"]) == 1


def test_results_are_written_during_the_run(monkeypatch):
    monkeypatch.setattr(bench_tiles, "SAVE_EVERY", 2)
    saved = []
    batches = torch.randint(1024, (5, TINY.batch, TINY.sequence))
    bench_tiles.train(TINY, "cpu", batches, 1, True, lambda records: saved.append(len(records)))
    assert saved == [2, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--self-test", "--steps", "1"], "--steps is 1, expected at least 2"),
        (["--self-test", "--every", "0"], "--every is 0, expected at least 1"),
        (["--from", "missing.json"], "no such file: missing.json"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert bench_tiles.main(arguments) == 2
    assert f"liger bench --tiles: {message}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_refused_without_the_engine(capsys):
    assert bench_tiles.main([]) == 2
    assert "does not run here: " in (error := capsys.readouterr().err)
    assert "--reference counts on any device" in error


def test_liger_bench_passes_the_arguments_on(capsys):
    assert cli.main(["bench", "--tiles", "--self-test", "--steps", "0"]) == 2
    assert "liger bench --tiles: --steps is 0" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_engine_counts_as_many_tiles(sm90, tmp_path, monkeypatch):
    monkeypatch.setitem(bench_tiles.SIZES, "demo", TINY)
    found = {}
    for name, options in (("engine", []), ("reference", ["--reference"])):
        path = tmp_path / f"{name}.json"
        arguments = ["--every", "1", "--no-plots", "--json", str(path), *options]
        assert bench_tiles.main(arguments) == 0
        found[name] = json.loads(path.read_text())
        assert found[name]["counted_by"] == name
    for ours, exact in zip(found["engine"]["steps"], found["reference"]["steps"], strict=True):
        assert (ours["tiles"], ours["tiles_without_target"]) == (
            exact["tiles"],
            exact["tiles_without_target"],
        )
        assert ours["loss"] == pytest.approx(exact["loss"], rel=1e-2)


# --- report -------------------------------------------------------------------------------------------------------


def record(step, loss, below=0):
    return bench_tiles.record_of(step, loss, TileMassCounts(100, 0, (below, below, 0), (0, 0, 0)))


def test_the_table_has_losses_that_are_evenly_spaced():
    records = [record(i, 12 * math.exp(-i / 50)) for i in range(500)]
    rows = tiles_report.chosen(records)
    assert rows[0] is records[0] and rows[-1] is records[-1]
    assert len(rows) <= tiles_report.TABLE_ROWS
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)) and sum(step < 100 for step in steps) > 10
    flat = [record(i, 3.0) for i in range(4)]
    assert tiles_report.chosen(flat) == [flat[0], flat[3]]
    assert tiles_report.chosen(flat[:1]) == flat[:1]


def test_lines():
    assert tiles_report.threshold_name(2.0**-16) == "2^-16"
    assert tiles_report.line(record(7, 3.5, 25)) == (
        "step     7  loss 3.5000  below: 25.00/25.00/0.00 %, without a target -/-/- %"
    )


def test_a_share_of_no_tiles_is_null():
    made = record(0, 1.0, 25)
    assert made["shares"] == [0.25, 0.25, 0.0] and made["shares_without_target"] == [None] * 3
    pytest.importorskip("matplotlib")
    result = {
        "environment": {"device": "a device"},
        "thresholds": TileMassCounts.thresholds,
        "size": TINY.as_dict(),
        "steps": [made, record(1, 0.5, 30)],
    }
    left, right = tiles_report.picture(result).axes
    assert [list(series.get_ydata()) for series in left.lines] == [[25, 30], [25, 30], [0, 0]]
    assert all(math.isnan(y) for series in right.lines for y in series.get_ydata())
    assert left.xaxis_inverted() and right.xaxis_inverted()
