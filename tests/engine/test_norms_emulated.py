# SPDX-License-Identifier: BSD-3-Clause
"""The backwards of layer_norm and rms_norm on a CPU: tests/support/sm90/emulator runs the source of their
kernels and chooses the launches as on a GPU, where a single block writes the gradients of the parameters."""

import re
from pathlib import Path

import pytest

NORM = Path(__file__).parents[2] / "csrc/norm"
LAUNCH = re.compile(r"(\w+(?:<[\w, ]+>)?)\s*<<<(.*?)>>>", re.DOTALL)


def with_launches(folder, file=None, before="", after=""):
    """Copies the headers with calls for kernel<<<...>>>, which g++ does not know; one of them changed."""
    (folder / "norm").mkdir()
    for path in NORM.glob("*.cuh"):
        text = path.read_text()
        if path.name == file:
            assert before in text
            text = text.replace(before, after)
        (folder / "norm" / path.name).write_text(LAUNCH.sub(r"on_machine(\1, \2)", text))
    return folder


def test_kernels(emulate, tmp_path):
    assert emulate("norms.cpp", with_launches(tmp_path)) == (0, "0 wrong\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, before, after",
    [
        ("row_ring.cuh", "sync_threads(group + 1, lanes);", ""),
        ("row_ring.cuh", "other < coord.groups", "other < 2"),
        ("layer_norm_backward.cuh", "p.grads, 1, offset", "p.grads, 0, offset"),
        ("parameter_grads.cuh", "partials == 1", "partials <= 3"),
        ("parameter_grads.cuh", "partials == 1", "partials == 0"),
    ],
)
def test_a_mistake_is_found(emulate, tmp_path, file, before, after):
    code, output = emulate("norms.cpp", with_launches(tmp_path, file, before, after))
    assert code == 1 and ("wrong" in output or "for ever" in output)
