# SPDX-License-Identifier: BSD-3-Clause
"""Choice of the backend of each op family: ahead-of-time CUDA, Triton, or plain torch.

``LIGER_BACKEND`` (read once, at import) is ``auto``, a backend, or a backend followed by exceptions::

    LIGER_BACKEND=triton,rms_norm=cuda
    LIGER_BACKEND=auto,fused_linear_ce=torch

Later changes of the variable have no effect; :func:`backend_report` warns of them.

The choice applies to CUDA tensors. The torch backend serves CPU tensors, except that ``triton`` also serves
them under ``TRITON_INTERPRET=1``. ``auto`` chooses among the backends that the devices support: the compiled
kernels, unless the build has none for a device (docs/lab/dispatch.md has measurements of both). An explicit
backend that cannot serve an op of CUDA tensors raises; it is never replaced.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch

from ..runtime import load
from ..runtime.build_info import build_info
from ..runtime.environment import changed_since_import, targets_checked, triton_interpreted
from ..runtime.extras import install
from ..runtime.log import log_dispatch, topics
from .arguments import TEXT, check
from .kernel_checks import checking_arguments, checking_devices, checking_overlap
from .registration import FAMILIES, Family, Kernels

Backend: TypeAlias = Literal["cuda", "triton", "torch"]
Capability: TypeAlias = tuple[int, int]

BACKENDS: tuple[Backend, ...] = ("cuda", "triton", "torch")
VARIABLE = "LIGER_BACKEND"
# Ampere: the kernels use bfloat16 and cp.async. A binary for 8.0 also runs on 8.6 to 8.9, and its PTX on
# later ones.
MIN_CAPABILITY: Capability = (8, 0)

_NO_TRITON = "triton is not installed"


class BackendUnavailable(RuntimeError):
    """Raised if an explicitly requested backend cannot serve an op on this machine; the message gives the
    reason."""

    __module__ = "liger"


# --- support: pure functions of the installation and the devices --------------------------------------------


# Compute capability of each visible device; empty until torch initialises CUDA, which importing must not do.
_capabilities: list[Capability] = []
_cuda_initialised = False


@functools.lru_cache(None)
def _triton_version() -> str:
    return importlib.metadata.version("triton")


@functools.lru_cache(None)
def _built_architectures() -> tuple[str, ...]:
    """Architectures of the CUDA build, such as ``("80", "90a", "80+PTX")``; empty without CUDA kernels."""
    return tuple(build_info()["cuda_archs"].split())


def code_for(capability: Capability, architectures: Sequence[str]) -> Literal["binary", "ptx"] | None:
    """The code of a build that a device runs: ``"binary"``, ``"ptx"`` (compiled by the driver) or None.

    A binary for X.Y runs on X.Z with Z >= Y; with the suffix ``a`` only on X.Y. PTX runs on every later
    device.
    """
    found: Literal["ptx"] | None = None
    for text in architectures:
        match = re.fullmatch(r"(\d+)(a|f|\+PTX)?", text)
        assert match is not None, text
        number, suffix = match.groups()
        built = divmod(int(number), 10)
        if suffix == "+PTX":
            found = found or ("ptx" if built <= capability else None)
        elif built == capability or (suffix != "a" and built[0] == capability[0] and built <= capability):
            return "binary"
    return found


def preference(
    capabilities: Sequence[Capability], architectures: Sequence[str]
) -> tuple[tuple[Backend, ...], str]:
    """(backends in the order in which ``auto`` tries them, the reason for this order)."""
    if architectures:
        for capability in capabilities:
            if code_for(capability, architectures) != "binary":
                return ("triton", "cuda", "torch"), f"no binary of the CUDA kernels for {_dotted(capability)}"
    return BACKENDS, ""


def _dotted(capability: Capability) -> str:
    return "compute capability {}.{}".format(*capability)


def supported(backend: str, capabilities: Sequence[Capability] | None = None) -> tuple[bool, str]:
    """True if a backend can serve ops on this machine.

    Args:
        backend: ``"cuda"``, ``"triton"`` or ``"torch"``.
        capabilities: of the devices; None: of this machine's, empty until torch initialises CUDA.

    Returns:
        (possible, the reason in words).

    Raises:
        ValueError: an unknown backend.
    """
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
        through_ptx: list[Capability] = []
        for capability in capabilities if built else []:
            code = code_for(capability, built)
            if code is None:
                return (
                    False,
                    f"a device has {_dotted(capability)}, the kernels were built for {' '.join(built)}",
                )
            if code == "ptx" and capability not in through_ptx:
                through_ptx.append(capability)
        # PTX is slower but correct: csrc/host/launch/loaded_code.h selects kernels by the code that the
        # device runs.
        by_driver = "".join(f"; through PTX on {_dotted(capability)}" for capability in through_ptx)
        return True, load.CUDA_REASON + by_driver
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return False, _NO_TRITON
        if triton_interpreted():
            return True, "Triton's interpreter (TRITON_INTERPRET=1)"
        if torch.version.cuda is None:
            return False, "this torch has no CUDA and TRITON_INTERPRET is not 1"
        if old:
            return False, f"a device has {_dotted(old[0])}, the kernels need 8.0"
        return True, f"triton {_triton_version()}"
    raise ValueError(f"liger: unknown backend '{backend}', expected one of {', '.join(('auto', *BACKENDS))}")


# --- choice -------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """The backends that were asked for.

    Attributes:
        default: ``"auto"`` or a backend.
        per_op: exceptions by op.
        source: the variable or the function, as messages name it.
        reason: the source as reports name it.
    """

    default: str
    per_op: dict[str, str]
    source: str = VARIABLE
    reason: str = VARIABLE

    def of(self, name: str) -> str:
        return self.per_op.get(name, self.default)


def parse(text: str, source: str = VARIABLE, reason: str = VARIABLE) -> Request:
    """``"triton,rms_norm=cuda"`` -> ``Request("triton", {"rms_norm": "cuda"})``.

    Raises:
        ValueError: an unknown backend or op name, an op with two backends, or a default after the first
            entry.
    """
    default = "auto"
    per_op: dict[str, str] = {}
    for index, entry in enumerate(part.strip() for part in text.split(",") if part.strip()):
        op, separator, backend = (piece.strip() for piece in entry.rpartition("="))
        if backend not in ("auto", *BACKENDS):
            raise ValueError(
                f"{source}: unknown backend '{backend}' in '{text}', expected auto, {', '.join(BACKENDS)}"
            )
        if not separator:
            if index:
                raise ValueError(f"{source}: '{entry}' in '{text}' must come first or be written op={entry}")
            default = backend
        elif op not in FAMILIES:
            raise ValueError(
                f"{source}: unknown op '{op}' in '{text}', expected one of {', '.join(FAMILIES)}"
            )
        elif op in per_op:
            raise ValueError(
                f"{source}: two backends for {op} in '{text}', '{per_op[op]}' and '{backend}', expected one"
            )
        else:
            per_op[op] = backend
    return Request(default, per_op, source, reason)


def _resolve(family: Family, request: Request) -> tuple[str, str]:
    """(backend, reason) for an op. Raises BackendUnavailable if the backend that was requested cannot serve
    it."""
    requested = request.of(family.name)
    if requested != "auto":
        possible, why = supported(requested)
        if not possible:
            command = f": {install('triton')}" if why == _NO_TRITON else ""
            raise BackendUnavailable(
                f"{request.source}: backend '{requested}' was requested for {family.name}, but {why}{command}"
            )
        return requested, f"requested by {request.reason}; {why}"
    if torch.version.cuda is None:
        return "torch", "auto: this torch has no CUDA"
    rejected: list[str] = []
    order, why_first = preference(_capabilities, _built_architectures())
    for backend in order:
        possible, why = supported(backend)
        if possible:
            preferred = [why_first] if why_first and backend == order[0] else []
            return backend, "auto: " + "; ".join([why, *preferred, *rejected])
        rejected.append(f"not {backend}: {why}")
    raise AssertionError("unreachable: the torch backend supports everything")


def _kernels(family: Family, backend: str) -> Kernels:
    if backend == "torch":
        return family.torch_kernels
    module = importlib.import_module(family.triton_module)
    return {op: getattr(module, op) for op in family.torch_kernels}


def _apply(family: Family, request: Request) -> None:
    backend, reason = _resolve(family, request)
    kernels = None if backend == "cuda" else _kernels(family, backend)
    if family._override is not None:
        # Destroying the library restores the compiled kernels that it overrides.
        family._override._destroy()
        family._override = None
    if kernels is not None:
        # Before CUDA is initialised no CUDA tensor exists.
        keys = (["CUDA"] if _cuda_initialised else []) + (
            ["CPU"] if backend == "triton" and triton_interpreted() else []
        )
        if keys:
            family._override = torch.library.Library("liger", "IMPL")
            with warnings.catch_warnings():
                # torch warns that a kernel is overridden, which is intended here.
                warnings.filterwarnings("ignore", message="Warning only once for all operators")
                for op, kernel in kernels.items():
                    checked = checking_overlap(op, checking_arguments(op, kernel))
                    if backend == "triton" and torch.cuda.device_count() > 1:
                        checked = checking_devices(op, checked)
                    for key in keys:
                        family._override.impl(op, checked, key, allow_override=True)
    if (backend, reason) != (family.choice, family.reason):
        log_dispatch(family.name, backend, reason)
    family.choice, family.reason = backend, reason


_requested = Request("auto", {})


def _apply_all(request: Request) -> None:
    for family in FAMILIES.values():
        _apply(family, request)


def _set(source: str, default: str, per_op: dict[str, str]) -> None:
    global _requested
    for name, value in {"default": default, **per_op}.items():
        check(source, name, value, TEXT)
    request = parse(",".join([default, *(f"{op}={b}" for op, b in per_op.items())]), source, source)
    for family in FAMILIES.values():
        _resolve(family, request)
    _apply_all(request)
    _requested = request


def set_backend(default: str = "auto", **per_op: str) -> None:
    """Chooses backends for the whole process, as ``LIGER_BACKEND`` does.

    Args:
        default: ``"auto"``, ``"cuda"``, ``"triton"`` or ``"torch"``, or a whole ``LIGER_BACKEND`` string.
        per_op: exceptions by op name, for example ``rms_norm="cuda"``.

    Raises:
        TypeError: a backend that is no string.
        ValueError: an unknown backend or op name, or an op with two backends.
        BackendUnavailable: an explicit backend cannot serve an op on this machine. No backend has changed
            then.

    Example::

        >>> liger.set_backend("torch", rms_norm="auto")
        >>> liger.set_backend("auto")
    """
    _set("set_backend", default, per_op)


@contextlib.contextmanager
def use_backend(default: str = "auto", **per_op: str) -> Iterator[None]:
    """:func:`set_backend` for the duration of a ``with`` block. It affects the whole process, not one thread.

    Compiled and scripted functions follow the change without recompilation, because the ops are opaque to
    them.

    Args:
        default, per_op: as in :func:`set_backend`.

    Raises:
        TypeError, ValueError, BackendUnavailable: as :func:`set_backend`.

    Example::

        >>> with liger.use_backend(rms_norm="torch"):
        ...     y = liger.rms_norm(torch.randn(2, 64))
    """
    global _requested
    before = _requested
    _set("use_backend", default, per_op)
    try:
        yield
    finally:
        _apply_all(before)
        _requested = before


def backend_report() -> dict[str, dict[str, str]]:
    """The backend that serves CUDA tensors, for each op family, and the reason for the choice.

    Returns:
        ``{op: {"backend": "cuda", "triton" or "torch", "reason": text}}``. The reason names what requested a
        backend: ``LIGER_BACKEND`` with the value that was read when liger was imported, :func:`set_backend`
        or :func:`use_backend`. Until torch initialises CUDA, ``"auto"`` has chosen without knowing the
        devices.

    Warns:
        UserWarning: an environment variable that is read when liger is imported has another value now.

    Example::

        >>> liger.backend_report()["rms_norm"]
        {...}
    """
    for change in changed_since_import():
        warnings.warn(f"liger.backend_report: {change}", stacklevel=2)
    return {name: {"backend": f.choice, "reason": f.reason} for name, f in FAMILIES.items()}


def _on_cuda_initialised() -> None:
    global _cuda_initialised
    _cuda_initialised = True
    _capabilities[:] = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    _apply_all(_requested)


def _initialise() -> None:
    global _requested
    text = os.environ.get(VARIABLE, "auto")
    _requested = parse(text, reason=f"{VARIABLE}={text}, read when liger was imported")
    # Invalid values raise at import, not at first use.
    triton_interpreted()
    targets_checked()
    topics()
    _apply_all(_requested)
    if torch.version.cuda is not None:
        torch.cuda._lazy_call(_on_cuda_initialised)
