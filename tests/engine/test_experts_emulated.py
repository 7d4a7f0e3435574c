# SPDX-License-Identifier: BSD-3-Clause
"""The grouped GEMMs of csrc/experts/sm90 on a CPU: tests/support/sm90/emulator runs the source of the
kernels, thread by thread, and compares every result with sums in float64. Schedules, barriers, shared memory
and the layout of accumulators are the ones of the GPU; PTX, TMA and wgmma are emulated."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EMULATOR = ROOT / "tests/support/sm90/emulator"


@pytest.fixture(scope="module")
def compile_with(tmp_path_factory):
    """Compiles the program with csrc, or with a folder that has another version of some files."""
    compiler = shutil.which("g++")
    if compiler is None or not (ROOT / "csrc").is_dir():
        pytest.skip("needs g++ and a checkout")

    def build(*folders):
        program = tmp_path_factory.mktemp("emulated") / "experts"
        includes = [f"-I{folder}" for folder in (EMULATOR, *folders, ROOT / "csrc")]
        options = "-std=c++20", "-O2", "-fno-extern-tls-init", "-pthread", "-w"
        source = EMULATOR / "experts.cpp"
        subprocess.run([compiler, *options, *includes, source, "-o", program], check=True)
        return program

    return build


def run(program):
    done = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout


def test_kernels(compile_with):
    assert run(compile_with()) == (0, "0 wrong\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, before, after",
    [
        ("layout.h", "(vector ^ row) & 7", "vector"),
        ("schedule.h", "(first + within % width) * 2 + rank", "(first + within % width) * 2 + 1 - rank / 2"),
        ("grouped_gemm.cuh", "sm90::wgmma_wait<1>();", ""),
        ("epilogues.cuh", "products[0], products[2], products[1]", "products[0], products[1], products[2]"),
        ("epilogues.cuh", "if (left < kColumns) {", "if (false) {"),
    ],
)
def test_a_mistake_is_found(compile_with, tmp_path, file, before, after):
    folder = tmp_path / "experts/sm90"
    folder.mkdir(parents=True)
    text = (ROOT / "csrc/experts/sm90" / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after))
    code, output = run(compile_with(tmp_path))
    assert code == 1 and ("expected" in output or "for ever" in output)
