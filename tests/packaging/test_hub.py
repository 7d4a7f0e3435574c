# SPDX-License-Identifier: BSD-3-Clause
"""The folder hub/ has what kernel-builder needs to publish it, in edition 5 of its format."""

import json
import re
import shutil

import pytest
from forked_python import python
from hub_layers import HUB, LAYERS

tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")

# The keys of edition 5 that a project without compiled code may have. kernel-builder refuses other ones.
GENERAL = {
    "name", "version", "edition", "license", "backends", "upstream", "source", "hub", "kernel-depends",
    "python-depends", "cuda", "neuron", "tpu", "xpu",
}  # fmt: skip
NOARCH = {"pyext", "cuda_capabilities", "rocm_archs"}
BACKENDS = {"cann", "cpu", "cuda", "metal", "neuron", "rocm", "tpu", "xpu"}


@pytest.fixture
def configuration():
    return tomllib.loads((HUB / "build.toml").read_text())


def test_build_toml(configuration):
    assert configuration.keys() == {"general", "torch-noarch"}
    general = configuration["general"]
    assert {"name", "version", "edition", "license", "backends"} <= general.keys() <= GENERAL
    assert configuration["torch-noarch"].keys() <= NOARCH
    assert general["edition"] == 5
    assert re.fullmatch("[a-z][-a-z0-9]*[a-z0-9]", general["name"])
    assert isinstance(general["version"], int)
    assert general["backends"] and set(general["backends"]) <= BACKENDS
    # Its own list, in which liger-ops is not.
    assert set(general.get("python-depends", [])) <= {"einops", "helion", "nvidia-cutlass-dsl"}


def test_paths(configuration):
    module = configuration["general"]["name"].replace("-", "_")
    assert (HUB / "torch-ext" / module / "__init__.py").is_file()
    assert (HUB / module).resolve() == (HUB / "torch-ext" / module).resolve()
    # kernel-builder writes it.
    assert not (HUB / "torch-ext" / module / "_ops.py").exists()
    assert "path = ./.;" in (HUB / "flake.nix").read_text()
    card = (HUB / "CARD.md").read_text()
    assert card.startswith("---\nlibrary_name: kernels\n") and card.count("---\n") == 2
    # Variables that kernel-builder fills in.
    names = set(re.findall(r"{{ (\w+) }}", card))
    assert names <= {"repo_id", "license", "version", "layer"}


def test_metadata_is_that_of_the_configuration(configuration):
    metadata, general = json.loads((HUB / "metadata.json").read_text()), configuration["general"]
    assert {key: metadata[key] for key in ("name", "version", "license")} == {
        key: general[key] for key in ("name", "version", "license")
    }
    assert metadata["backend"]["type"] in general["backends"]


SCRIPT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "liger":
            raise ModuleNotFoundError("No module named 'liger'", name="liger")

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, sys.argv[1])
import liger_ops
import torch
assert set(sys.argv[2:]) <= set(vars(liger_ops.layers))
norm = torch.nn.RMSNorm(4, eps=1e-6)
try:
    liger_ops.layers.LigerRMSNorm.forward(norm, torch.ones(2, 4))
except ModuleNotFoundError as error:
    assert "pip install liger-ops" in str(error) and "liger.rms_norm" in str(error), error
else:
    raise AssertionError("ran without liger-ops")
"""


def test_import_without_liger_ops(tmp_path):
    """kernel-builder imports what it has built in an environment without liger-ops."""
    shutil.copytree(HUB / "torch-ext", tmp_path / "built", ignore=shutil.ignore_patterns("__pycache__"))
    run = python("-c", SCRIPT, tmp_path / "built", *LAYERS.values(), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
