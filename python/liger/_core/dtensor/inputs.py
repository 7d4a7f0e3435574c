# SPDX-License-Identifier: BSD-3-Clause
"""DTensors: recognition, and conversion of token dimensions to rows.

``torch.distributed.tensor`` takes half a second to import, so ``import liger`` does not import it. No value
can be a DTensor before that module is imported, so these functions use it only then.
"""

import functools
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

_MODULE = "torch.distributed.tensor"
# The second argument of isinstance: empty until the module is imported.
_types: tuple[type, ...] = ()
# {function of a loss: the same of classes that are sharded over processes, or None where that cannot compute
# a call}. liger.distributed, which is above this package, adds them.
in_shards: dict[str, Callable[..., Any]] = {}
_SHARDS = "group", "vocab_start", "vocab_size"
_Callable = TypeVar("_Callable", bound=Callable[..., Any])


def is_dtensor(value: object) -> bool:
    """True if a value is a ``torch.distributed.tensor.DTensor``. Does not import that module.

    Example::

        >>> liger.distributed.is_dtensor(torch.zeros(2))
        False
    """
    return isinstance(value, _types)


def given_shards(group, vocab_start, vocab_size):
    """The three arguments if a caller gave one of them, else None."""
    given = group is not None or vocab_start is not None or vocab_size is not None
    return (group, vocab_start, vocab_size) if given else None


def refuse_with_shards(op, shards, **options):
    """Raises ValueError for an option that is on in a call with a group."""
    for name, value in options.items():
        if shards is not None and value is not None and value is not False:
            raise ValueError(
                f"{op}: {name} was given with a group, vocab_start or vocab_size, expected one of them"
            )


def together(main: str, dim: int) -> Callable[[_Callable], _Callable]:
    """Decorator of a public function: where the caller gives a group, an error on one of its processes, in
    the checks of the arguments, too, is an error on all of them. Dimension ``dim`` of the argument ``main``
    has the classes."""

    def decorate(function: _Callable) -> _Callable:
        position = list(inspect.signature(function).parameters).index(main)

        @functools.wraps(function)
        def told(*args, **keywords):
            if given_shards(*map(keywords.get, _SHARDS)) is None:
                return function(*args, **keywords)
            tensor = args[position] if position < len(args) else keywords.get(main)
            values = (*args, *keywords.values())
            with in_shards["told_to_all"](function.__name__, tensor, dim, keywords.get("group"), values):
                return function(*args, **keywords)

        return cast(_Callable, told)

    return decorate


def align_tokens(op, x, target, token_weight, names=("input", "target")):
    """The arguments of a loss, redistributed so that :func:`flatten_tokens` gives each rank the same rows of
    each. ``names``: of x and of the target in messages.

    Raises:
        RuntimeError: x is a DTensor, and target or token_weight is not.
    """
    if not is_dtensor(x):
        return x, target, token_weight
    from .rows import align

    return align(op, x, target, token_weight, names)


def flatten_tokens(tensor, dims):
    """``tensor.flatten(0, dims - 1)``; no token of a DTensor moves between ranks."""
    if not is_dtensor(tensor):
        return tensor.flatten(0, dims - 1)
    from .rows import flatten

    return flatten(tensor, dims)


def unflatten_tokens(rows, like):
    """One value per row of a flattened tensor, in the shape of ``like``."""
    if not is_dtensor(rows):
        return rows.reshape(like.shape)
    from .rows import unflatten

    return unflatten(rows, like)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function at the end of the first import of ``torch.distributed.tensor``."""

    def __init__(self, function):
        self.function = function

    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_call(module):
            execute(module)
            self.function()

        spec.loader.exec_module = execute_and_call
        return spec


def when_dtensor_is_imported(register):
    """Calls ``register()`` now if ``torch.distributed.tensor`` is imported, else at the end of its import."""

    def enable():
        global _types
        register()
        _types = (sys.modules[_MODULE].DTensor,)

    if _MODULE in sys.modules:
        enable()
    else:
        sys.meta_path.insert(0, _AfterImport(enable))
