# SPDX-License-Identifier: BSD-3-Clause
"""Functions and modules that take their arguments in the order of liger_kernel, which is a line of text."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def takes(parameters: str) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: the function takes ``parameters``, written as in a signature, and gets all by keyword.

    The result is compiled, as methods of a named tuple are: Python binds arguments, torch.compile traces it.
    """
    kinds = inspect.signature(eval(f"lambda {parameters}: None")).parameters
    passed = ", ".join(f"**{n}" if p.kind is p.VAR_KEYWORD else f"{n}={n}" for n, p in kinds.items())

    def decorate(body):
        name, scope = body.__name__, {}
        exec(f"def make(body):\n def {name}({parameters}): return body({passed})\n return {name}", scope)
        function = scope["make"](body)
        function.__module__, function.__qualname__ = body.__module__, body.__qualname__
        function.__doc__ = body.__doc__
        return function

    return decorate


@functools.lru_cache(maxsize=256)
def _instance(loss_class, options):
    return loss_class(**dict(options))


def detached(value: Any) -> Any:
    """A tensor that liger_kernel takes without its gradient, and losses of liger only where it has none."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def loss_of(loss_class: Any, *, compiled: Any = None, chunk_size: Any = None, **options: Any) -> Any:
    """One instance of a loss of liger.losses per set of options.

    ``compiled`` and ``chunk_size`` have no effect: the memory budget sizes the chunks.
    """
    return _instance(loss_class, tuple(options.items()))


class OptionsModule(nn.Module):
    """A function of tensors with its options as attributes.

    ``of`` is the function. ``options`` are names of its parameters, in the order of the constructor;
    ``name=value`` has another default than the function.
    """

    _function: Callable[..., Any]
    _options: tuple[str, ...] = ()

    def __init_subclass__(cls, of: Any = None, options: str = "", **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if of is None:
            return
        defaults = inspect.signature(of).parameters
        given = [o if "=" in o else f"{o}={defaults[o].default!r}" for o in options.split()]

        def __init__(self, **values):
            nn.Module.__init__(self)
            for name, value in values.items():
                setattr(self, name, value)

        __init__.__module__, __init__.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
        cls.__init__ = takes(", ".join(["self", *given]))(__init__)  # type: ignore[method-assign]
        cls._function = staticmethod(of)
        cls._options = tuple(option.partition("=")[0] for option in given)

    def _call(self, *tensors: Any, **more: Any) -> Any:
        return type(self)._function(*tensors, **more, **{name: getattr(self, name) for name in self._options})
