# SPDX-License-Identifier: BSD-3-Clause
"""Registration of Python kernels with the ops of ``torch.ops.liger``, and the op families that they make."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ..runtime.environment import triton_interpreted
from .by_name import arguments_type
from .declared import derive
from .kernel_checks import checking_arguments, checking_overlap

Kernels: TypeAlias = dict[str, Callable[..., Any]]

_library = torch.library.Library("liger", "IMPL")


@dataclass
class Family:
    """A public op with its backward and in-place ops, which change backend together.

    Attributes:
        name: the public op.
        torch_kernels: kernels of the torch backend, by op name.
        triton_module: full name of the module whose functions of the same names are the Triton kernels.
        choice: the backend that serves the family.
        reason: why, in words.
    """

    name: str
    torch_kernels: Kernels
    triton_module: str
    choice: str = "auto"
    reason: str = ""
    _override: torch.library.Library | None = field(default=None, repr=False)


FAMILIES: dict[str, Family] = {}


# Portable ops: one Python kernel, made of other ops, serves all devices. They have no backend to choose.
PORTABLE: Kernels = {}


def _by_op(kernels: Sequence[Any]) -> Kernels:
    """Kernels by the name of their op, which is their own, with or without ``_torch``."""
    return {kernel.__name__.removesuffix("_torch"): kernel for kernel in kernels}


def register_family(name: str, *torch_kernels: Any, triton: str | None = None) -> None:
    """Registers the torch kernels of an op family for CPU tensors, and makes the family selectable.

    Args:
        name: the public op.
        torch_kernels: functions ``<op>_torch``.
        triton: the module of ``liger.triton_kernels`` with functions ``<op>``; by default the name.
    """
    kernels = _by_op(torch_kernels)
    for op, kernel in kernels.items():
        _library.impl(op, checking_overlap(op, checking_arguments(op, kernel)), "CPU")
    FAMILIES[name] = Family(name, kernels, f"liger.triton_kernels.{triton or name}")


def declared_family(name: str, *torch_kernels: Any, triton: str | None = None) -> Callable[..., Any]:
    """:func:`register_family` and :func:`.declared.derive` of a declared op: the entry of the op."""
    register_family(name, *torch_kernels, triton=triton)
    return derive(name)


def register_portable(*kernels: Any) -> None:
    """Registers Python kernels, functions with the names of their ops, that serve both CPU and CUDA
    tensors."""
    for op, kernel in _by_op(kernels).items():
        for key in ("CPU", "CUDA"):
            _library.impl(op, checking_overlap(op, kernel), key)
        PORTABLE[op] = kernel


def register_composite(function: Callable[..., Any]) -> None:
    """Registers a public function as the kernel of the op of its name, whose arguments are among its
    parameters."""
    name = function.__name__
    arguments = arguments_type(getattr(torch.ops.liger, name).default)

    def composite(*args: Any, **keywords: Any) -> Any:
        return function(**arguments(*args, **keywords)._asdict())

    _library.impl(name, composite, "CompositeImplicitAutograd")


def triton_module_beside(name: str, module: str, tensor: torch.Tensor) -> Any:
    """A module of Triton kernels for a portable op that follows the backend of a family; None where torch
    serves it.

    Args:
        name: the family. Its cuda backend also runs Triton kernels here, if Triton is installed.
        module: full name of the module.
        tensor: an operand.
    """
    if FAMILIES[name].choice == "torch" or tensor.dtype == torch.float64:
        return None
    if not (tensor.is_cuda or triton_interpreted()) or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(module)
