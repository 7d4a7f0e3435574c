# SPDX-License-Identifier: BSD-3-Clause
"""Small helpers that other projects import from liger_kernel: devices, versions, Triton settings."""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._core.runtime.extras import missing

PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None

# Alternative implementations of liger_kernel's kernels: liger has none of them.
IMPL_REGISTRY: dict[str, Any] = {}
LIGER_KERNEL_IMPL_ENV = "LIGER_KERNEL_IMPL"


def is_peft_available() -> bool:
    return PEFT_AVAILABLE


def is_transformers_available() -> bool:
    return importlib.util.find_spec("transformers") is not None


def is_npu_available() -> bool:
    """True if torch has an Ascend NPU."""
    npu = getattr(torch, "npu", None)
    return npu is not None and npu.is_available()


def infer_device() -> str:
    """``"cuda"``, ``"npu"``, ``"xpu"`` or ``"cpu"``: the first that is available."""
    if torch.cuda.is_available():
        return "cuda"
    if is_npu_available():
        return "npu"
    return "xpu" if torch.xpu.is_available() else "cpu"


def infer_comm_backend() -> str:
    """The name of a backend of torch.distributed that this torch has; the GPU's backend comes first.

    Raises:
        RuntimeError: torch has none.
    """
    distributed = torch.distributed
    found = {
        "nccl": distributed.is_nccl_available,
        "hccl": is_npu_available,
        "xccl": distributed.is_xccl_available,
        "mpi": distributed.is_mpi_available,
        "gloo": distributed.is_gloo_available,
    }
    for name, available in found.items():
        if available():
            return name
    raise RuntimeError(f"infer_comm_backend: torch has none of {', '.join(found)}")


# Compute capability -> name of the architecture.
_ARCHITECTURES = {
    (7, 0): "volta_turing",
    (7, 5): "volta_turing",
    (8, 0): "ampere_ada",
    (8, 6): "ampere_ada",
    (8, 9): "ampere_ada",
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (10, 3): "blackwell_ultra",
    (12, 0): "blackwell_consumer",
}


@functools.cache
def infer_device_arch(device_id: int = 0) -> str:
    """An NVIDIA architecture, ``"sm_<major><minor>"`` for unknown ones; else :func:`infer_device`."""
    if infer_device() != "cuda" or torch.version.hip is not None:
        return infer_device()
    major, minor = torch.cuda.get_device_capability(device_id)
    return _ARCHITECTURES.get((major, minor), f"sm_{major}{minor}")


def get_total_gpu_memory() -> int:
    """Memory of device 0 in whole GiB.

    Raises:
        RuntimeError: neither a CUDA nor an XPU device.
    """
    device = infer_device()
    if device not in ("cuda", "xpu"):
        raise RuntimeError(f"get_total_gpu_memory: the device is {device}, expected cuda or xpu")
    return getattr(torch, device).get_device_properties(0).total_memory // 2**30


def transformers_version_dispatch(
    required_version,
    before_fn,
    after_fn,
    before_args=(),
    after_args=(),
    before_kwargs=None,
    after_kwargs=None,
) -> Any:
    """Calls ``after_fn`` from the required version of transformers on, ``before_fn`` for older ones."""
    from packaging.version import Version

    if not is_transformers_available():
        raise ImportError(missing("transformers_version_dispatch", "transformers"))
    from transformers import __version__

    if Version(__version__) < Version(required_version):
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))


# --- of ops.utils -------------------------------------------------------------------------------------------


def is_hip() -> bool:
    return torch.version.hip is not None


@contextlib.contextmanager
def device_context(device: Any) -> Iterator[None]:
    """Makes a device current, if its backend has current devices."""
    device = torch.device(device)
    of_type = getattr(getattr(torch, device.type, None), "device", None)
    with contextlib.nullcontext() if of_type is None else of_type(device):
        yield


def ensure_contiguous(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of the forward or backward of an autograd function: tensors become contiguous."""

    def contiguous(value):
        return value.contiguous() if isinstance(value, torch.Tensor) else value

    @functools.wraps(fn)
    def wrapper(ctx, *args, **kwargs):
        return fn(ctx, *map(contiguous, args), **{name: contiguous(value) for name, value in kwargs.items()})

    return wrapper


LARGEST_BLOCK = 65536
# The smallest block that uses so many warps, larger ones first.
_WARPS = ((32768, 32), (8192, 16), (2048, 8), (0, 4))


def calculate_settings(n: int) -> tuple[int, int]:
    """(block size, warps) of a Triton kernel whose program holds a row of n elements.

    Raises:
        RuntimeError: n above 65536.
    """
    block = 1 << max(n - 1, 0).bit_length()
    if block > LARGEST_BLOCK:
        raise RuntimeError(f"calculate_settings: n is {n}, expected at most {LARGEST_BLOCK} elements per row")
    warps = next(warps for smallest, warps in _WARPS if block >= smallest)
    return block, min(warps, 16) if is_hip() else warps


def compare_version(package: str, operator: Callable[[Any, Any], bool], target: str) -> bool:
    """``operator(version of the package, target)``; False if the package does not import."""
    from packaging.version import Version

    try:
        module = importlib.import_module(package)
    except ImportError:
        return False
    return operator(Version(module.__version__), Version(target))


def get_amp_custom_fwd_bwd() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The decorators ``torch.amp.custom_fwd`` and ``custom_bwd`` for :func:`infer_device`."""
    device = infer_device()
    decorators = torch.amp.custom_fwd, torch.amp.custom_bwd
    return functools.partial(decorators[0], device_type=device), functools.partial(
        decorators[1], device_type=device
    )


amp_custom_fwd, amp_custom_bwd = get_amp_custom_fwd_bwd()


def get_npu_core_count(default: int = 20) -> int:
    """``default``: liger has no kernels for NPUs."""
    return default


def set_large_grf_mode(kernel_args: dict[str, Any]) -> None:
    """Sets the option with which Triton gives kernels for Intel GPUs more registers."""
    kernel_args["grf_mode"] = "256"


def __getattr__(name: str) -> Any:
    # Triton is optional, and only kernels that other projects write need its dtypes.
    if name == "torch_to_triton_dtype":
        import triton.language as tl

        return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
