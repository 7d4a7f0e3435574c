# SPDX-License-Identifier: BSD-3-Clause
"""The grouped GEMMs of csrc/experts/sm90 and the sort of csrc/experts on a CPU: tests/support/sm90/emulator
runs the source of the kernels, thread by thread, and compares every result with sums in float64, or with a
stable sort. Schedules, barriers, shared memory and the layout of accumulators are the ones of the GPU; PTX,
TMA and wgmma are emulated."""

from pathlib import Path

import pytest

EXPERTS = Path(__file__).parents[2] / "csrc/experts"


@pytest.mark.parametrize(
    "program", ["experts.cpp", "routing.cpp", pytest.param("many_experts.cpp", marks=pytest.mark.slow)]
)
def test_kernels(emulate, program):
    assert emulate(program) == (0, "0 wrong\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, before, after",
    [
        ("sm90/layout.h", "(vector ^ row) & 7", "vector"),
        (
            "sm90/schedule.h",
            "(first + within % width) * 2 + rank",
            "(first + within % width) * 2 + 1 - rank / 2",
        ),
        ("sm90/grouped_gemm.cuh", "sm90::wgmma_wait<1>();", ""),
        (
            "sm90/epilogues.cuh",
            "products[0], products[2], products[1]",
            "products[0], products[1], products[2]",
        ),
        ("sm90/epilogues.cuh", "if (left < kColumns) {", "if (false) {"),
        ("routing.cuh", "equal & ((1u << lane) - 1)", "equal >> lane >> 1"),
        ("routing.cuh", "warp * part", "(kRouteWarps - 1 - warp) * part"),
    ],
)
def test_a_mistake_is_found(emulate, tmp_path, file, before, after):
    changed = tmp_path / "experts" / file
    changed.parent.mkdir(parents=True)
    text = (EXPERTS / file).read_text()
    assert before in text
    changed.write_text(text.replace(before, after))
    code, output = emulate("routing.cpp" if file == "routing.cuh" else "experts.cpp", tmp_path)
    assert code == 1 and ("expected" in output or "for ever" in output)
