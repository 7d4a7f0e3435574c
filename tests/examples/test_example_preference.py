# SPDX-License-Identifier: BSD-3-Clause
"""examples/preference.py: a short training, in which the margin of rewards has to rise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")
EXAMPLE = Path(__file__).parents[2] / "examples" / "preference.py"


@pytest.mark.parametrize("loss", ["dpo", "kto", "orpo", "simpo"])
def test_the_margin_rises(loss):
    if not EXAMPLE.is_file():
        pytest.skip("no examples beside the tests")
    command = [sys.executable, EXAMPLE, "--loss", loss, "--steps", "20"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    margins = [float(m) for m in re.findall(r"^step .* margin (-?[\d.]+)$", output, re.MULTILINE)]
    assert len(margins) == 10 and margins[-1] > margins[0]
    before, after = map(
        float, re.search(r"before and after training: (-?[\d.]+) (-?[\d.]+)$", output, re.M).groups()
    )
    assert after > before + 0.1
