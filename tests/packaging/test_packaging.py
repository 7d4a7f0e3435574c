"""What is built, packed and installed: sdist, wheel, editable install, build settings, binary compatibility."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from liger._core import load

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]
# As TORCH_TARGET_VERSION in cmake/LigerTorch.cmake says.
OLDEST_TORCH = (2, 10)
LIBRARIES = [
    p for p in (files("liger") / "libliger_ops.so", files("liger") / "libliger_cuda.so") if p.is_file()
]
# Not of the stable ABI, which has no autograd nodes: loaded into the torch that it was built with alone.
NODES = f"libliger_autograd_{load._torch_abi(torch.__version__)}.so"


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


# --- sdist and wheel ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    call(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """(path, build log) of a wheel without CUDA kernels, built from the sdist: so nothing is missing from that."""
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
        *("CMakeLists.txt", "LICENSE", "Makefile", "PKG-INFO", "README.md", "pyproject.toml"),
        *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"),
        *(
            "benchmarks",
            "cmake",
            "compat",
            "csrc",
            "docs",
            "hub",
            "python",
            "scripts",
            "tests",
            "triton_kernels",
        ),
        *(["examples"] if any((ROOT / "examples").glob("*")) else []),
        *(".clang-format", ".gitignore", ".pre-commit-config.yaml", "mkdocs.yml"),
    }
    assert not [name for name in names if re.search(r"\.(so|o|whl|pyc|gz)$|__pycache__", name)]
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.c*")} <= set(names)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel[0]) as archive:
        names = set(archive.namelist())
    package = {name for name in names if not name.startswith("liger_ops-")}
    sources = {f"liger/{p.relative_to(ROOT / 'python/liger')}" for p in (ROOT / "python/liger").rglob("*.py")}
    # Inside liger: a top-level triton_kernels belongs to another distribution.
    kernels = {f"liger/triton_kernels/{p.name}" for p in (ROOT / "triton_kernels").glob("*.py")}
    assert package == sources | kernels | {"liger/py.typed", "liger/libliger_ops.so", f"liger/{NODES}"}


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
    (built_with,) = document["components"]
    assert built_with["purl"] == f"pkg:pypi/torch@{torch.__version__.partition('+')[0]}"
    assert document["dependencies"] == [{"ref": "liger-ops", "dependsOn": ["torch"]}]


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        ("libliger_ops.so", b"torch/include/torch/csrc/stable/"),
        (NODES, b"torch/include/torch/csrc/autograd/"),
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
        metadata = archive.read(name).decode()
        entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ] == [f"Requires-Dist: torch>={oldest}"]
    assert "liger = liger.cli:main" in entry_points


def test_build_without_cuda_says_so(wheel):
    assert "CPU and Triton build, without CUDA kernels (LIGER_BUILD_CUDA=0)" in wheel[1]


def test_build_requirements_are_met_here_and_agree():
    from packaging.requirements import Requirement

    text = (ROOT / "pyproject.toml").read_text()
    requires = [
        Requirement(r) for r in ast.literal_eval(re.search(r"^requires = (\[.*?\])", text, re.M | re.S)[1])
    ]
    assert {r.name for r in requires} == {"scikit-build-core", "ninja", "torch"}
    for requirement in requires:
        assert importlib.metadata.version(requirement.name) in requirement.specifier, requirement
    (torch_requirement,) = [r for r in requires if r.name == "torch"]
    assert str(torch_requirement.specifier) == ">=" + ".".join(map(str, OLDEST_TORCH))
    target = re.search(
        r"TORCH_TARGET_VERSION=0x(\w{2})(\w{2})", (ROOT / "cmake/LigerTorch.cmake").read_text()
    )
    assert tuple(int(part, 16) for part in target.groups()) == OLDEST_TORCH


def test_one_version_everywhere():
    places = {
        "pyproject.toml": r'^version = "(.+)"$',
        "python/liger/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
    }
    found = {path: re.search(pattern, (ROOT / path).read_text(), re.M)[1] for path, pattern in places.items()}
    assert len(set(found.values())) == 1, found


def test_commit_hooks_have_the_versions_of_the_test_extra():
    hooks, extras = ((ROOT / name).read_text() for name in (".pre-commit-config.yaml", "pyproject.toml"))
    for tool in ("ruff", "clang-format", "mypy"):
        (wanted,) = set(re.findall(rf'"{tool}==([\d.]+)"', extras))
        assert set(re.findall(rf'"{tool}==([\d.]+)"', hooks)) == {wanted}, tool


# --- installing -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_python(tmp_path):
    """The interpreter of a new virtual environment that sees the packages of this one, but not its own liger first."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    _, purelib = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    # A .pth line only adds the folder: hooks of editable installs in it are not run.
    folders = [*site.getsitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    (Path(purelib.strip()) / "outer.pth").write_text("\n".join(f for f in folders if f))
    return python


USE = """
import sys, torch, liger, liger.triton_kernels
from liger._core.build_info import build_info
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
    bench = (fresh_python.parent / "liger", "bench", "swiglu", "--self-test", "--no-plots")
    code, out = call(*bench, cwd=tmp_path, check=False)
    assert code == 2 and "the benchmark suite is not part of the installed package" in out
    call(*bench, "--json", tmp_path / "out/r.json", cwd=ROOT / "docs")
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


# --- build settings -------------------------------------------------------------------------------------------------


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
def test_autograd_nodes_as_a_build_setting(tmp_path, value):
    code, output = configure(
        tmp_path, f"-DLIGER_BUILD_AUTOGRAD={value}", "-DLIGER_AUTOGRAD_TORCH_DIRS=", LIGER_BUILD_CUDA=0
    )
    assert code == 0 and ("liger: autograd nodes in C++ for torch" in output) == (value == "ON")


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


@needs_nvcc
@pytest.mark.parametrize(
    ("settings", "built"),
    [
        ({"TORCH_CUDA_ARCH_LIST": "8.0;9.0a+PTX"}, r"80 90a 80\+PTX"),
        ({"LIGER_CUDA_ARCHS": "9.0a", "TORCH_CUDA_ARCH_LIST": "8.0"}, "90a"),
        ({}, r"80 86 89 90a 100 120 120\+PTX"),
    ],
    ids=["torch's setting", "liger's setting wins", "default"],
)
def test_architectures(tmp_path, settings, built):
    code, output = configure(tmp_path, **{"TORCH_CUDA_ARCH_LIST": "", **settings})
    assert code == 0, output
    assert re.search(rf"liger: CUDA [\d.]+ kernels for {built} --", output)


@needs_nvcc
def test_unknown_architecture(tmp_path):
    code, output = configure(tmp_path, LIGER_CUDA_ARCHS="80;37")
    assert code != 0 and re.search(
        r"CUDA architecture '37' is not known to nvcc [\d.]+; it knows [\d;]*80", output
    )


# --- binary compatibility -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.name)
def test_libraries_use_the_stable_abi_of_the_oldest_torch(path):
    from torch_abi_audit import inspect_extension

    verdict = inspect_extension(Path(path)).torch
    assert verdict.uses_torch and verdict.stable
    assert not verdict.unstable_symbols and not verdict.unknown_shim_symbols
    oldest = tuple(int(part) for part in str(verdict.min_torch_version).split(".")[:2])
    assert oldest <= OLDEST_TORCH, verdict.version_defining_symbols


@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.name)
def test_libraries_define_all_their_functions(path):
    """A source file that CMakeLists.txt does not list is noticed when a library is loaded, which needs a CUDA torch."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    _, symbols = call("nm", "--dynamic", "--demangle", "--undefined-only", path)
    assert "torch" in symbols and "liger::" not in symbols, symbols


@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.name)
def test_libraries_need_no_python_and_no_cuda_runtime(path):
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    _, dynamic = call("readelf", "--dynamic", "--wide", path)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    system = {
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
        "libm.so.6",
        "libdl.so.2",
        "libpthread.so.0",
        "librt.so.1",
    }
    system |= {name for name in needed if name.startswith("ld-linux")}
    assert set(needed) - system <= {"libtorch.so", "libtorch_cpu.so"}


