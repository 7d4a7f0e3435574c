# SPDX-License-Identifier: BSD-3-Clause
"""E13, loss curves of every setting: its yardsticks and its report."""

import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from experiments import setting_curves
from experiments.cells import Machine
from experiments.curve_settings import NUDGED, REFERENCE, UNPATCHED

PLAIN = [5.0, 4.0, 3.0]
# Distances from the float32 run: 0.01 of the unpatched run; the nudged run is 0.002 from the latter.
CURVES = {
    UNPATCHED: PLAIN,
    REFERENCE: [loss - 0.01 for loss in PLAIN],
    NUDGED: [loss + 0.002 for loss in PLAIN],
}


def verdict(losses):
    return setting_curves.verdicts({**CURVES, "liger": losses})["liger"]


def shifted(*by):
    return [loss + change for loss, change in zip(PLAIN, by, strict=True)]


def test_a_curve_within_both_yardsticks_agrees():
    found = verdict(shifted(0.004, -0.002, 0.007))
    assert found["agrees"] is True
    assert found["ratio"] == pytest.approx(1.3) and found["largest"] == pytest.approx(0.007)
    assert found["allowed"] == pytest.approx(4 * 0.002, abs=2e-5)


@pytest.mark.parametrize(
    "losses",
    [shifted(0.006, 0.006, 0.006), shifted(0.0, 0.009, 0.0), shifted(0.0, math.nan, 0.0)],
    ids=["mean distance from float32", "difference of one step", "NaN"],
)
def test_a_curve_beyond_a_yardstick_disagrees(losses):
    assert verdict(losses)["agrees"] is False


def test_no_verdict_without_the_runs_to_compare_with():
    curves = {**CURVES, "liger": PLAIN}
    assert setting_curves.verdicts({k: v for k, v in curves.items() if k != REFERENCE}) == {}
    for absent in (UNPATCHED, NUDGED):
        left = {k: v for k, v in curves.items() if k != absent}
        assert setting_curves.verdicts(left)["liger"]["agrees"] is None


def result_of(curves, **others):
    def record(method, **values):
        return {"method": method, "size": "a size", "order": 0, **values}

    cells = {m: record(m, status="ok", losses=losses) for m, losses in curves.items()}
    cells |= {m: record(m, **values) for m, values in others.items()}
    facts = {"device": "a device", "torch": "2.11", "commit": "0123456789abcdef"}
    return {"experiment": "E13", "tiny": False, "environments": [facts], "cells": cells}


def test_the_table_has_a_verdict_for_every_setting():
    curves = {**CURVES, "liger": shifted(0.004, -0.002, 0.007), "liger, recompute": shifted(0, 0.5, 0)}
    failed = {"status": "failed", "reason": "RuntimeError: no"}
    lines = setting_curves.table(result_of(curves, compiled=failed)).splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}
    assert "difference, allowed 8.0e-03" in rows["a size"]
    assert rows["liger"] == "| liger | 5.0040 to 3.0070 | 1.3e-02 | 1.30 | 7.0e-03 | agrees |"
    assert rows["liger, recompute"].endswith("| **DISAGREES** |")
    assert rows["compiled"] == "| compiled | failed: RuntimeError: no |  |  |  |  |"
    assert all("agrees" not in rows[own].lower() for own in CURVES)


def test_the_reference_starts_from_the_weights_of_the_others():
    machine = Machine("cpu", True, None)
    ours, reference = (
        setting_curves.make_model("qwen3", dtype, machine).state_dict()
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert all(torch.equal(reference[name], weight.float()) for name, weight in ours.items())
