# SPDX-License-Identifier: BSD-3-Clause
"""Loads the compiled libraries: schemas always, CUDA kernels only into a torch with CUDA, liger._C only into
the Python and the torch that it was built for."""

import ctypes
import os
import re
import sys
import warnings
from importlib.machinery import ExtensionFileLoader
from importlib.resources import files
from importlib.util import module_from_spec, spec_from_file_location

import torch

from .build_info import build_info
from .environment import python_nodes


def _library(name):
    # importlib.resources also finds the libraries of an editable install, which are not in the source folder.
    path = files("liger") / f"lib{name}.so"
    return path if path.is_file() else None


def _is_loaded(path):
    """True if this process has loaded the library from this file."""
    try:
        ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _libraries_of_the_process(name):
    """Paths of the loaded libraries of this file name, as Linux lists them; empty elsewhere."""
    maps = "/proc/self/maps"
    if not os.path.exists(maps):
        return []
    with open(maps) as lines:
        paths = {line.split(maxsplit=5)[5].strip() for line in lines if line.rstrip().endswith(f"/{name}")}
    return sorted(paths)


def _refuse_a_second_copy(path):
    """Raises ImportError if another installation has registered the ops: a second registration aborts the
    process."""
    if not torch._C._dispatch_has_kernel("liger::rms_norm") or _is_loaded(path):
        return
    others = " and ".join(_libraries_of_the_process(path.name)) or "another library"
    raise ImportError(
        f"liger: this process has the ops of torch.ops.liger from {others} already, and cannot load the "
        f"ops of {path} as well. Use one installation of liger-ops in a process."
    )


def _load_schemas():
    path = _library("liger_ops")
    if path is None:
        raise ImportError(
            "liger: the compiled library libliger_ops.so is missing from the package. "
            "Install it with 'pip install .' (a C++ compiler is enough; nvcc adds the CUDA kernels)."
        )
    _refuse_a_second_copy(path)
    torch.ops.load_library(str(path))


def _cuda_of_the_driver():
    """(major, minor) of the newest CUDA version that the NVIDIA driver supports; None without a driver."""
    version = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if status else (version.value // 1000, version.value % 1000 // 10)


def _driver_is_too_old(built):
    """Why the driver cannot run kernels of a CUDA version; empty if it can: it runs all of its major
    version."""
    driver = _cuda_of_the_driver()
    needed = int(built.partition(".")[0])
    if driver is None or driver[0] >= needed:
        return ""
    return "the NVIDIA driver supports CUDA {}.{}, the CUDA kernels need one for CUDA {}.0".format(
        *driver, needed
    )


def _load_cuda():
    """(whether the CUDA kernels are registered, the reason in words)"""
    path = _library("liger_cuda")
    if path is None:
        return False, "this build has no CUDA kernels (no nvcc when it was built, or LIGER_BUILD_CUDA=0)"
    if torch.version.cuda is None:
        return False, "this torch has no CUDA"
    # The library would load, and its first kernel launch would fail.
    if reason := _driver_is_too_old(build_info()["cuda"]):
        warnings.warn(f"liger: {reason}; Triton serves CUDA tensors instead", stacklevel=2)
        return False, reason
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return False, f"libliger_cuda.so did not load: {error.__cause__ or error}"
    return True, f"compiled CUDA kernels, loaded into torch {torch.__version__}"


def _torch_abi(version):
    """The part of a torch version that C++ code depends on: a release keeps its ABI within major.minor,
    anything else is one of its kind. cmake/LigerExtension.cmake does the same."""
    release = re.fullmatch(r"(\d+)\.(\d+)\.\d+([+].*)?", version)
    return "_".join(release.groups()[:2]) if release else re.sub("[^0-9A-Za-z]", "_", version)


def _extension_name():
    """Of the library of liger._C for this Python and this torch."""
    python = sys.implementation.cache_tag.replace("-", "_") + sys.abiflags
    return f"liger_C_{python}_torch_{_torch_abi(torch.__version__)}"


def _load_extension():
    """(the module liger._C or None, the reason in words)"""
    if python_nodes():
        return None, "not used: LIGER_AUTOGRAD=python"
    path = _library(_extension_name())
    if path is None:
        return None, f"not in this build for Python {sys.version.split()[0]} and torch {torch.__version__}"
    loader = ExtensionFileLoader("liger._C", str(path))
    try:
        module = module_from_spec(spec_from_file_location("liger._C", path, loader=loader))
        loader.exec_module(module)
    except ImportError as error:
        return None, f"{path.name} did not load: {error}"
    sys.modules["liger._C"] = module
    return module, f"built for this Python and this torch ({path.name})"


_load_schemas()
CUDA_LOADED, CUDA_REASON = _load_cuda()
C, C_REASON = _load_extension()
