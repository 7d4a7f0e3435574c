# SPDX-License-Identifier: BSD-3-Clause
"""The grouped GEMMs of csrc/experts/sm90 and the sort of csrc/experts on a CPU: tests/support/sm90/emulator
runs the source of the kernels, thread by thread, and compares every result with sums in float64, or with a
stable sort. Schedules, barriers, shared memory and the layout of accumulators are the ones of the GPU; PTX,
TMA and wgmma are emulated."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EMULATOR = ROOT / "tests/support/sm90/emulator"


@pytest.fixture(scope="module")
def compile_with(tmp_path_factory):
    """Compiles a program with csrc, or with a folder that has another version of some files."""
    compiler = shutil.which("g++")
    if compiler is None or not (ROOT / "csrc").is_dir():
        pytest.skip("needs g++ and a checkout")

    def build(name, *folders):
        program = tmp_path_factory.mktemp("emulated") / name
        includes = [f"-I{folder}" for folder in (EMULATOR, *folders, ROOT / "csrc")]
        options = "-std=c++20", "-O2", "-fno-extern-tls-init", "-pthread", "-w"
        source = EMULATOR / f"{name}.cpp"
        subprocess.run([compiler, *options, *includes, source, "-o", program], check=True)
        return program

    return build


def run(program):
    done = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", ["experts", "routing"])
def test_kernels(compile_with, name):
    assert run(compile_with(name)) == (0, "0 wrong\n")


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
def test_a_mistake_is_found(compile_with, tmp_path, file, before, after):
    changed = tmp_path / "experts" / file
    changed.parent.mkdir(parents=True)
    text = (ROOT / "csrc/experts" / file).read_text()
    assert before in text
    changed.write_text(text.replace(before, after))
    code, output = run(compile_with("routing" if file == "routing.cuh" else "experts", tmp_path))
    assert code == 1 and ("expected" in output or "for ever" in output)
