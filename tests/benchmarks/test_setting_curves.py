# SPDX-License-Identifier: BSD-3-Clause
"""E13, loss curves of every setting: its yardsticks and its report."""

import math

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from experiments import setting_curves
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
