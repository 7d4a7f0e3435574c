# SPDX-License-Identifier: BSD-3-Clause
"""The public signatures are the recorded ones, so that a change of them is a change of a file in review."""

import difflib

import public_api
import pytest


def test_public_signatures_are_the_recorded_ones():
    pytest.importorskip("transformers")
    recorded = public_api.RECORDED.read_text().splitlines()
    changes = list(
        difflib.unified_diff(recorded, public_api.current(), "recorded", "current", lineterm="", n=0)
    )
    assert not changes, "python tests/support/api/public_api.py records them:\n" + "\n".join(changes)
