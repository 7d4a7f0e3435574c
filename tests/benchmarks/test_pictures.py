# SPDX-License-Identifier: BSD-3-Clause
"""The pictures of benchmark results."""

import pytest

from liger_bench.reports import overview

pytest.importorskip("matplotlib")


def provider(group, ms, mib, status="ok"):
    return {"group": group, "status": status, "ms": {"median": ms}, "peak_mib": mib}


def record_of(name="softmax forward and backward 8x8", **providers):
    return {
        "op": name.split()[0],
        "name": name,
        "work": name.rpartition(" ")[0],
        "kind": "device",
        "nbytes": 64,
        "ceilings": ["device copy"],
        "contests": [{"baseline": "liger-kernel", "label": "", "ours": []}],
        "providers": {key.replace("_", " "): value for key, value in providers.items()},
    }


def run_of(*records, commit="abc"):
    facts = {"commit": commit, "device": "a device", "dtype": "bfloat16"}
    return {"environment": facts, "rows": list(records)}


BOTH = {"liger[cuda]": provider("ours", 1.0, 64.0), "liger-kernel": provider("liger-kernel", 2.5, 64.5)}


def test_pictures_are_of_the_first_runs_that_have_the_rows():
    name, _ = overview.OVERVIEW["swiglu\n16384 x 14336"]
    made = {"liger[cuda] inplace": BOTH["liger[cuda]"], "liger-kernel": BOTH["liger-kernel"]}
    runs = [
        run_of(record_of(**BOTH)),
        run_of(record_of(name, **made), commit="one"),
        run_of(record_of(name, **made)),
    ]
    found = overview.overview(runs)
    assert set(found) == {"overview", "overview-memory"}
    title = found["overview"].get_suptitle().replace("\n", " ")
    assert title == "Forward and backward: 2.50 times the speed of liger-kernel (median)"
    # One question each.
    assert [len(figure.axes) for figure in found.values()] == [1, 1]
    assert overview.overview(runs[:1]) == {}
