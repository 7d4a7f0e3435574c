# SPDX-License-Identifier: BSD-3-Clause
"""The arguments of an op as one object, and the options among them.

Kernels and fakes get their arguments by position. :func:`by_name` binds them once, to the names of the
schema.
"""

import collections
import functools
import inspect
import operator


@functools.lru_cache(None)
def arguments_type(op):
    """A named tuple of the arguments of an op, with the names and defaults of its schema. ``needs_grad``: its
    flags ``need_grad_*``."""
    schema = op._schema.arguments
    defaults = [argument.default_value for argument in schema if argument.has_default_value()]
    kind = collections.namedtuple("Arguments", [argument.name for argument in schema], defaults=defaults)
    flags = [i for i, name in enumerate(kind._fields) if name.startswith("need_grad_")]
    kind.needs_grad = property(lambda self: tuple([self[i] for i in flags]))
    return kind


def by_name(op):
    """Decorator: the function takes the arguments of an op as one object of :func:`arguments_type`."""
    return functools.partial(_ByName, op)


class _ByName:
    def __init__(self, op, function):
        self._op, self._function, self.__name__ = op, function, op._opname

    def __call__(self, *args, **kwargs):
        return self._function(arguments_type(self._op)(*args, **kwargs))

    @property
    def __signature__(self):
        return inspect.signature(arguments_type(self._op))


@functools.lru_cache(None)
def _reader(kind, arguments, prefix):
    names = tuple(name for name in kind._fields if prefix + name in arguments._fields)
    read = operator.attrgetter(*(prefix + name for name in names))
    if names == kind._fields[: len(names)]:
        # Faster than by name.
        return lambda found: kind(*read(found))
    return lambda found: kind(**dict(zip(names, read(found), strict=True)))


def options_among(kind, arguments, prefix=""):
    """A named tuple of the class ``kind`` from the arguments of an op with the names of its fields, after a
    prefix. Fields that the op has no argument for get their defaults."""
    return _reader(kind, type(arguments), prefix)(arguments)
