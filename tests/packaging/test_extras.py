# SPDX-License-Identifier: BSD-3-Clause
"""Without an optional package: every public name works, or the error has the command that installs the
package."""

import json
import os
import re
import subprocess
import sys

import pytest

# Imports every public name of liger and of liger_kernel; prints the errors by name.
PROGRAM = """
import json, sys
sys.modules.update(dict.fromkeys(["transformers", "trl", "triton"]))
import liger, liger.compat
from liger.compat.names import MODULES

def message(*path):
    try:
        exec(f"from {path[0]} import {path[1]}" if len(path) > 1 else f"import {path[0]}", {})
    except ImportError as error:
        return str(error)

names = [("liger", name) for name in dir(liger)] + [("liger.transformers",), ("liger.transformers", "checkpoint")]
names += [("liger.trl",), ("liger.trl", "patch")]
names += [(module, name) for module in MODULES for name in MODULES[module]]
print(json.dumps({".".join(path): message(*path) for path in names}))
"""


@pytest.fixture(scope="module")
def errors():
    environment = {**os.environ, "LIGER_COMPAT_OVERRIDE": "1", "LIGER_BACKEND": "torch"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_command(errors):
    found = {name: text for name, text in errors.items() if text is not None}
    for name, text in found.items():
        match = re.fullmatch(
            r'(\S+: )?(\S+) needs (\w+), which is not installed: pip install "liger-ops\[(\w+)\]"', text
        )
        assert match, (name, text)
        assert match[3] == match[4]
    assert found["liger.patch"] == (
        'liger.patch needs transformers, which is not installed: pip install "liger-ops[transformers]"'
    )
    assert {"liger.trl", "liger_kernel.transformers.AutoLigerKernelForCausalLM"} < set(found)
    assert {"liger.nn", "liger.losses", "liger_kernel.transformers.LigerRMSNorm"} < set(errors) - set(found)
