# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy of few rows on a CPU (tests/support/sm90/emulator): the kernel of the rows finds the divisor
of the loss, with the bits of a call that has a launch before the rows."""

from pathlib import Path

import pytest

FAMILY = Path(__file__).parents[2] / "csrc/cross_entropy"


def test_kernels(emulate):
    assert emulate("cross_entropy.cpp") == (0, "0 wrong\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after",
    [
        ("y < p.vocab && y != p.targets.ignore_index)", "y != p.targets.ignore_index)"),
        ("p.mean ? 0 : 1", "0"),
        ("p.mean && first < p.rows", "p.mean && first < blockDim.x"),
        ("write_gradient || p.new_denominator != nullptr", "write_gradient"),
    ],
)
def test_a_mistake_is_found(emulate, tmp_path, before, after):
    (tmp_path / "cross_entropy").mkdir()
    text = (FAMILY / "rows.cuh").read_text()
    assert before in text
    (tmp_path / "cross_entropy/rows.cuh").write_text(text.replace(before, after))
    code, output = emulate("cross_entropy.cpp", tmp_path)
    assert code == 1 and "expected" in output
