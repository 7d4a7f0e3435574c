# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of the tests of the engine for compute capability 9.0, and of kernels on a CPU."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from logprobs_sm90 import engine_calls

from liger.distributed.vocab.sm90 import CompiledSteps


@pytest.fixture
def calls(monkeypatch):
    """The calls of the engine's log-probability ops in this test: (forward or backward, exponentials are
    kept)."""
    return engine_calls(monkeypatch)


@pytest.fixture
def shards(sm90):
    assert CompiledSteps.are_built() and CompiledSteps.clusters(torch.empty(1, device=sm90))
    return sm90


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """Compiles a program of tests/support/sm90/emulator with csrc, or with folders that have another version
    of some files, and runs it: (exit code, output)."""
    root = Path(__file__).parents[2]
    emulator = root / "tests/support/sm90/emulator"
    compiler = shutil.which("g++")
    if compiler is None or not (root / "csrc").is_dir():
        pytest.skip("needs g++ and a checkout")

    def run(source, *folders):
        program = tmp_path_factory.mktemp("emulated") / "program"
        includes = [f"-I{folder}" for folder in (emulator, *folders, root / "csrc")]
        options = "-std=c++20", "-O2", "-fno-strict-aliasing", "-fno-extern-tls-init", "-pthread", "-w"
        # Ubuntu's g++ fortifies longjmp, which then takes a switch between fibers for an error.
        subprocess.run(
            [compiler, *options, "-U_FORTIFY_SOURCE", *includes, emulator / source, "-o", program], check=True
        )
        done = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
        return done.returncode, done.stdout

    return run
