# SPDX-License-Identifier: BSD-3-Clause
"""Patching beside an installed package that cannot be imported: liger imports none that the model does not
need."""

import os
import sys
from pathlib import Path

import pytest
from forked_python import python

pytest.importorskip("transformers")

SUPPORT = Path(__file__).parents[2] / "support/processes"
TRAINING_STEP = """
import sys
import liger, tiny_models
model = liger.patch(tiny_models.make("llama"))
tiny_models.step(model, **tiny_models.batch())
liger.unpatch(model)
assert not {"deepspeed", "peft", "bitsandbytes"} & sys.modules.keys()
"""


PACKAGES = ["deepspeed", "peft", "bitsandbytes"]


def test_broken_packages(tmp_path):
    """As a package is that needs another which is not installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SUPPORT), *sys.path])}
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("import no_such_package_of_liger\n")
        info = tmp_path / f"{package}-99.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99.0\n")
        broken = python("-c", f"import {package}", environment=environment)
        assert "no_such_package_of_liger" in broken.stderr
    run = python("-c", TRAINING_STEP, environment=environment)
    assert run.returncode == 0, run.stderr
