# SPDX-License-Identifier: BSD-3-Clause
"""What is built, packed and installed: sdist, wheel, editable install."""

import ast
import importlib.metadata
import json
import os
import re
import site
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from packages import EXTENSION, OLDEST_TORCH, ROOT, call

pytestmark = pytest.mark.packaging


# --- sdist and wheel ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    call(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """(path, build log) of a wheel without CUDA kernels, built from the sdist: so nothing is missing from
    that."""
    folder = tmp_path_factory.mktemp("wheel")
    _, log = call(
        *(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--verbose",
            "--no-build-isolation",
            "--no-deps",
            "--no-cache-dir",
        ),
        *("--wheel-dir", folder, sdist),
        LIGER_BUILD_CUDA=0,
    )
    (path,) = folder.glob("*.whl")
    return path, log


def test_sdist_holds_the_sources_and_nothing_else(sdist):
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    tops = {name.partition("/")[0] for name in names}
    assert tops == {
        *("CMakeLists.txt", "LICENSE", "Makefile", "NOTICE", "PKG-INFO", "README.md", "pyproject.toml"),
        *("CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"),
        *("cmake", "compat", "csrc", "docs", "hub", "python", "scripts", "tests", "triton_kernels"),
        *(["examples"] if any((ROOT / "examples").glob("*")) else []),
        *(".clang-format", ".gitignore", ".pre-commit-config.yaml", "mkdocs.yml"),
    }
    assert sdist.stat().st_size < 1.6e6
    assert not [name for name in names if re.search(r"\.(so|o|whl|pyc|gz)$|__pycache__", name)]
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.c*")} <= set(names)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel[0]) as archive:
        names = set(archive.namelist())
    package = {name for name in names if not name.startswith("liger_ops-")}
    sources = {str(p.relative_to(ROOT / "python")) for p in (ROOT / "python").rglob("*.py")}
    # Inside liger: a top-level triton_kernels belongs to another distribution.
    kernels = {f"liger/triton_kernels/{p.name}" for p in (ROOT / "triton_kernels").glob("*.py")}
    assert package == sources | kernels | {"liger/py.typed", "liger/libliger_ops.so", f"liger/{EXTENSION}"}


def test_wheel_is_tagged_for_every_python(wheel):
    assert "-py3-none-linux_" in wheel[0].name
    with zipfile.ZipFile(wheel[0]) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/WHEEL")]
        text = archive.read(name).decode()
    assert re.findall("^Tag: (.+)$", text, re.M) == [wheel[0].stem.split("-", 2)[2]]
    assert "Root-Is-Purelib: false" in text


def test_wheel_has_a_bill_of_materials(wheel):
    with zipfile.ZipFile(wheel[0]) as archive:
        (name,) = [n for n in archive.namelist() if ".dist-info/sboms/" in n]
        document = json.loads(archive.read(name))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["version"] == wheel[0].name.split("-")[1]
    built_with, binding = document["components"]
    assert built_with["purl"] == f"pkg:pypi/torch@{torch.__version__.partition('+')[0]}"
    assert binding["name"] == "pybind11"
    refs = [component["bom-ref"] for component in document["components"]]
    assert document["dependencies"] == [{"ref": "liger-ops", "dependsOn": refs}]


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        ("libliger_ops.so", b"torch/include/torch/csrc/stable/"),
        (EXTENSION, b"torch/include/torch/csrc/autograd/"),
    ],
)
def test_libraries_do_not_name_folders_of_the_build_machine(wheel, name, headers):
    with zipfile.ZipFile(wheel[0]) as archive:
        library = archive.read(f"liger/{name}")
    assert headers in library
    assert str(Path(torch.__file__).parent).encode() not in library and b"/csrc/" not in library.replace(
        b"torch/include/torch/csrc/", b""
    )


def test_wheel_metadata(wheel):
    with zipfile.ZipFile(wheel[0]) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode().partition("\n\n")[0]
        entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
        licences = {Path(n).name for n in archive.namelist() if ".dist-info/licenses/" in n}
    needed = [line for line in re.findall("^Requires-Dist: (.+)$", text, re.M) if "extra" not in line]
    assert needed == [f"torch>={'.'.join(map(str, OLDEST_TORCH))}"]
    assert "liger = liger_cli:main" in entry_points
    assert "liger-ops = liger.integrations.axolotl:LigerOpsPlugin" in entry_points
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    assert fields["Author"] == "The liger-ops authors" and fields["License-Expression"] == "BSD-3-Clause"
    assert fields["Project-URL"].startswith("Repository, https://") and licences == {"LICENSE", "NOTICE"}
    assert "Classifier: Typing :: Typed" in text
    # Extras are what a user wants; what a contributor needs is in dependency groups.
    assert set(re.findall("^Provides-Extra: (.+)$", text, re.M)) == {"demo", "transformers", "triton", "trl"}


def test_a_wheel_without_cuda_kernels_by_its_version(tmp_path):
    how = ("--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir", "--verbose")
    where = ("-C", f"build-dir={tmp_path / 'build'}", "--wheel-dir", tmp_path)
    # The setting decides, whatever nvcc and the other variable say.
    _, log = call(
        sys.executable, "-m", "pip", "wheel", *how, *where, ROOT, LIGER_CPU_WHEEL=1, LIGER_BUILD_CUDA=1
    )
    (path,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"liger_ops-[\d.]+\+cpu-py3-none-linux_\w+\.whl", path.name)
    assert "CPU and Triton build, without CUDA kernels" in log


def test_build_without_cuda_says_so(wheel):
    assert "CPU and Triton build, without CUDA kernels (LIGER_BUILD_CUDA=0)" in wheel[1]


def test_build_requirements_are_met_here_and_agree():
    from packaging.requirements import Requirement

    text = (ROOT / "pyproject.toml").read_text()
    requires = [
        Requirement(r) for r in ast.literal_eval(re.search(r"^requires = (\[.*?\])", text, re.M | re.S)[1])
    ]
    assert {r.name for r in requires} == {"scikit-build-core", "ninja", "pybind11", "torch"}
    for requirement in requires:
        assert importlib.metadata.version(requirement.name) in requirement.specifier, requirement
    (torch_requirement,) = [r for r in requires if r.name == "torch"]
    assert str(torch_requirement.specifier) == ">=" + ".".join(map(str, OLDEST_TORCH))
    target = re.search(
        r"TORCH_TARGET_VERSION=0x(\w{2})(\w{2})", (ROOT / "cmake/LigerTorch.cmake").read_text()
    )
    assert tuple(int(part, 16) for part in target.groups()) == OLDEST_TORCH


def test_one_version_everywhere():
    places = {"python/liger/__init__.py": r'^__version__ = "(.+)"$', "CITATION.cff": r"^version: (.+)$"}
    found = {path: re.search(pattern, (ROOT / path).read_text(), re.M)[1] for path, pattern in places.items()}
    assert len(set(found.values())) == 1, found


def test_commit_hooks_have_the_versions_of_the_test_group():
    hooks, settings = ((ROOT / name).read_text() for name in (".pre-commit-config.yaml", "pyproject.toml"))
    for tool in ("ruff", "clang-format", "mypy"):
        (wanted,) = set(re.findall(rf'"{tool}==([\d.]+)"', settings))
        assert set(re.findall(rf'"{tool}==([\d.]+)"', hooks)) == {wanted}, tool


# --- installing ---------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_python(tmp_path):
    """The interpreter of a new virtual environment that sees the packages of this one, but not its own liger
    first."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    _, purelib = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    # A .pth line only adds the folder: hooks of editable installs in it are not run.
    folders = [*site.getsitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    (Path(purelib.strip()) / "outer.pth").write_text("\n".join(f for f in folders if f))
    return python


USE = """
import sys, torch, liger, liger.triton_kernels
from liger._core.runtime.build_info import build_info
x = torch.randn(4, 8, requires_grad=True)
liger.rms_norm(x, torch.ones(8)).sum().backward()
print(liger.__file__, liger.triton_kernels.__file__, build_info()["cuda"] or "no-cuda")
"""


def test_wheel_in_a_fresh_environment(wheel, fresh_python, tmp_path):
    # The environment around it may have the same wheel.
    how = ("--no-deps", "--no-index", "--ignore-installed")
    call(sys.executable, "-m", "pip", "--python", fresh_python, "install", *how, wheel[0])
    _, out = call(fresh_python, "-c", USE, cwd=tmp_path)
    package, kernels, cuda = out.split()[-3:]
    assert package.startswith(str(tmp_path)) and kernels.startswith(str(tmp_path)) and cuda == "no-cuda"
    _, out = call(fresh_python.parent / "liger", "info", cwd=tmp_path)
    assert "CPU and Triton build, without CUDA kernels" in out
    bench = (fresh_python, ROOT / "benchmarks/run.py", "swiglu", "--self-test")
    call(*bench, "--json", tmp_path / "out/r.json", cwd=tmp_path)
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".md"]


def test_editable_in_a_fresh_environment(fresh_python, tmp_path):
    call(
        *(sys.executable, "-m", "pip", "--python", fresh_python, "install", "--no-deps", "--no-index"),
        *("--no-build-isolation", "--config-settings", f"build-dir={tmp_path / 'build'}", "--editable", ROOT),
        LIGER_BUILD_CUDA=0,
    )
    _, out = call(fresh_python, "-c", USE, cwd=tmp_path)
    package, kernels, _ = out.split()[-3:]
    assert Path(package) == ROOT / "python/liger/__init__.py"
    assert Path(kernels) == ROOT / "triton_kernels/__init__.py"
