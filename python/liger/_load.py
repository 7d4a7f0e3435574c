"""Loading the compiled libraries: schemas always, CUDA kernels only where torch has CUDA."""

from importlib.resources import files

import torch


def _library(name):
    # importlib.resources follows an editable install, whose libraries do not lie beside its sources.
    path = files("liger") / f"lib{name}.so"
    return path if path.is_file() else None


def _load_schemas():
    path = _library("liger_ops")
    if path is None:
        raise ImportError(
            "liger: the compiled library libliger_ops.so is missing from the package. "
            "Install it with 'pip install .' (a C++ compiler is enough; nvcc adds the CUDA kernels)."
        )
    torch.ops.load_library(str(path))


def _load_cuda():
    """Returns (loaded, why): whether the CUDA kernels are registered, and the reason in words."""
    path = _library("liger_cuda")
    if path is None:
        return False, "this build has no CUDA kernels (no nvcc when it was built, or LIGER_BUILD_CUDA=0)"
    if torch.version.cuda is None:
        return False, "this torch has no CUDA"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return False, f"libliger_cuda.so did not load: {error}"
    return True, f"compiled CUDA kernels, loaded into torch {torch.__version__}"


_load_schemas()
CUDA_LOADED, CUDA_REASON = _load_cuda()
