"""The benchmark suite: its logic on the CPU, and that every row of it runs and is right."""

import json

import pytest
import torch

from liger import cli
from liger_bench import (
    OPS,
    bench_fused_linear_ce,
    harness,
    measure,
    plots,
    report,
    verdict,
)
from liger_bench.candidates import Candidate, ours, providers, selected
from liger_bench.harness import (
    Contest,
    Options,
    Provider,
    Row,
    Work,
    backward_work,
    forward_work,
    training_work,
)


def double(t):
    return t["x"] * 2


def one_row(*candidates, **settings):
    settings = {"rounds": 2, "burst": 1, **settings}
    work = (forward_work, ("y",), ("x",))
    return Row("op", "a row", lambda: {"x": torch.ones(4)}, providers(candidates, *work), **settings)


def statuses(record):
    return {name: provider["status"] for name, provider in record["providers"].items()}


# --- the whole suite, tiny ----------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="default", marks=pytest.mark.slow),
        pytest.param(("--sweep",), id="sweep", marks=pytest.mark.slow),
    ],
)
def results(request, tmp_path_factory):
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("results") / "run.json"
    code = cli.main(["bench", "--self-test", "--json", str(path), *request.param])
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
    for op in set(OPS) - {"fused_linear_ce", "preference", "tiled_mlp"}:
        works = {record["work"] for record in results[2]["rows"] if record["op"] == op}
        assert {f"{op} {work}" for work in ("forward", "backward", "forward and backward")} <= works


def test_contests_name_providers_of_the_row(results):
    for record in results[2]["rows"]:
        for contest in record["contests"]:
            if contest["baseline"] != harness.FASTEST_PEER:
                assert record["providers"][contest["baseline"]]["group"] == "liger-kernel"
            assert all(record["providers"][name]["group"] == "ours" for name in contest["ours"])


def test_files_of_a_run(results):
    _code, path, result = results
    text = path.with_suffix(".md").read_text()
    for record in result["rows"]:
        assert f"### {record['name']}\n" in text
    for op in OPS:
        assert path.with_name(f"run-{op}.png").stat().st_size > 1000
    assert result["environment"]["torch"] == torch.__version__


def test_a_picture_shows_the_whole_pass(results):
    _code, _path, result = results
    for op in OPS:
        records = [record for record in result["rows"] if record["op"] == op]
        picture = plots.shown(records)
        whole = [record for record in records if "forward and backward" in record["work"]]
        assert picture["kind"] == "device" and (not whole or picture in whole)


def test_report_is_written_again_from_a_result_file(results):
    _code, path, _result = results
    before = path.with_suffix(".md").read_text()
    path.with_suffix(".md").unlink()
    assert cli.main(["bench", "--from", str(path), "--no-plots"]) == 0
    assert path.with_suffix(".md").read_text() == before


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

    tested = one_row(
        Candidate("good", double), Candidate("late", late), Candidate("absent", double, needs=("no_such",))
    )
    tested.providers.append(Provider("broken", broken_make))
    record = measure.measure(tested, measure.Cpu())
    assert statuses(record) == {"good": "ok", "late": "failed", "absent": "missing", "broken": "failed"}
    assert record["providers"]["late"]["reason"] == "RuntimeError: out of luck"
    assert record["providers"]["good"]["ms"]["n"] == 2
    text = report.markdown({"environment": {}, "rows": [record], "verdict": [], "goals": []})
    assert "out of luck" in text and "absent" not in text


