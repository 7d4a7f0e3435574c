"""Patching beside an installed package that cannot be imported: liger imports none that the model does not need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SUPPORT = Path(__file__).parents[1] / "support"
TRAINING_STEP = """
import sys
import liger, tiny_models
model = liger.patch(tiny_models.make("llama"))
tiny_models.step(model, **tiny_models.batch())
liger.unpatch(model)
assert not {"deepspeed", "peft", "bitsandbytes"} & sys.modules.keys()
"""


@pytest.mark.parametrize("package", ["deepspeed", "peft", "bitsandbytes"])
def test_a_broken_package(package, tmp_path):
    """As a package is that needs another which is not installed."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("import no_such_package_of_liger\n")
    info = tmp_path / f"{package}-99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99.0\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SUPPORT), *sys.path])}
    broken = subprocess.run([sys.executable, "-c", f"import {package}"], env=environment, capture_output=True)
    assert b"no_such_package_of_liger" in broken.stderr
    run = subprocess.run(
        [sys.executable, "-c", TRAINING_STEP], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
