"""Which implementation serves each op: ahead-of-time CUDA, Triton, or plain torch.

``LIGER_BACKEND`` (read once, at import) is ``auto``, a backend, or a backend followed by exceptions::

    LIGER_BACKEND=triton,rms_norm=cuda
    LIGER_BACKEND=auto,fused_linear_ce=torch

The choice concerns CUDA tensors. CPU tensors are always served by the torch backend, except that ``triton`` also serves
them under ``TRITON_INTERPRET=1``. ``auto`` takes what the devices of the machine support, the faster one where that was
measured (docs/performance/dispatch.md); an explicit backend is taken or refused, never replaced.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import warnings
from dataclasses import dataclass, field

import torch

from ._core import load
from ._core.log import log_dispatch

BACKENDS = ("cuda", "triton", "torch")
VARIABLE = "LIGER_BACKEND"
# Ampere: bfloat16 and cp.async in the kernels. A binary for 8.0 also serves 8.6 to 8.9 and its PTX the later ones.
MIN_CAPABILITY = (8, 0)

# By compute capability and op, the faster of cuda and triton where both were measured. Elsewhere auto takes cuda if it
# has a binary for the device, else triton. How to measure and decide: docs/performance/dispatch.md.
FASTER = {
    (9, 0): {
        "rms_norm": "cuda",
        "fused_add_rms_norm": "cuda",
        "layer_norm": "cuda",
        "group_norm": "cuda",
        "swiglu": "cuda",
        "geglu": "cuda",
        "relu_squared": "cuda",
        "softmax": "cuda",
        "rope": "cuda",
        "cross_entropy": "cuda",
        "divergence": "cuda",
        "fused_linear_ce": "cuda",
    },
}

_library = torch.library.Library("liger", "IMPL")


class BackendUnavailable(RuntimeError):
    """An explicitly requested backend cannot serve an op here; the message says what is missing."""


@dataclass
class Family:
    """One public op with its backward and in-place companions: they change backend together."""

    name: str
    torch_kernels: dict
    triton_module: str
    choice: str = "auto"
    reason: str = ""
    _override: object = field(default=None, repr=False)


FAMILIES: dict[str, Family] = {}


# Ops whose one implementation, of other ops and torch's, serves every device: nothing to choose.
PORTABLE = {}


def environment_flag(name):
    """Whether an environment variable is 1; unset or empty it is 0.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    text = os.environ.get(name) or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got '{text}'")
    return text == "1"


def triton_interpreted():
    return environment_flag("TRITON_INTERPRET")


def targets_checked():
    return environment_flag("LIGER_CHECK_TARGETS")


def _checking_memory(op, kernel):
    """A Python kernel with the check that compiled ones of ops that write have of their own: no overlapping memory."""
    arguments = getattr(torch.ops.liger, op).default._schema.arguments
    tensors = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
    writes = [i for i in tensors if arguments[i].alias_info is not None and arguments[i].alias_info.is_write]
    if not writes:
        return kernel
    order = [*writes, *(i for i in tensors if i not in writes)]

    @functools.wraps(kernel)
    def checked(*args, **kwargs):
        given = [(arguments[i].name, args[i]) for i in order if i < len(args) and args[i] is not None]
        torch.ops.liger.check_written(op, [n for n, _ in given], [t for _, t in given], len(writes))
        return kernel(*args, **kwargs)

    return checked


def register_family(name, torch_kernels, triton_module):
    """Registers the torch kernels of an op family for CPU tensors, and makes the family selectable.

    ``torch_kernels`` maps op names to functions; ``triton_module`` must define functions of the same names.
    """
    for op, kernel in torch_kernels.items():
        _library.impl(op, _checking_memory(op, kernel), "CPU")
    FAMILIES[name] = Family(name, torch_kernels, triton_module)


def register_portable(kernels):
    """Registers Python kernels that serve CPU and CUDA tensors alike, by op name."""
    for op, kernel in kernels.items():
        for key in ("CPU", "CUDA"):
            _library.impl(op, _checking_memory(op, kernel), key)
    PORTABLE.update(kernels)


# --- what is possible here: pure functions of the installation and the devices -----------------------------------


# Compute capability of each visible device; empty until torch initialises CUDA, which importing must not cause.
_capabilities = []
_cuda_initialised = False


@functools.lru_cache(None)
def _triton_version():
    return importlib.metadata.version("triton")


