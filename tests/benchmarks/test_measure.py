# SPDX-License-Identifier: BSD-3-Clause
"""Measuring the providers of a row: their turns, their inputs, wrong results and failures."""

import json

import pytest
import torch

from liger_bench import measure
from liger_bench.candidates import Candidate, providers
from liger_bench.harness import Contest, Provider, Row, backward_work, forward_work, training_work
from liger_bench.reports import report, verdict


def double(t):
    return t["x"] * 2


def one_row(*candidates, **settings):
    settings = {"rounds": 2, "burst": 1, **settings}
    work = (forward_work, ("y",), ("x",))
    return Row("op", "a row", lambda: {"x": torch.ones(4)}, providers(candidates, *work), **settings)


def statuses(record):
    return {name: provider["status"] for name, provider in record["providers"].items()}


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
