# SPDX-License-Identifier: BSD-3-Clause
"""The grouped GEMMs of csrc/experts/sm90 on a CPU: tests/support/sm90/emulator runs the source of the
kernels, thread by thread, and compares every result with sums in float64. Schedules, barriers, shared memory
and the layout of accumulators are the ones of the GPU; PTX, TMA and wgmma are emulated."""

from pathlib import Path

import pytest

EXPERTS = Path(__file__).parents[2] / "csrc/experts/sm90"


def test_kernels(emulate):
    assert emulate("experts.cpp") == (0, "0 wrong\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, before, after",
    [
        ("layout.h", "(vector ^ row) & 7", "vector"),
        ("schedule.h", "(first + within % width) * 2 + rank", "(first + within % width) * 2 + 1 - rank / 2"),
        ("grouped_gemm.cuh", "sm90::wgmma_wait<1>();", ""),
        ("epilogues.cuh", "products[0], products[2], products[1]", "products[0], products[1], products[2]"),
    ],
)
def test_a_mistake_is_found(emulate, tmp_path, file, before, after):
    folder = tmp_path / "experts/sm90"
    folder.mkdir(parents=True)
    text = (EXPERTS / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after))
    code, output = emulate("experts.cpp", tmp_path)
    assert code == 1 and ("expected" in output or "for ever" in output)
