# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark suite: its logic on the CPU, and that every row of it runs and is right."""

import json

import pytest
import torch

from liger_bench import OPS, cli, harness
from liger_bench.ops import fused_linear_ce as bench_fused_linear_ce

# --- the whole suite, tiny ----------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="default", marks=pytest.mark.slow),
        pytest.param(("--sweep",), id="sweep", marks=pytest.mark.slow),
    ],
)
def results(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "run.json"
    code = cli.main(["--self-test", "--json", str(path), *request.param])
    return code, path, json.loads(path.read_text())


def test_every_row_runs_and_our_results_are_right(results):
    code, _path, result = results
    assert code == 0
    assert {record["op"] for record in result["rows"]} == {"ceilings", *OPS}
    for record in result["rows"]:
        mine = {name: p for name, p in record["providers"].items() if p["group"] in ("ours", "op alone")}
        assert mine or record["op"] == "ceilings"
        for name, provider in mine.items():
            assert provider["status"] == "ok", (record["name"], name, provider)
            if record["kind"] == "host":
                assert provider["host_us"]["median"] > 0
            else:
                assert provider["ms"]["median"] > 0 and provider["errors"], (record["name"], name)
                assert all(error < 0.01 for error in provider["errors"].values()), (record["name"], name)
                assert set(provider["ratios"]) == set(record["ceilings"]) and record["ceilings"]


def test_every_op_is_measured_forward_backward_and_both(results):
    for op in set(OPS) - {"fused_linear_ce", "heads", "preference", "tiled_mlp"}:
        works = {record["work"] for record in results[2]["rows"] if record["op"] == op}
        assert {f"{op} {work}" for work in ("forward", "backward", "forward and backward")} <= works


def test_contests_name_providers_of_the_row(results):
    for record in results[2]["rows"]:
        for contest in record["contests"]:
            if contest["baseline"] != harness.FASTEST_PEER:
                assert record["providers"][contest["baseline"]]["group"] == "liger-kernel"
            assert all(record["providers"][name]["group"] == "ours" for name in contest["ours"])


def test_reference_of_fused_linear_ce(monkeypatch):
    monkeypatch.setattr(bench_fused_linear_ce, "REFERENCE_ROWS", 3)
    x, weight = torch.randn(8, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    target = torch.tensor([0, 10, -100, 3, 3, -100, 7, 1])
    got = bench_fused_linear_ce._reference({"input": x, "weight": weight, "target": target})
    x.requires_grad_(), weight.requires_grad_()
    loss = torch.nn.functional.cross_entropy(x @ weight.T, target)
    grads = torch.autograd.grad(loss, (x, weight))
    for name, want in zip(("loss", "dinput", "dweight"), (loss, *grads), strict=True):
        torch.testing.assert_close(got[name].double(), want.detach(), rtol=1e-5, atol=1e-6)


def test_some_of_the_rows(tmp_path, capsys):
    path = tmp_path / "a.json"
    arguments = ["--heads", "--self-test", "--peers", "none", "--rows", "softcap"]
    assert cli.main([*arguments, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert "softcap" in row["name"]
    assert "Times relative to three GEMMs" in path.with_suffix(".md").read_text()
    assert cli.main(["--heads", "--self-test", "--rows", "no such row"]) == 2
    assert "no row has no such row in its name" in capsys.readouterr().err
