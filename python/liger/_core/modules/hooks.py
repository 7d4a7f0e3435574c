# SPDX-License-Identifier: BSD-3-Clause
"""Whose hooks a module has."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

# ZeRO-3 of DeepSpeed puts hooks on every module, which gather the weights of those that have some.
ZERO = ("deepspeed.",)


def hooks_of(module: nn.Module) -> Iterable[Mapping[int, Callable[..., Any]]]:
    """The tables of the hooks that a call of a module runs."""
    yield module._forward_hooks
    yield module._forward_pre_hooks
    yield module._backward_hooks
    yield module._backward_pre_hooks


def first_hook(
    tables: Iterable[Mapping[int, Callable[..., Any]]], besides: tuple[str, ...]
) -> Callable[..., Any] | None:
    """The first hook that no module whose name begins with one of ``besides`` defines; None if there is
    none."""
    for table in tables:
        for hook in table.values():
            while isinstance(hook, functools.partial):
                hook = hook.func
            if not (getattr(hook, "__module__", None) or "").startswith(besides):
                return hook
    return None
