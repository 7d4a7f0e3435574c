# SPDX-License-Identifier: BSD-3-Clause
"""examples/expert_parallel.py: a short training on two ranks, in which the loss has to fall."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "expert_parallel.py"


def test_the_loss_falls():
    if not EXAMPLE.is_file():
        pytest.skip("no examples beside the tests")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run([*launcher, EXAMPLE], capture_output=True, text=True, check=True, timeout=300)
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", result.stdout, re.MULTILINE)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