@functools.lru_cache(None)
def _built_architectures():
    """What the CUDA kernels were built for, such as ``("80", "90a", "80+PTX")``; empty if liger._C does not import."""
    try:
        from . import _C
    except ImportError:
        return ()
    return tuple(_C.build_info()["cuda_archs"].split())


def code_for(capability, architectures):
    """How kernels built for these architectures run on a device: ``"binary"``, ``"ptx"`` (the driver compiles them) or
    None. A binary for X.Y serves X.Z with Z >= Y, with the suffix ``a`` only X.Y; PTX serves every later device."""
    found = None
    for number, suffix in (re.fullmatch(r"(\d+)(a|f|\+PTX)?", text).groups() for text in architectures):
        built = divmod(int(number), 10)
        if suffix == "+PTX":
            found = found or ("ptx" if built <= capability else None)
        elif built == capability or (suffix != "a" and built[0] == capability[0] and built <= capability):
            return "binary"
    return found


def preference(name, capabilities, architectures):
    """(backends in the order in which ``auto`` tries them, why in this order) for an op on such devices.

    One backend serves an op on all devices of the process, so measurements that disagree decide nothing.
    """
    if architectures:
        for capability in capabilities:
            if code_for(capability, architectures) != "binary":
                return ("triton", "cuda", "torch"), f"no binary of the CUDA kernels for {_dotted(capability)}"
    faster = {FASTER.get(capability, {}).get(name) for capability in capabilities}
    if len(faster) == 1 and None not in faster:
        (first,) = faster
        order = (first, *(b for b in BACKENDS if b != first))
        return order, f"measured to be the faster one on {_dotted(capabilities[0])}"
    return BACKENDS, ""


def _dotted(capability):
    return "compute capability {}.{}".format(*capability)


def supported(backend, family, capabilities=None):
    """(possible, why) for one backend and op family on devices of the given capabilities (default: this machine's)."""
    capabilities = _capabilities if capabilities is None else capabilities
    old = [c for c in capabilities if c < MIN_CAPABILITY]
    if backend == "torch":
        return True, "plain torch runs everywhere"
    if backend == "cuda":
        if not load.CUDA_LOADED:
            return False, load.CUDA_REASON
        if old:
            return False, f"a device has {_dotted(old[0])}, the kernels need 8.0"
        built = _built_architectures()
        through_ptx = []
        for capability in capabilities if built else []:
            code = code_for(capability, built)
            if code is None:
                return (
                    False,
                    f"a device has {_dotted(capability)}, the kernels were built for {' '.join(built)}",
                )
            if code == "ptx" and capability not in through_ptx:
                through_ptx.append(capability)
        # Slower, but right: kernels are chosen by the code that the device runs (csrc/host/loaded_code.h).
        by_driver = "".join(f"; through PTX on {_dotted(capability)}" for capability in through_ptx)
        return True, load.CUDA_REASON + by_driver
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return False, "triton is not installed"
        if triton_interpreted():
            return True, "Triton's interpreter (TRITON_INTERPRET=1)"
        if torch.version.cuda is None:
            return False, "this torch has no CUDA and TRITON_INTERPRET is not 1"
        if old:
            return False, f"a device has {_dotted(old[0])}, the kernels need 8.0"
        return True, f"triton {_triton_version()}"
    raise ValueError(f"liger: unknown backend '{backend}', expected one of {', '.join(('auto', *BACKENDS))}")


# --- choosing --------------------------------------------------------------------------------------------------


def parse(text):
    """``"triton,rms_norm=cuda"`` -> ``("triton", {"rms_norm": "cuda"})``. Raises ValueError on unknown names."""
    default, per_op = "auto", {}
    for index, entry in enumerate(part.strip() for part in text.split(",") if part.strip()):
        op, separator, backend = (piece.strip() for piece in entry.rpartition("="))
        if backend not in ("auto", *BACKENDS):
            raise ValueError(
                f"{VARIABLE}: unknown backend '{backend}' in '{text}', expected auto, {', '.join(BACKENDS)}"
            )
        if not separator:
            if index:
                raise ValueError(
                    f"{VARIABLE}: '{entry}' in '{text}' must come first or be written op={entry}"
                )
            default = backend
        elif op not in FAMILIES:
            raise ValueError(
                f"{VARIABLE}: unknown op '{op}' in '{text}', expected one of {', '.join(FAMILIES)}"
            )
        else:
            per_op[op] = backend
    return default, per_op


