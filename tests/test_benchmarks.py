"""The benchmark suite: its logic on the CPU, and that every row of it runs and is right."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import bench_fused_linear_ce
import harness
import measure
import report
import run
from harness import (
    Candidate,
    Contest,
    Provider,
    Row,
    Work,
    backward_work,
    forward_work,
    providers,
    training_work,
)


def double(t):
    return t["x"] * 2


def row(*candidates, **settings):
    settings = {"rounds": 2, "burst": 1, **settings}
    work = (forward_work, ("y",), ("x",))
    return Row("op", "a row", lambda: {"x": torch.ones(4)}, providers(candidates, *work), **settings)


def statuses(record):
    return {name: provider["status"] for name, provider in record["providers"].items()}


# --- the whole suite, tiny ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("results") / "run.json"
    code = run.main(["--self-test", "--plots", "--json", str(path)])
    return code, path, json.loads(path.read_text())


def test_every_row_runs_and_our_results_are_right(results):
    code, _path, result = results
    assert code == 0
    assert {record["op"] for record in result["rows"]} == {"ceilings", *run.OPS}
    for record in result["rows"]:
        mine = {name: p for name, p in record["providers"].items() if p["group"] == "ours"}
        assert mine or record["op"] == "ceilings"
        for name, provider in mine.items():
            assert provider["status"] == "ok", (record["name"], name, provider)
            if record["kind"] == "host":
                assert provider["host_us"]["median"] > 0
            else:
                assert provider["ms"]["median"] > 0 and provider["errors"], (record["name"], name)
                assert all(error < 0.01 for error in provider["errors"].values()), (record["name"], name)


def test_every_row_has_a_contest_with_liger_kernel(results):
    for record in results[2]["rows"]:
        for contest in record["contests"]:
            assert record["providers"][contest["baseline"]]["group"] == "liger-kernel"
            assert all(record["providers"][name]["group"] == "ours" for name in contest["ours"])
        assert record["contests"] or record["op"] == "ceilings"


def test_files_of_a_run(results):
    _code, path, result = results
    text = path.with_suffix(".md").read_text()
    for record in result["rows"]:
        assert f"### {record['name']}\n" in text
    for op in run.OPS:
        assert path.with_name(f"run-{op}.png").stat().st_size > 1000
    assert result["environment"]["torch"] == torch.__version__


# --- providers ----------------------------------------------------------------------------------------------------


def test_a_failing_provider_is_recorded_and_the_others_go_on():
    calls = []

    def late(t):
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("out of luck")
        return double(t)

    def broken_make(inputs):
        raise ImportError("no such module")

    tested = row(
        Candidate("good", double), Candidate("late", late), Candidate("absent", double, needs=("no_such",))
    )
    tested.providers.append(Provider("broken", broken_make))
    record = measure.measure(tested, measure.Cpu())
    assert statuses(record) == {"good": "ok", "late": "failed", "absent": "missing", "broken": "failed"}
    assert record["providers"]["late"]["reason"] == "RuntimeError: out of luck"
    assert record["providers"]["good"]["ms"]["n"] == 2
    text = report.markdown({"environment": {}, "rows": [record], "verdict": []})
    assert "out of luck" in text and "absent" not in text


@pytest.mark.parametrize("function", [lambda t: t["x"] * 2.2, lambda t: t["x"] * float("nan")])
def test_a_wrong_provider_is_marked_and_does_not_compete(function):
    candidates = (
        Candidate("liger[torch]", double, "ours"),
        Candidate("liger[cuda]", function, "ours"),
        Candidate("liger-kernel", double, "liger-kernel"),
    )
    record = measure.measure(row(*candidates, reference=lambda i: {"y": i["x"] * 2}), measure.Cpu())
    assert statuses(record) == {"liger[torch]": "ok", "liger[cuda]": "wrong", "liger-kernel": "ok"}
    assert [line["ours"] for line in report.verdict([record])] == ["liger[torch]"]
    assert len(report.faults([record])) == 1 and "relative error: y" in report.faults([record])[0]
    assert "liger[cuda] (WRONG RESULT)" in report.markdown(
        {"environment": {}, "rows": [record], "verdict": []}
    )
    json.loads(json.dumps(record, allow_nan=False))


def overwriting(t):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.data.mul_(2)
            return x.data.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.mul_(2)

    return Double.apply(t["x"])


@pytest.mark.parametrize(
    "make",
    [
        backward_work(overwriting, ("grad",), ("x",), ("x", "grad")),
        training_work(overwriting, ("grad",), ("x",), ("x", "grad")),
        forward_work(overwriting, ("y",), ("x",), ("x", "grad")),
    ],
)
def test_what_a_provider_overwrites_is_renewed_and_its_own(make):
    inputs = {"x": torch.full((3,), 5.0), "grad": torch.full((3,), 7.0)}
    work = make(inputs)
    for _ in range(3):
        work.prepare()
        results = work.run()
        expected = {"dx": 14.0, "y": 10.0}
        assert all(torch.equal(value, torch.full((3,), expected[name])) for name, value in results.items())
    assert torch.equal(inputs["x"], torch.full((3,), 5.0)) and torch.equal(
        inputs["grad"], torch.full((3,), 7.0)
    )


def test_providers_take_turns():
    order = []
    names = ["a", "b", "c"]
    contestants = [measure.Contestant(Provider(name, None)) for name in names]
    measure._in_rounds(contestants, 3, lambda contestant: order.append(contestant.provider.name))
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_a_slow_provider_gets_three_rounds_at_least_and_no_more(monkeypatch):
    monkeypatch.setattr(measure, "SECONDS_PER_PROVIDER", 0.0)
    count = []
    measure._in_rounds([measure.Contestant(Provider("a", None))], 9, count.append)
    assert len(count) == 3


def test_preparation_is_not_timed():
    clock = [0.0]

    def advance(seconds):
        clock[0] += seconds
        return {}

    machine = measure.Cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.time, "perf_counter", lambda: clock[0])
        assert machine.milliseconds(Work(lambda: advance(2.0), lambda: advance(100.0))) == 2000.0


def test_spread():
    assert measure.spread([3.0, 1.0, 2.0, 5.0, 4.0]) == {
        "median": 3.0,
        "min": 1.0,
        "q25": 2.0,
        "q75": 4.0,
        "n": 5,
    }
    assert measure.spread([7.0]) == {"median": 7.0, "min": 7.0, "q25": 7.0, "q75": 7.0, "n": 1}


# --- verdict ------------------------------------------------------------------------------------------------------


def record_of(**providers):
    """providers: name -> (group, ms, MiB)"""
    return {
        "name": "a row",
        "kind": "device",
        "providers": {
            name: {"group": group, "status": "ok", "ms": {"median": ms}, "peak_mib": mib}
            for name, (group, ms, mib) in providers.items()
        },
    }


def judged(record, label="", ours=()):
    return report.judge(record, {"baseline": "base", "label": label, "ours": list(ours)})


def test_verdict_prefers_what_wins_in_both_to_what_is_fastest():
    record = record_of(base=("liger-kernel", 2.0, 100), big=("ours", 1.0, 200), small=("ours", 1.5, 100.5))
    line = judged(record)
    assert (line["ours"], line["wins"], line["faster"], line["no_more_memory"]) == ("small", True, True, True)
    assert line["speedup"] == pytest.approx(2.0 / 1.5)
    line = judged(record, ours=["big"])
    assert (line["ours"], line["wins"], line["faster"], line["no_more_memory"]) == ("big", False, True, False)


def test_verdict_of_the_slower_and_of_no_memory_figures():
    line = judged(record_of(base=("liger-kernel", 2.0, 100), mine=("ours", 2.5, 1)))
    assert (line["wins"], line["faster"], line["no_more_memory"]) == (False, False, True)
    line = judged(record_of(base=("liger-kernel", 2.0, None), mine=("ours", 1.5, None)))
    assert (line["wins"], line["no_more_memory"]) == (True, None)
    assert judged(record_of(mine=("ours", 1.0, 1))) is None
    assert judged(record_of(base=("liger-kernel", 1.0, 1))) is None


# --- pieces of the benchmarks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((16384, 4096, 128256), 512),
        ((4096, 4096, 128256), 128),
        ((32768, 4096, 32000), 4096),
        ((4, 64, 32), 4),
    ],
)
def test_chunk_of_liger_kernel(sizes, rows):
    assert bench_fused_linear_ce.liger_kernel_logits_bytes(*sizes) == rows * sizes[2] * 2


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


def test_targets():
    options = harness.Options("cpu", "self-test")
    target = harness.targets(options, 21, 5, ignored=True)
    assert (target == -100).sum() == 3 and target.max() < 5
    assert (harness.targets(options, 21, 5, ignored=False) >= 0).all()


@pytest.mark.parametrize("arguments", [["no_such_op", "--self-test"], ["--no-such-flag"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2 and "no" in capsys.readouterr().err


@pytest.mark.gpu
def test_measuring_on_a_gpu():
    size = 1 << 24
    inputs = {"x": torch.randn(size, device="cuda")}
    tested = Row(
        "op",
        "a row",
        lambda: inputs,
        providers([Candidate("double", double), Candidate("twice", lambda t: t["x"] + (t["x"] + 0))],
                  forward_work, ("y",), ("x",)),
        lambda i: {"y": i["x"] * 2},
        nbytes=8 * size,
        contests=(Contest(),),
    )  # fmt: skip
    record = measure.measure(tested, measure.Gpu())
    assert statuses(record) == {"double": "ok", "twice": "ok", "device copy": "ok"}
    double_, twice = record["providers"]["double"], record["providers"]["twice"]
    assert double_["peak_mib"] == 64 and twice["peak_mib"] == 128
    assert 0 < double_["ms"]["median"] < twice["ms"]["median"]
    assert double_["latency_ms"]["n"] == tested.rounds
