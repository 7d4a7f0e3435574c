# SPDX-License-Identifier: BSD-3-Clause
"""What CMake makes of build settings: CUDA kernels or none, architectures, liger._C."""

import json
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from packages import ROOT, call

from liger._core.runtime import load

pytestmark = pytest.mark.packaging


def configure(folder, *definitions, **environment):
    """Runs CMake's configure step; (exit code, output with every run of spaces and newlines as one space)."""
    code, output = call(
        *("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DSKBUILD_PROJECT_VERSION=0"),
        f"-DPython_EXECUTABLE={sys.executable}",
        *definitions,
        check=False,
        **environment,
    )
    return code, " ".join(output.split())


@pytest.mark.parametrize("value", ["ON", "OFF"])
def test_the_extension_as_a_build_setting(tmp_path, value):
    code, output = configure(
        tmp_path, f"-DLIGER_BUILD_EXTENSION={value}", "-DLIGER_EXTENSION_TORCH_DIRS=", LIGER_BUILD_CUDA=0
    )
    assert code == 0 and ("liger: liger._C for " in output) == (value == "ON")


def test_the_extension_for_further_versions(tmp_path):
    """Of Python and torch: each pair once. The bill of materials names every torch, and pybind11."""
    pybind11 = pytest.importorskip("pybind11")
    for version in ("2.10.3+cpu", "2.99.0.dev20270101", "0"):
        header = tmp_path / version / "include/torch/csrc/autograd/saved_variable.h"
        header.parent.mkdir(parents=True)
        header.touch()
        (tmp_path / version / "version.py").write_text(f"__version__ = '{version}'\n")
    header.unlink()
    folders = ";".join(str(tmp_path / name) for name in ("2.10.3+cpu", "2.99.0.dev20270101", "0"))
    code, output = configure(
        *(tmp_path / "build", f"-DLIGER_EXTENSION_TORCH_DIRS={folders}"),
        *(f"-DLIGER_EXTENSION_PYTHONS={sys.executable}", f"-DSKBUILD_METADATA_DIR={tmp_path / 'metadata'}"),
        LIGER_BUILD_CUDA=0,
    )
    assert code == 0
    python = load._extension_name().removeprefix("liger_C_").partition("_torch_")[0]
    found = re.findall(r"liger: liger._C for (\S+) and torch (\S+)", output)
    assert found[1:] == [(python, "2_10"), (python, "2_99_0_dev20270101")] and found[0][0] == python
    assert f"and {tmp_path / '0'}: {header} is missing" in output
    document = json.loads((tmp_path / "build/liger-ops.cdx.json").read_text())
    here = torch.__version__.partition("+")[0]
    refs = [
        *(f"torch@{v}" for v in (here, "2.10.3", "2.99.0.dev20270101")),
        f"pybind11@{pybind11.__version__}",
    ]
    assert [c["purl"] for c in document["components"]] == [f"pkg:pypi/{ref}" for ref in refs]
    assert document["dependencies"] == [{"ref": "liger-ops", "dependsOn": refs}]


def path_without_nvcc():
    folders = [f for f in os.environ["PATH"].split(os.pathsep) if not os.access(Path(f) / "nvcc", os.X_OK)]
    path = os.pathsep.join([sysconfig.get_path("scripts"), *folders])
    if shutil.which("c++", path=path) is None:
        pytest.skip("nvcc lies in the folder of the C++ compiler")
    return path


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def test_cuda_required_but_missing(tmp_path):
    code, output = configure(tmp_path, LIGER_BUILD_CUDA=1, PATH=path_without_nvcc(), CUDACXX="")
    assert code != 0
    assert "LIGER_BUILD_CUDA=1, but no CUDA compiler was found. Put nvcc on PATH or set CUDACXX." in output


@needs_nvcc
def test_compiler_installed_after_a_build_without(tmp_path):
    code, output = configure(tmp_path, PATH=path_without_nvcc(), CUDACXX="")
    assert code == 0 and "CPU and Triton build, without CUDA kernels (LIGER_BUILD_CUDA=auto)" in output
    code, output = configure(tmp_path, LIGER_CUDA_ARCHS="80;90a")
    assert code == 0 and re.search(r"liger: CUDA [\d.]+ kernels for 80 90a 80\+PTX", output)


def test_unknown_cuda_setting(tmp_path):
    code, output = configure(tmp_path, LIGER_BUILD_CUDA="maybe")
    assert code != 0 and "LIGER_BUILD_CUDA is 'maybe', expected 0, 1 or auto" in output


def a_machine_with(folder, capabilities):
    """A PATH whose nvidia-smi knows GPUs of these compute capabilities."""
    folder.mkdir()
    tool = folder / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$1" = --query-gpu=compute_cap ] || exit 1\nprintf "{capabilities}"\n')
    tool.chmod(0o755)
    return os.pathsep.join([str(folder), sysconfig.get_path("scripts"), os.environ["PATH"]])


ALL = r"80 86 89 90a 100 120 120\+PTX"
GPUS = ", the GPUs of this machine; LIGER_CUDA_ARCHS=all for every one"


@needs_nvcc
@pytest.mark.parametrize(
    ("settings", "gpus", "built"),
    [
        ({"TORCH_CUDA_ARCH_LIST": "8.0;9.0a+PTX"}, "8.6", r"80 90a 80\+PTX"),
        ({"LIGER_CUDA_ARCHS": "9.0a", "TORCH_CUDA_ARCH_LIST": "8.0"}, "8.6", "90a"),
        ({}, "", ALL),
        ({}, "9.0", "90a" + GPUS),
        ({}, "8.6\\n9.0\\n8.6", r"86 90a 86\+PTX" + GPUS),
        ({}, "7.5", ALL),
        ({"LIGER_CUDA_ARCHS": "all"}, "8.6", ALL),
    ],
    ids=["torch's setting", "liger's setting wins", "no GPU", "a GPU", "GPUs", "an old GPU", "all"],
)
def test_architectures(tmp_path, settings, gpus, built):
    path = a_machine_with(tmp_path / "tools", gpus)
    code, output = configure(tmp_path / "build", PATH=path, **{"TORCH_CUDA_ARCH_LIST": "", **settings})
    assert code == 0, output
    assert re.search(rf"liger: CUDA [\d.]+ kernels for {built} --", output)


@needs_nvcc
def test_unknown_architecture(tmp_path):
    code, output = configure(tmp_path, LIGER_CUDA_ARCHS="80;37")
    assert code != 0 and re.search(
        r"CUDA architecture '37' is not known to nvcc [\d.]+; it knows [\d;]*80", output
    )
