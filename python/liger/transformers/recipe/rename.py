# SPDX-License-Identifier: BSD-3-Clause
"""Copies of functions in which one global, or one attribute, has another name.

A patched attention must call another ``apply_rotary_pos_emb`` than unpatched models, which share its code and
globals. Only a name in the copied code object differs. The globals dictionary belongs to the model's module,
so later changes are visible, and only the new name is added to it. A new CPython version may need changes
here: the code depends on the layout of code objects.
"""

import dis
from functools import lru_cache
from types import CellType, CodeType, FunctionType


def uses_global(function, name):
    """The globals in which the function, or one that it wraps, looks up the name; or None."""
    for inner in _with_wrapped(function):
        if name in _names(inner.__code__, "LOAD_GLOBAL"):
            return inner.__globals__
    return None


def globals_used(function):
    """The names that the function, or one that it wraps, looks up in its globals."""
    return set().union(*(_names(inner.__code__, "LOAD_GLOBAL") for inner in _with_wrapped(function)))


def rename_global(function, old, new):
    """A copy of the function, and of those that it wraps, with the global ``old`` renamed to ``new``.

    Raises:
        ValueError: the code also has an attribute named ``old``, which would also be renamed.
    """
    return _renamed(function, old, new, ("LOAD_GLOBAL",))


def attributes_used(function):
    """The names of attributes that the function, or one that it wraps, reads."""
    return set().union(*(_names(inner.__code__, *_ATTRIBUTES) for inner in _with_wrapped(function)))


def rename_attribute(function, old, new):
    """A copy of the function, and of those that it wraps, that reads the attribute ``new``, not ``old``.

    Raises:
        ValueError: the code also uses the name in another way: as a global, or it sets the attribute.
    """
    return _renamed(function, old, new, _ATTRIBUTES)


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


def _renamed(function, old, new, opnames):
    # Only functions that refer to the name are copied; other closure cells are shared with the originals.
    enclosed = _with_wrapped(function)
    affected = [f for f in enclosed if any(old in _names(g.__code__, *opnames) for g in _with_wrapped(f))]
    copies = {f: _copy(f, old, new, affected, opnames) for f in affected}
    for original, copy in copies.items():
        for cell, new_cell in zip(original.__closure__ or (), copy.__closure__ or (), strict=True):
            if new_cell is not cell:
                new_cell.cell_contents = copies[cell.cell_contents]
        wrapped = original.__dict__.get("__wrapped__")
        if wrapped in copies:
            copy.__wrapped__ = copies[wrapped]
    return copies[function]


def _with_wrapped(function):
    """The function and, recursively, every function in its closure (as decorators leave them), each once."""
    functions = [function]
    for outer in functions:
        enclosed = (_enclosed_function(cell) for cell in outer.__closure__ or ())
        functions += [f for f in dict.fromkeys(enclosed) if f is not None and f not in functions]
    return functions


def _enclosed_function(cell):
    try:
        content = cell.cell_contents
    except ValueError:  # an empty cell
        return None
    return content if isinstance(content, FunctionType) else None


def _copy(function, old, new, affected, opnames):
    closure = function.__closure__
    if closure is not None:
        closure = tuple(CellType() if _enclosed_function(cell) in affected else cell for cell in closure)
    code = _rename(function.__code__, old, new, opnames)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    for name in ("__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__"):
        setattr(copy, name, getattr(function, name))
    copy.__dict__.update(function.__dict__)
    return copy


# The trials of a model ask for the same few functions thousands of times.
@lru_cache(maxsize=1024)
def _names(code, *opnames):
    """Names in instructions of some kinds, also in nested functions and comprehensions."""
    names = frozenset(i.argval for i in dis.get_instructions(code) if i.opname in opnames)
    return names.union(*(_names(c, *opnames) for c in code.co_consts if isinstance(c, CodeType)))


# Instructions with names in co_names: globals, attributes, modules.
_BY_NAME = [dis.opname[number] for number in dis.hasname]


def _rename(code, old, new, opnames):
    if old in _names(code, "STORE_ATTR", "DELETE_ATTR"):
        raise ValueError(f"{code.co_name} sets {old}")
    if old in _names(code, *(name for name in _BY_NAME if name not in opnames)):
        raise ValueError(f"{code.co_name} uses {old} as a global and as an attribute")
    constants = tuple(_rename(c, old, new, opnames) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=constants, co_names=tuple(new if n == old else n for n in code.co_names))
