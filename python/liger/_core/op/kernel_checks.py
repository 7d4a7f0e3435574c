# SPDX-License-Identifier: BSD-3-Clause
"""Checks before a Python kernel that compiled kernels make themselves: arguments, overlapping memory,
devices."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .declared import declarations
from .fakes import check_one_device, public_name


def checking_arguments(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of a declared op, preceded by the check of its arguments. Compiled kernels, and the kernels
    of other ops, make the check themselves."""
    if op not in declarations():
        return kernel
    arguments = getattr(torch.ops.liger, op).default._schema.arguments
    defaults = tuple(a.default_value for a in arguments)
    kinds = [str(a.type).removeprefix("Optional[").removesuffix("]") for a in arguments]
    tensors, numbers, texts = (
        [i for i, kind in enumerate(kinds) if kind in wanted]
        for wanted in (("Tensor",), ("float", "int", "number"), ("str",))
    )
    # torch passes None for a required tensor; a Triton kernel takes None for an option that is not used.
    required = [(i, a.name) for i, a in enumerate(arguments) if str(a.type) == "Tensor"]
    check = torch.ops.liger.check_arguments.default

    @functools.wraps(kernel)
    def checked(*args):
        values = args + defaults[len(args) :]
        for i, name in required:
            if values[i] is None:
                raise TypeError(f"{public_name(op)}: {name} is None, expected a tensor")
        check(op, [values[i] for i in tensors], [values[i] for i in numbers], [values[i] for i in texts])
        return kernel(*args)

    return checked


def checking_overlap(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, preceded by a check that written arguments do not overlap other tensors. Compiled kernels
    check that themselves."""
    arguments = getattr(torch.ops.liger, op).default._schema.arguments
    tensors = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
    writes = [i for i in tensors if arguments[i].alias_info is not None and arguments[i].alias_info.is_write]
    if not writes:
        return kernel
    order = [*writes, *(i for i in tensors if i not in writes)]

    @functools.wraps(kernel)
    def checked(*args, **kwargs):
        named = [(arguments[i].name, args[i]) for i in order if i < len(args) and args[i] is not None]
        torch.ops.liger.check_written(op, [n for n, _ in named], [t for _, t in named], len(writes))
        return kernel(*args, **kwargs)

    return checked


def checking_devices(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The Triton kernel, preceded by a check that its tensors are on one device: Triton would pass a pointer
    to another GPU. Compiled kernels check that themselves, in the same words."""
    arguments = getattr(torch.ops.liger, op).default._schema.arguments
    names = [a.name for a in arguments]
    public = public_name(op)

    @functools.wraps(kernel)
    def checked(*args, **kwargs):
        check_one_device(public, {**dict(zip(names, args, strict=False)), **kwargs})
        return kernel(*args, **kwargs)

    return checked