@pytest.mark.parametrize("function", [lambda t: t["x"] * 2.2, lambda t: t["x"] * float("nan")])
def test_a_wrong_provider_is_marked_and_does_not_compete(function):
    candidates = (
        Candidate("liger[torch]", double, "ours"),
        Candidate("liger[cuda]", function, "ours"),
        Candidate("liger-kernel", double, "liger-kernel"),
    )
    record = measure.measure(one_row(*candidates, reference=lambda i: {"y": i["x"] * 2}), measure.Cpu())
    assert statuses(record) == {"liger[torch]": "ok", "liger[cuda]": "wrong", "liger-kernel": "ok"}
    assert [line["ours"] for line in verdict.verdict([record])] == ["liger[torch]"] * 2
    assert len(verdict.faults([record])) == 1 and "relative error: y" in verdict.faults([record])[0]
    assert "liger[cuda] (WRONG RESULT)" in report.markdown(
        {"environment": {}, "rows": [record], "verdict": [], "goals": []}
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
        work.release()
        expected = {"dx": 14.0, "y": 10.0}
        assert all(torch.equal(value, torch.full((3,), expected[name])) for name, value in results.items())
    assert torch.equal(inputs["x"], torch.full((3,), 5.0)) and torch.equal(
        inputs["grad"], torch.full((3,), 7.0)
    )


def test_providers_take_turns():
    order = []
    names = list("abcdef")
    contestants = [measure.Contestant(Provider(name, None)) for name in names]
    measure._in_rounds(contestants, 6, lambda contestant: order.append(contestant.provider.name))
    rounds = [order[i : i + 6] for i in range(0, 36, 6)]
    assert all(sorted(turns) == names for turns in rounds)
    # Nobody always has the same one before it.
    assert all(
        len({turns[turns.index(name) - 1] for turns in rounds if turns[0] != name}) > 1 for name in names
    )


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


def test_calls_go_through_the_sets_of_inputs_in_turn_and_the_first_timed_result_is_checked():
    seen, made = [], []

    def inputs():
        made.append(torch.full((4,), float(len(made))))
        return {"x": made[-1]}

    def function(t):
        seen.append(int(t["x"][0]))
        # Right at first, wrong when it counts.
        return t["x"] * 2 + (7.0 if len(seen) > 2 else 0.0)

    work = (forward_work, ("y",), ("x",))
    tested = Row("op", "a row", inputs, providers([Candidate("liger[torch]", function, "ours")], *work))
    tested.rounds, tested.burst, tested.reference = 2, 3, lambda i: {"y": i["x"] * 2 + 1e-3}
    record = measure.measure(tested, measure.Cpu())
    assert len(made) == 2
    # Warm-up; six timed calls; two for the latency.
    assert seen == [0, 1, 0, 1, 0, 1, 0, 1, 0, 0]
    assert statuses(record) == {"liger[torch]": "wrong"}


def test_ratio_is_taken_round_by_round():
    slow_chip = measure.Contestant(Provider("a", None)), measure.Contestant(Provider("copy", None))
    slow_chip[0].rounds, slow_chip[1].rounds = [[2.0, 2.2, 2.1], [4.2], [8.0]], [[1.0], [2.0], [5.0]]
    assert slow_chip[0].ratio(slow_chip[1]) == pytest.approx(2.1)


def test_spread():
    assert measure.spread([3.0, 1.0, 2.0, 5.0, 4.0]) == {
        "median": 3.0,
        "min": 1.0,
        "q25": 2.0,
        "q75": 4.0,
        "n": 5,
    }
    assert measure.spread([7.0]) == {"median": 7.0, "min": 7.0, "q25": 7.0, "q75": 7.0, "n": 1}


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


def test_ignored_targets():
    options = Options("cpu", "self-test")
    counts = {}
    for ignored in harness.IGNORED:
        target = harness.targets(options, 64, 5, ignored)
        kept = target[target != -100]
        assert kept.min() >= 0 and kept.max() < 5
        counts[ignored] = 64 - len(kept)
    assert list(counts.values()) == [0, 10, 32, 32]
    # Two quarters of eight tokens, and six, in turn: whole prompts, at the beginning of each sequence.
    masked = (target == -100).view(8, 8)
    assert masked.sum(1).tolist() == [2, 6] * 4 and masked[:, :2].all()
    with pytest.raises(ValueError, match="expected one of"):
        harness.targets(options, 64, 5, "all")


def test_small_memory_of_fused_linear_ce():
    def labels(*head):
        return {c.name.removeprefix("liger[torch]") for c in bench_fused_linear_ce._small(options, *head)}

    options = Options("cpu", backends=("torch",))
    assert labels(16384, 4096, 128256) == {bench_fused_linear_ce.SMALL}
    assert labels(4096, 4096, 128256) == {bench_fused_linear_ce.SMALL, bench_fused_linear_ce.AS_SMALL}


def test_plain_torch_takes_part_where_it_was_asked_for_and_in_small_rows():
    options = Options("cpu", backends=("cuda",))
    assert [c.name for c in ours(options, double)] == ["liger[cuda]"]
    assert [c.name for c in ours(options, double, small=True)] == ["liger[cuda]", "liger[torch]"]
    asked = Options("cpu", backends=("torch",))
    assert [c.name for c in ours(asked, double, small=True)] == ["liger[torch]"]


def test_peers_can_be_chosen():
    candidates = [
        Candidate("liger[torch]", double, "ours"),
        Candidate("quack", double),
        Candidate("torch eager", double, works=("backward",)),
    ]

    def names(peers, work):
        return [c.name for c in selected(Options("cpu", peers=peers), candidates, work)]

    assert names(None, "backward") == ["liger[torch]", "quack", "torch eager"]
    assert names(None, "forward") == ["liger[torch]", "quack"]
    assert names(("torch", "liger-kernel"), "backward") == ["liger[torch]", "torch eager"]
    assert names(("none",), "backward") == ["liger[torch]"]


def test_colors_tell_providers_apart_and_ceilings_are_black():
    names = ["liger[cuda]", "liger-kernel", "liger-kernel CuTe", "three GEMMs", "quack"]
    assert len({plots.color(name) for name in names}) == len(names)
    assert plots.color("three GEMMs") == "black"
    assert plots.color("liger[cuda]") == plots.color("liger[cuda] inplace")


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
