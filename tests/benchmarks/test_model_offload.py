# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of inputs in host memory, with a tiny model on the CPU."""

import json

import pytest

pytest.importorskip("transformers")

from liger_bench.models import offload as model_offload


def test_command(tmp_path, capsys):
    path = tmp_path / "r.json"
    settings = ["--setting", "device", "--setting", "offload, release"]
    assert model_offload.main(["--self-test", "2x16", *settings, "--steps", "1", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["same"] and (row["batch"], row["sequence"]) == (2, 16)
    assert row["device"]["gradient_bits"] == row["offload, release"]["gradient_bits"]
    assert row["device"]["tokens_per_second"] > 0 and "offloaded to" in row["offload, release"]["plan"]
    assert "2x16 same bits: True" in capsys.readouterr().out


def test_other_bits_are_an_error(monkeypatch):
    monkeypatch.setattr(model_offload, "_digest", lambda tensors, seen=[]: seen.append(1) or len(seen))
    settings = ["--setting", "device", "--setting", "offload"]
    assert model_offload.main(["--self-test", "2x16", *settings, "--steps", "1"]) == 1