def _resolve(family, wanted):
    """(backend, reason) for a wish; raises BackendUnavailable when an explicit one cannot be met."""
    if wanted != "auto":
        possible, why = supported(wanted, family)
        if not possible:
            raise BackendUnavailable(f"liger: backend '{wanted}' was requested for {family.name}, but {why}")
        return wanted, f"requested; {why}"
    if torch.version.cuda is None:
        return "torch", "auto: this torch has no CUDA"
    rejected = []
    order, why_first = preference(family.name, _capabilities, _built_architectures())
    for backend in order:
        possible, why = supported(backend, family)
        if possible:
            why_first = [why_first] if why_first and backend == order[0] else []
            return backend, "auto: " + "; ".join([why, *why_first, *rejected])
        rejected.append(f"not {backend}: {why}")
    raise AssertionError("unreachable: the torch backend supports everything")


def _kernels(family, backend):
    if backend == "torch":
        return family.torch_kernels
    module = importlib.import_module(family.triton_module)
    return {op: getattr(module, op) for op in family.torch_kernels}


def _apply(family, wanted):
    backend, reason = _resolve(family, wanted)
    kernels = None if backend == "cuda" else _kernels(family, backend)
    if family._override is not None:
        # Dropping the library restores what it had overridden: the compiled kernels.
        family._override._destroy()
        family._override = None
    if kernels is not None:
        # Before CUDA is initialised there are no CUDA tensors to serve.
        keys = (["CUDA"] if _cuda_initialised else []) + (
            ["CPU"] if backend == "triton" and triton_interpreted() else []
        )
        if keys:
            family._override = torch.library.Library("liger", "IMPL")
            with warnings.catch_warnings():
                # torch warns that a kernel is overridden, which is the purpose here.
                warnings.filterwarnings("ignore", message="Warning only once for all operators")
                for op, kernel in kernels.items():
                    for key in keys:
                        family._override.impl(op, _checking_memory(op, kernel), key, allow_override=True)
    if (backend, reason) != (family.choice, family.reason):
        log_dispatch(family.name, backend, reason)
    family.choice, family.reason = backend, reason


_requested = ("auto", {})


def _apply_all(default, per_op):
    for name, family in FAMILIES.items():
        _apply(family, per_op.get(name, default))


def set_backend(default="auto", **per_op):
    """Chooses backends for the whole process, as ``LIGER_BACKEND`` does.

    Args:
        default: ``"auto"``, ``"cuda"``, ``"triton"`` or ``"torch"``, or a whole ``LIGER_BACKEND`` string.
        per_op: exceptions by op name, for example ``rms_norm="cuda"``.

    Raises:
        ValueError: an unknown backend or op name.
        BackendUnavailable: an explicit backend that cannot serve an op here; nothing has changed then.
    """
    global _requested
    parsed_default, parsed = parse(",".join([default, *(f"{op}={b}" for op, b in per_op.items())]))
    for name, family in FAMILIES.items():
        _resolve(family, parsed.get(name, parsed_default))
    _apply_all(parsed_default, parsed)
    _requested = (parsed_default, parsed)


@contextlib.contextmanager
def use_backend(default="auto", **per_op):
    """Like :func:`set_backend`, for the duration of a ``with`` block. It acts on the whole process, not on a thread.

    Compiled and scripted functions follow the change without being compiled again: the ops are opaque to them.
    """
    before = _requested
    set_backend(default, **per_op)
    try:
        yield
    finally:
        set_backend(before[0], **before[1])


def backend_report():
    """What serves each op, and why: ``{op: {"backend": ..., "reason": ...}}``, for CUDA tensors."""
    return {name: {"backend": f.choice, "reason": f.reason} for name, f in FAMILIES.items()}


def _on_cuda_initialised():
    global _cuda_initialised
    _cuda_initialised = True
    _capabilities[:] = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    _apply_all(*_requested)


def _initialise():
    global _requested
    _requested = parse(os.environ.get(VARIABLE, "auto"))
    # Refused here, not when they are first looked at.
    triton_interpreted()
    targets_checked()
    _apply_all(*_requested)
    if torch.version.cuda is not None:
        torch.cuda._lazy_call(_on_cuda_initialised)
