"""Copies of functions in which one global has another name.

A patched attention must call another ``apply_rotary_pos_emb`` than unpatched models, which share its code and globals.
Only a name in the copied code object differs. The globals dictionary is that of the model's module, so later changes
are visible, and only the new name is added to it. A new CPython version may need changes here: the code depends on the
layout of code objects.
"""

import dis
from types import CellType, CodeType, FunctionType


def uses_global(function, name):
    """The globals dictionary in which the function, or one that it wraps, looks up the name; None without a lookup."""
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
        ValueError: the code also has an attribute named ``old``, which would be renamed, too.
    """
    # Only functions that refer to the name are copied; other closure cells are shared with the originals.
    affected = [f for f in _with_wrapped(function) if uses_global(f, old) is not None]
    copies = {f: _copy(f, old, new, affected) for f in affected}
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


def _copy(function, old, new, affected):
    closure = function.__closure__
    if closure is not None:
        closure = tuple(CellType() if _enclosed_function(cell) in affected else cell for cell in closure)
    code = _rename(function.__code__, old, new)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    for name in ("__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__"):
        setattr(copy, name, getattr(function, name))
    copy.__dict__.update(function.__dict__)
    return copy


def _names(code, opname):
    """Names in instructions of one kind, including those of nested functions and comprehensions."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == opname}
    return names.union(*(_names(c, opname) for c in code.co_consts if isinstance(c, CodeType)))


def _rename(code, old, new):
    # co_names has the names of globals and of attributes.
    if old in _names(code, "LOAD_ATTR") | _names(code, "LOAD_METHOD"):
        raise ValueError(f"{code.co_name} uses {old} as a global and as an attribute")
    constants = tuple(_rename(c, old, new) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=constants, co_names=tuple(new if n == old else n for n in code.co_names))
