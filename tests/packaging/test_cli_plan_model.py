# SPDX-License-Identifier: BSD-3-Clause
"""``liger plan --model``."""

import io
import json
import ssl
import urllib.error
import urllib.request

import pytest

pytest.importorskip("transformers")
from huggingface_hub import constants
from planned_llama import LLAMA_1B
from transformers import AutoConfig

import liger_cli as cli


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_1B))
    return str(path)


def test_table(config, capsys):
    assert cli.main(["plan", "--model", config]) == 0
    out = capsys.readouterr().out
    assert "llama, 16 layers, bfloat16: saved bytes per token" in out
    (total,) = [line.split() for line in out.splitlines() if line.startswith("all layers")]
    # Per layer: two norms of x with rstd; q, k, v; output and lse of the attention; gate and up.
    kept = 2 * (2 * 2048 + 4) + 2 * (2048 + 2 * 512) + 2 * 2048 + 4 * 32 + 2 * 2 * 8192
    remade = 2 * 2 * 2048 + 2 * 8192
    assert total[2:] == [f"{16 * (kept + remade):,}", f"{16 * kept:,}"]


def test_json_and_dtype(config, capsys):
    results = []
    for dtype in ("bf16", "fp32"):
        assert cli.main(["plan", "--model", config, "--json", "--dtype", dtype]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0]["recompute"] == sum(row["recompute"] for row in results[0]["rows"])
    # Statistics are float32 in both.
    assert results[1]["plain"] == 2 * results[0]["plain"] - 16 * 4 * (2 + 32)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"model_type": "gpt2", "n_layer": 1}, "no decoder layer of GPT2LMHeadModel"),
        ({"hidden_size": 64}, "no model_type"),
        (5, "no model_type"),
        ({"model_type": "nope"}, "transformers has no model_type 'nope'"),
        ({"model_type": "t5"}, "t5 is no causal language model of transformers"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size"),
        (
            {"model_type": "llama", "hidden_act": "nope"},
            "no model can be built from the configuration: 'nope'",
        ),
        ({"model_type": "llama", "num_attention_heads": 0}, "no model can be built from the configuration: "),
        (
            {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": -3},
            "no model can be built from the configuration: ",
        ),
        (
            {"model_type": "llama", "num_hidden_layers": 1, "intermediate_size": -3},
            "no model can be built from the configuration: ",
        ),
    ],
)
def test_other_models(settings, message, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    assert cli.main(["plan", "--model", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "glm4v"])
def test_text_decoder_of_an_image_text_model(model_type, tmp_path, capsys):
    """The layers of the vision tower of Qwen2.5-VL and GLM-4V have the form of decoder layers, too."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type}))
    assert cli.main(["plan", "--model", str(path)]) == 0
    assert "all layers" in capsys.readouterr().out


def test_layers_of_a_vision_tower_do_not_count(tmp_path, capsys):
    """Those of Qwen2.5-VL have the form of decoder layers. Its text model is Qwen2 with rotations by
    sections."""
    sizes = {name: value for name, value in LLAMA_1B.items() if name not in ("model_type", "head_dim")}
    totals = []
    for settings in ({"model_type": "qwen2_5_vl", "text_config": sizes}, {"model_type": "qwen2", **sizes}):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(settings))
        assert cli.main(["plan", "--model", str(path), "--json"]) == 0
        totals.append(json.loads(capsys.readouterr().out)["plain"])
    assert totals[0] == totals[1]


@pytest.mark.parametrize(
    "given, words",
    [
        (["--model", "x", "--hidden", "64", "--budget", "1G"], "--model takes no --hidden, --budget"),
        (
            ["--tokens", "16"],
            "--hidden, --vocab are missing: the plan of an lm_head needs --tokens, --hidden and",
        ),
        (["--tokens", "16", "--vocab=8"], "--hidden is missing: the plan of an lm_head needs"),
        (
            ["--tokens", "16", "--hidden=8", "--vocab=8", "--gpu=h100", "--lora=4"],
            "--gpu, --lora without --model",
        ),
        (
            ["--model", "x", "--optimizer", "sgd"],
            "--optimizer without a batch: --tokens is a given one, --length",
        ),
        (
            ["--model", "x", "--length", "8K"],
            "--length asks for the largest batch, which needs --memory or --gpu",
        ),
        (
            ["--model", "x", "--tokens", "8K", "--memory", "9G"],
            "--memory asks for the largest batch, --tokens is a",
        ),
        (["--model", "x", "--tokens", "64", "--gpu", "h100"], "--gpu with --tokens needs --length"),
        (
            ["--model", "x", "--tokens", "64", "--length", "65"],
            "--length is 65, expected at most --tokens, 64",
        ),
    ],
)
def test_options_that_are_missing_or_have_no_meaning(given, words, capsys):
    assert cli.main(["plan", *given]) == 2
    assert words in capsys.readouterr().err


NOWHERE = "no file, no folder, and no model in the cache of the Hub, which "


def test_unknown_names_are_refused_without_a_second_try(monkeypatch, capsys):
    tries = []

    def no_connection(request, timeout):
        tries.append((request.full_url, request.method, timeout))
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", no_connection)
    monkeypatch.setattr(
        AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("transformers tries again")
    )
    for offline, words in ((False, "does not answer (no route)"), (True, "HF_HUB_OFFLINE forbids to ask")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert cli.main(["plan", "--model", "no/such"]) == 2
        assert capsys.readouterr().err == f"liger plan --model no/such: {NOWHERE}{words}\n"
    assert tries == [("https://huggingface.co/no/such/resolve/main/config.json", "HEAD", 5)]
    for malformed in ("no such/name", "./nosuch"):
        assert cli.main(["plan", "--model", malformed]) == 2
        expected = f"liger plan --model {malformed}: no file, no folder, and no name of a model (Repo id must"
        assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize(
    "answer",
    [
        urllib.error.HTTPError("https://huggingface.co", 401, "private", None, None),
        urllib.error.URLError(ssl.SSLCertVerificationError("unknown certificate")),
        None,
    ],
)
def test_a_hub_that_answers_is_left_to_transformers(answer, monkeypatch, capsys):
    def answers(request, timeout):
        if answer is not None:
            raise answer
        return io.BytesIO()

    def config(name, local_files_only):
        raise OSError(f"{name} {local_files_only}")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "urlopen", answers)
    monkeypatch.setattr(AutoConfig, "from_pretrained", config)
    assert cli.main(["plan", "--model", "no/such"]) == 2
    assert capsys.readouterr().err == "liger plan --model no/such: no/such False\n"


def test_layers_of_another_form_are_named(tmp_path, capsys):
    """Cross-attention of Mllama has gates, no rotation, and keys and values of image tokens."""
    text = {
        "vocab_size": 128,
        "pad_token_id": 0,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    totals = []
    for crossed in ([1, 3], []):
        path = tmp_path / "config.json"
        text |= {"cross_attention_layers": crossed, "num_hidden_layers": 3 + len(crossed)}
        path.write_text(json.dumps({"model_type": "mllama", "text_config": text}))
        assert cli.main(["plan", "--model", str(path), "--json"]) == 0
        totals.append(json.loads(capsys.readouterr().out))
        assert cli.main(["plan", "--model", str(path)]) == 0
        out = capsys.readouterr().out
        assert (", 3 of 5 layers, " if crossed else ", 3 layers, ") in out
        assert ("these layers" in out) == bool(crossed) == ("all layers" not in out)
        assert ("\nnot counted: 2 x MllamaCrossAttentionDecoderLayer, not x + attention" in out) == bool(
            crossed
        )
    assert [total.pop("uncounted_layers") for total in totals] == [
        {"MllamaCrossAttentionDecoderLayer": 2},
        {},
    ]
    assert totals[0] == totals[1]
