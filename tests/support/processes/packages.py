# SPDX-License-Identifier: BSD-3-Clause
"""Commands in the environment of a user, without the settings of the tests; what builds of this checkout
hold."""

import os
import subprocess
import sysconfig
from pathlib import Path

from liger._core.runtime import load

ROOT = Path(__file__).parents[3]
# As TORCH_TARGET_VERSION in cmake/LigerTorch.cmake says.
OLDEST_TORCH = (2, 10)
# liger._C, which is not of the stable ABI: loaded into the Python and the torch that it was built with alone.
EXTENSION = f"lib{load._extension_name()}.so"


def call(*command, cwd=ROOT, check=True, **environment):
    """Runs a command with LIGER_* and Python settings of this process removed; (exit code, output)."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("LIGER_", "PYTHON")) and k != "TRITON_INTERPRET"
    }
    # Tools of this interpreter's environment, ninja and cmake, also where it is not activated.
    kept["PATH"] = sysconfig.get_path("scripts") + os.pathsep + kept["PATH"]
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | {k: str(v) for k, v in environment.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert not check or result.returncode == 0, result.stdout
    return result.returncode, result.stdout
