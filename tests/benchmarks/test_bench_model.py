"""The benchmark of whole training steps runs in tiny sizes, and reports wrong and failing contestants as such."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from transformers.models.llama import modeling_llama

from liger_bench import bench_model
from liger_bench.model_contestants import Contestant

TINY = replace(bench_model.SELF_TEST, shapes=((1, 8),), rounds=3)


def contestant(name, prepare=lambda model: model, group="other", **settings):
    return Contestant(name, group, prepare, **settings)


def measure(monkeypatch, *contestants):
    plain = contestant("plain", group="plain")
    monkeypatch.setattr(bench_model, "contestants", lambda backends, compile: [plain, *contestants])
    (record,) = bench_model.measure(TINY, "cpu", [])
    return record


def test_self_test(tmp_path, capsys):
    path = tmp_path / "model.json"
    assert bench_model.main(["--self-test", "2x16", "1x24", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["environment"]["torch"] == torch.__version__
    records = result["rows"]
    assert [(record["batch"], record["sequence"]) for record in records] == [(2, 16), (1, 24)]
    for record in records:
        plain, ours = record["providers"]["transformers"], record["providers"]["liger[torch]"]
        assert plain["status"] == ours["status"] == "ok"
        assert ours["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-5)
        assert ours["ms"]["n"] == bench_model.SELF_TEST.rounds
        assert 0 < ours["host_ms"]["median"] <= ours["ms"]["median"]
    printed = capsys.readouterr().out
    assert "## B=2 T=16" in printed and "liger[torch]: " in printed
    assert path.with_suffix(".md").read_text() in printed


def test_planned_checkpointing(tmp_path, capsys):
    path = tmp_path / "model.json"
    names = ["transformers"]
    for method in ("memory 1G", "no checkpointing"):
        names += [f"liger[torch], {method}", f"liger[torch], {method}, recompute"]
    arguments = ["--memory", "1G", "--memory", "none", *(word for name in names for word in ("--only", name))]
    assert bench_model.main(["--self-test", "2x16", *arguments, "--json", str(path)]) == 0
    (record,) = json.loads(path.read_text())["rows"]
    assert list(record["providers"]) == names
    for provider in record["providers"].values():
        assert provider["status"] == "ok"
    assert "0 of 2 LlamaDecoderLayer recomputed" in capsys.readouterr().err


@pytest.mark.parametrize("text, memory", [("auto", "auto"), ("none", None), ("0.5", 0.5), ("1.5G", 3 << 29)])
def test_memory_argument(text, memory):
    assert bench_model._memory(text) == (text, memory)


@pytest.mark.parametrize("text", ["60", "much", "0", "-1G"])
def test_bad_memory_argument(text, capsys):
    with pytest.raises(SystemExit):
        bench_model.main(["--self-test", f"--memory={text}"])
    assert f"'{text}' is not auto, none, a share in (0, 1] or GiB" in capsys.readouterr().err


def test_without_checkpointing(capsys):
    arguments = ["--self-test", "--no-checkpointing", "2x16"]
    for name in ("transformers", "liger[torch]", "liger[torch], recompute"):
        arguments += ["--only", name]
    assert bench_model.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "without checkpointing" in printed
    assert [line.split(" | ")[0] for line in printed.splitlines() if line.startswith("| ")][1:] == [
        "| transformers",
        "| liger[torch]",
        "| liger[torch], recompute",
    ]


def test_an_unknown_contestant_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_model.main(["--self-test", "--only", "liger[torch], recompute"])
    assert "no contestant" in capsys.readouterr().err


def test_a_wrong_loss_is_seen(monkeypatch):
    def spoil(model):
        with torch.no_grad():
            model.model.norm.weight.mul_(20)
        return model

    record = measure(monkeypatch, contestant("spoiled", spoil, "ours"))
    assert record["providers"]["spoiled"]["status"] == "wrong"
    assert bench_model.verdict(record) is None
    assert "spoiled (WRONG LOSS)" in bench_model.markdown({}, [record])


def test_a_failure_is_a_result(monkeypatch):
    def fail(model):
        raise RuntimeError("no such kernel\nand more")

    record = measure(
        monkeypatch, contestant("failing", fail), contestant("absent", needs=("no_such_module",))
    )
    assert record["providers"]["failing"]["status"] == "failed"
    assert record["providers"]["absent"] == {
        "group": "other", "status": "missing", "reason": "not installed: no_such_module",
    }  # fmt: skip
    printed = bench_model.markdown({}, [record])
    assert "| failing | failed: RuntimeError: no such kernel |" in printed and "absent" not in printed


def test_what_a_contestant_replaces_in_the_module_is_its_own(monkeypatch):
    original, calls = modeling_llama.apply_rotary_pos_emb, []

    def replace_global(model):
        modeling_llama.apply_rotary_pos_emb = lambda *args, **kwargs: (
            calls.append(1) or original(*args, **kwargs)
        )
        return model

    record = measure(monkeypatch, contestant("replacing", replace_global))
    assert modeling_llama.apply_rotary_pos_emb is original
    # Two layers, each run again in the backward.
    assert len(calls) == 4 * (TINY.warm_up + TINY.rounds * TINY.burst)
    assert record["providers"]["replacing"]["status"] == record["providers"]["plain"]["status"] == "ok"


def test_idle_bytes_count_shared_memory_once():
    trainee = bench_model.Trainee(contestant("plain"), TINY, "cpu")
    trainee.attempt(trainee.build)
    trainee.attempt(trainee.warm_up, [torch.zeros(1, 8, dtype=torch.int64)])
    weights = sum(p.nbytes for p in trainee.model.parameters())  # tied ones are listed once
    assert 3 * weights < trainee.idle_bytes() < 3 * weights + 10_000


def test_verdict_compares_with_the_best_of_each():
    def provider(group, ms, gib):
        return {
            "group": group,
            "status": "ok",
            "ms": {"median": ms},
            "peak_bytes": gib * bench_model.GIB,
        }

    record = {
        "batch": 4,
        "sequence": 1000,
        "providers": {
            "fast": provider("other", 10.0, 5.0),
            "small": provider("other", 20.0, 3.0),
            "mine": provider("ours", 8.0, 1.5),
            "slow": provider("ours", 30.0, 1.0),
        },
    }
    assert bench_model.verdict(record) == "mine: 1.250x the tokens/s of fast, 0.500x the memory of small"
    assert bench_model.tokens_per_second(record, record["providers"]["mine"]) == 500_000


def test_bad_arguments(capsys):
    with pytest.raises(SystemExit):
        bench_model.main(["--self-test", "4by8"])
    assert "'4by8' is not BATCHxTOKENS" in capsys.readouterr().err
