# SPDX-License-Identifier: BSD-3-Clause
"""The benchmarks of whole training steps run in tiny sizes, and report a wrong loss as such."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from planned_llama import FEWEST

from liger_bench.models import bench_model
from liger_bench.models import contestants as model_contestants
from liger_bench.models import offload as model_offload
from liger_bench.models import ranks as model_ranks
from liger_bench.models import report as model_report
from liger_bench.models import sizes as model_sizes
from liger_bench.models import trainee as model_trainee
from liger_bench.models.contestants import Contestant

TINY = replace(model_sizes.SELF_TEST, shapes=((1, 8),), rounds=3)
PLAIN, OURS = "transformers", "liger[torch]"


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


@pytest.mark.slow
def test_adapters(tmp_path):
    pytest.importorskip("peft")
    path = tmp_path / "model.json"
    assert bench_model.main(["--self-test", "2x16", "--lora", "4", "--json", str(path)]) == 0
    (record,) = json.loads(path.read_text())["rows"]
    # The kernels of liger-kernel do not run on a CPU.
    providers = {name: p["status"] for name, p in record["providers"].items() if name != "liger-kernel"}
    assert providers == dict.fromkeys(("transformers", "liger[torch]", "liger[torch], layers of PEFT"), "ok")


def test_offloaded_inputs_keep_the_bits(tmp_path, capsys):
    path = tmp_path / "r.json"
    settings = ["--setting", "device", "--setting", "offload, release"]
    assert model_offload.main(["--self-test", "2x16", *settings, "--steps", "1", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["same"] and (row["batch"], row["sequence"]) == (2, 16)
    assert row["device"]["gradient_bits"] == row["offload, release"]["gradient_bits"]
    assert row["device"]["tokens_per_second"] > 0 and "offloaded to" in row["offload, release"]["plan"]
    assert "2x16 same bits: True" in capsys.readouterr().out


def test_other_results_are_seen(monkeypatch):
    """Other bits with inputs in host memory, and another first loss of ranks."""
    monkeypatch.setattr(model_offload, "_digest", lambda tensors, seen=[]: seen.append(1) or len(seen))
    settings = ["--setting", "device", "--setting", "offload"]
    assert model_offload.main(["--self-test", "2x16", *settings, "--steps", "1"]) == 1
    losses = {PLAIN: ("plain", 6.0), OURS: ("ours", 6.1), "liger-kernel": ("liger-kernel", 6.001)}
    providers = {n: {"group": g, "status": "ok", "first_loss": loss} for n, (g, loss) in losses.items()}
    model_ranks._compare({"providers": providers})
    assert [p["status"] for p in providers.values()] == ["ok", "wrong", "ok"]
    assert providers[OURS]["reason"] == "loss 6.1, unpatched 6"


@pytest.fixture
def new_processes(monkeypatch):
    """No forks: an earlier test may have started threads of autograd here, which a fork does not have."""
    monkeypatch.setattr(model_ranks, "may_fork", lambda preload: False)


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