@pytest.mark.skipif(not load.NODES_LOADED, reason=f"autograd nodes are {load.NODES_REASON}")
def test_autograd_library_needs_libtorch_alone():
    """Nothing of Python's, so that it serves every Python; exempt from the stable ABI."""
    if shutil.which("nm") is None or shutil.which("readelf") is None:
        pytest.skip("needs nm and readelf")
    path = files("liger") / NODES
    _, symbols = call("nm", "--dynamic", "--demangle", "--undefined-only", path)
    assert "torch::autograd::Node" in symbols and " Py" not in symbols and " _Py" not in symbols
    _, dynamic = call("readelf", "--dynamic", "--wide", path)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert {n for n in needed if not re.match(r"lib(stdc\+\+|gcc_s|c|m)\.so|ld-linux", n)} == {
        "libtorch_cpu.so",
        "libc10.so",
    }


def test_autograd_library_is_loaded_into_its_torch_alone(monkeypatch, tmp_path):
    monkeypatch.delenv("LIGER_AUTOGRAD", raising=False)
    for version, name in {
        "2.13.0": "2_13",
        "2.13.1+cu130": "2_13",
        "2.14.0a0+gitb4e4ee8": "2_14_0a0_gitb4e4ee8",
        "2.15.0.dev20261101+cpu": "2_15_0_dev20261101_cpu",
    }.items():
        assert load._torch_abi(version) == name
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert load._load_nodes() == (False, "in Python: this build has no autograd nodes for torch 2.99.0")
    broken = tmp_path / "libliger_autograd_2_99.so"
    broken.write_bytes(b"")
    monkeypatch.setattr(load, "_library", lambda name: tmp_path / f"lib{name}.so")
    loaded, reason = load._load_nodes()
    assert not loaded and reason.startswith("in Python: libliger_autograd_2_99.so did not load: ")


