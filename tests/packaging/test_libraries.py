# SPDX-License-Identifier: BSD-3-Clause
"""The installed libraries: what they need, which torch they are loaded into, and how long the import
takes."""

import re
import shutil
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from packages import EXTENSION, OLDEST_TORCH, call

from liger._core.runtime import load

pytestmark = pytest.mark.packaging

LIBRARIES = [
    p for p in (files("liger") / "libliger_ops.so", files("liger") / "libliger_cuda.so") if p.is_file()
]


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
    """A source file that CMakeLists.txt does not list is noticed when a library is loaded, which needs a CUDA
    torch."""
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


def test_the_extension_for_this_python_loads():
    """Python serves every call without it, so no other test would fail."""
    assert "did not load" not in load.C_REASON


@pytest.mark.skipif(load.C is None, reason=f"liger._C is {load.C_REASON}")
def test_the_extension_needs_libtorch_alone():
    """Exempt from the stable ABI. No libpython: the interpreter of the process has the symbols."""
    if shutil.which("nm") is None or shutil.which("readelf") is None:
        pytest.skip("needs nm and readelf")
    path = files("liger") / EXTENSION
    _, symbols = call("nm", "--dynamic", "--demangle", "--undefined-only", path)
    assert "torch::autograd::Node" in symbols and " PyTuple_New" in symbols
    _, dynamic = call("readelf", "--dynamic", "--wide", path)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert {n for n in needed if not re.match(r"lib(stdc\+\+|gcc_s|c|m)\.so|ld-linux", n)} == {
        "libtorch_python.so",
        "libtorch_cpu.so",
        "libc10.so",
    }


def test_the_extension_is_loaded_into_its_torch_alone(monkeypatch, tmp_path):
    monkeypatch.delenv("LIGER_AUTOGRAD", raising=False)
    for version, name in {
        "2.13.0": "2_13",
        "2.13.1+cu130": "2_13",
        "2.14.0a0+gitb4e4ee8": "2_14_0a0_gitb4e4ee8",
        "2.15.0.dev20261101+cpu": "2_15_0_dev20261101_cpu",
    }.items():
        assert load._torch_abi(version) == name
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    python = sys.version.split()[0]
    why = f"not in this build for Python {python} and torch 2.99.0"
    assert load._load_extension() == (None, why)
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    broken = tmp_path / f"libliger_C_cpython_399{sys.abiflags}_torch_2_99.so"
    broken.write_bytes(b"")
    monkeypatch.setattr(load, "_library", lambda name: tmp_path / f"lib{name}.so")
    module, reason = load._load_extension()
    assert module is None and reason.startswith(f"{broken.name} did not load: ")


# What libcuda.so.1 of a driver answers.
DRIVER = """
extern "C" int cuDriverGetVersion(int* version) { *version = VERSION; return STATUS; }
"""
# The import in a build with CUDA kernels of CUDA 13.0: of the same files, with the stand-in of a driver.
LOAD_CUDA = """
import pathlib, sys, warnings
import torch
import liger
from liger._core.op import backend
from liger._core.runtime import load

torch.version.cuda = torch.version.cuda or "12.6"
load._library = lambda name: pathlib.Path(sys.argv[1])
load.torch.ops.liger.build_info = lambda: ["cuda=13.0.88"]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    load.CUDA_LOADED, load.CUDA_REASON = load._load_cuda()
backend._apply_all(backend._requested)
print([str(w.message) for w in caught], load.CUDA_REASON, liger.backend_report()["rms_norm"], sep="\\n")
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("version", "status", "too_old"), [(12080, 0, True), (13000, 0, False), (12080, 3, False)]
)
def test_a_driver_older_than_the_kernels(tmp_path, version, status, too_old):
    pytest.importorskip("triton")
    (tmp_path / "driver.cpp").write_text(DRIVER)
    defined = (f"-DVERSION={version}", f"-DSTATUS={status}")
    call("c++", "-shared", "-fPIC", *defined, tmp_path / "driver.cpp", "-o", tmp_path / "libcuda.so.1")
    (tmp_path / "libliger_cuda.so").write_bytes(b"")
    output = call(
        *(sys.executable, "-c", LOAD_CUDA, tmp_path / "libliger_cuda.so"), LD_LIBRARY_PATH=tmp_path
    )[1]
    warned, reason, report = output.splitlines()[-3:]
    if too_old:
        why = "the NVIDIA driver supports CUDA 12.8, the CUDA kernels need one for CUDA 13.0"
        assert reason == why and warned == f"['liger: {why}; Triton serves CUDA tensors instead']"
        assert (
            report.startswith("{'backend': 'triton', 'reason': 'auto: triton ")
            and f"not cuda: {why}" in report
        )
    else:
        # It goes on to load the library, which is an empty file here.
        assert warned == "[]" and reason.startswith("libliger_cuda.so did not load: ")


USE_EXTENSION = """
import sys, torch, liger
print("liger._C" in sys.modules, liger.rms_norm(torch.ones(2, 4, requires_grad=True)).grad_fn.name())
"""


def test_all_is_python_on_request():
    last = call(sys.executable, "-c", USE_EXTENSION, LIGER_AUTOGRAD="python")[1].splitlines()[-1]
    assert last == "False rms_normBackward"
    expected = f"{load.C is not None} rms_normBackward"
    assert call(sys.executable, "-c", USE_EXTENSION, LIGER_AUTOGRAD="auto")[1].splitlines()[-1] == expected
    code, output = call(sys.executable, "-c", USE_EXTENSION, check=False, LIGER_AUTOGRAD="c++")
    assert code == 1 and "ValueError: LIGER_AUTOGRAD: expected auto or python, got 'c++'" in output


def test_cuda_library_is_not_loaded_into_a_torch_without_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(load, "_library", lambda name: tmp_path / f"lib{name}.so")
    # Loading would raise: there is no such file.
    assert load._load_cuda() == (False, "this torch has no CUDA")


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
