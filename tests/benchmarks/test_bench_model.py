# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of whole training steps runs in tiny sizes, and reports wrong and failing contestants as
such."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from planned_llama import FEWEST
from transformers.models.llama import modeling_llama

import liger
from liger_bench.models import bench_model
from liger_bench.models import contestants as model_contestants
from liger_bench.models import report as model_report
from liger_bench.models import sizes as model_sizes
from liger_bench.models import trainee as model_trainee
from liger_bench.models.contestants import Contestant

TINY = replace(model_sizes.SELF_TEST, shapes=((1, 8),), rounds=3)


def contestant(name, prepare=lambda model: model, group="other", **settings):
    return Contestant(name, group, prepare, **settings)


def measure(monkeypatch, *contestants):
    plain = contestant("plain", group="plain")
    monkeypatch.setattr(model_contestants, "contestants", lambda backends, compile: [plain, *contestants])
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
        assert ours["ms"]["n"] == model_sizes.SELF_TEST.rounds
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
    assert f"{FEWEST} of 2 LlamaDecoderLayer recomputed" in capsys.readouterr().err


def test_a_recipe_that_is_off_is_not_used():
    size, kinds = model_sizes.size_of("qwen3-4b", self_test=True), []
    for made in model_contestants.without_recipes(["torch"]):
        trainee = model_trainee.Trainee(made, size, "cpu")
        trainee.build()
        report = liger.transformers.patch_report(trainee.model)
        kinds.append({"fused_add_rms_norm", "qk_norm_rope"} & set(report.replaced.values()))
    assert kinds == [{"qk_norm_rope"}, {"fused_add_rms_norm"}, set()]


@pytest.mark.parametrize("name", model_sizes.SIZES)
def test_sizes_are_those_of_their_models(name):
    """Parameters in billions, as their authors count them; of the mixture a twelfth of the layers."""
    transformers = pytest.importorskip("transformers")
    size = model_sizes.size_of(name)
    config = transformers.AutoConfig.for_model(size.family, **{"tie_word_embeddings": True, **size.config})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    billions = {"1b": 1.24, "8b": 8.03, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "gemma3-1b": 1.0}
    billions["qwen3-moe"] = 0.622 + (30.53 - 0.622) / 12
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions[name], abs=0.006)


def test_no_gradient_is_left_by_steps_in_the_backward():
    """One optimizer has the parameters of all of them."""
    after = []
    for name in ("adamw", "in-backward"):
        (made,) = model_contestants.with_optimizers([contestant("plain")], [name])
        trainee = model_trainee.Trainee(made, TINY, "cpu")
        trainee.build()
        tokens = torch.arange(8).view(1, 8)
        for _ in range(3):
            loss = trainee.call(input_ids=tokens, labels=tokens).loss
            loss.backward()
            freed = all(p.grad is None for p in trainee.model.parameters())
            assert freed == (name == "in-backward")
            trainee.optimizer.step()
            trainee.optimizer.zero_grad()
        weights = sum(p.nbytes for p in trainee.model.parameters())
        assert 3 * weights < trainee.idle_bytes() < 3 * weights + 10_000
        after.append([p.detach() for p in trainee.model.parameters()])
    for one, other in zip(*after, strict=True):
        assert torch.equal(one, other)


def test_ways_of_small_batches():
    names = [c.name for c in model_contestants.entered(TINY, ["cuda"], small=True)]
    assert names == [
        *("transformers", "transformers, compiled", "liger[cuda]", "liger[cuda], compiled"),
        *("transformers, reduce-overhead", "liger[cuda], reduce-overhead", "liger[cuda], CUDA graph"),
    ]
    (graph,) = (c for c in model_contestants.entered(TINY, ["torch"], small=True) if c.captured)
    trainee = model_trainee.Trainee(graph, TINY, "cpu")
    trainee.attempt(trainee.build)
    assert trainee.failure == (
        "failed",
        "ValueError: liger.transformers.graph_step: the model is on cpu, expected one CUDA device",
    )


def test_steps_of_reduce_overhead(monkeypatch):
    """Compiled without CUDA graphs; the loss is a copy, since the next step overwrites the output."""
    monkeypatch.setattr(
        model_contestants, "compiled", lambda model, mode: model if mode == "reduce-overhead" else None
    )
    record = measure(monkeypatch, contestant("reduced", model_contestants.reduce_overhead))
    provider = record["providers"]["reduced"]
    assert provider["status"] == "ok"
    assert provider["first_loss"] == record["providers"]["plain"]["first_loss"]


def test_a_wrong_loss_is_seen(monkeypatch):
    def spoil(model):
        with torch.no_grad():
            model.model.norm.weight.mul_(20)
        return model

    record = measure(monkeypatch, contestant("spoiled", spoil, "ours"))
    assert record["providers"]["spoiled"]["status"] == "wrong"
    assert model_report.verdict(record) is None
    assert "spoiled (WRONG LOSS)" in model_report.markdown({}, [record], "a model")


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


def test_verdict_compares_with_the_best_of_each():
    def provider(group, ms, gib):
        return {"group": group, "status": "ok", "ms": {"median": ms}, "peak_bytes": gib * model_report.GIB}

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
    assert model_report.verdict(record) == "mine: 1.250x the tokens/s of fast, 0.500x the memory of small"
    assert model_report.tokens_per_second(record, record["providers"]["mine"]) == 500_000


@pytest.mark.slow
def test_adapters(tmp_path):
    pytest.importorskip("peft")
    path = tmp_path / "model.json"
    assert bench_model.main(["--self-test", "2x16", "--lora", "4", "--json", str(path)]) == 0
    (record,) = json.loads(path.read_text())["rows"]
    providers = {name: p["status"] for name, p in record["providers"].items() if p["status"] != "missing"}
    assert providers == dict.fromkeys(("transformers", "liger[torch]", "liger[torch], layers of PEFT"), "ok")