USE_NODES = """
import torch, liger
from liger._core import load
print(load.NODES_LOADED, liger.rms_norm(torch.ones(2, 4, requires_grad=True)).grad_fn.name())
"""


def test_autograd_nodes_are_python_on_request():
    last = call(sys.executable, "-c", USE_NODES, LIGER_AUTOGRAD="python")[1].splitlines()[-1]
    assert last == "False rms_normBackward"
    expected = f"{load.NODES_LOADED} rms_normBackward"
    assert call(sys.executable, "-c", USE_NODES, LIGER_AUTOGRAD="auto")[1].splitlines()[-1] == expected
    code, output = call(sys.executable, "-c", USE_NODES, check=False, LIGER_AUTOGRAD="c++")
    assert code == 1 and "ValueError: LIGER_AUTOGRAD: expected auto or python, got 'c++'" in output


def test_cuda_library_is_not_loaded_into_a_torch_without_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(load, "_library", lambda name: tmp_path / f"lib{name}.so")
    # Loading would raise: there is no such file.
    assert load._load_cuda() == (False, "this torch has no CUDA")


# --- importing ------------------------------------------------------------------------------------------------------


def test_import_is_quick_and_pulls_in_nothing_large(tmp_path):
    """Under 0.3 s on top of torch; the best of three, since the machine may be busy."""
    best = float("inf")
    for _ in range(3):
        code = "import torch, sys; before = set(sys.modules); import liger; print(*set(sys.modules) - before)"
        _, output = call(sys.executable, "-X", "importtime", "-c", code, cwd=tmp_path)
        times = {
            name: int(t) for t, name in re.findall(r"import time: +\d+ \| +(\d+) \| +(\S+)$", output, re.M)
        }
        best = min(best, times["liger"] / 1e6)
    imported = {name.partition(".")[0] for name in output.splitlines()[-1].split()}
    assert "liger" in imported
    assert not imported & {"transformers", "triton", "matplotlib", "tokenizers"}
    assert best < 0.3
