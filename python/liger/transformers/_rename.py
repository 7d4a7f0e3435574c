"""A copy of a function that looks up one global under another name.

A patched attention module must call another ``apply_rotary_pos_emb`` than the modules of unpatched models, which share
its code and its globals. Only the name in the copied code object differs: the globals stay the live ones of the model's
module, so later changes there are seen, and the new name is all that is ever added to them.
"""

import dis
from types import CellType, CodeType, FunctionType


def uses_global(function, name):
    """The globals in which the function, or one that it wraps, looks up this name; None if none of them does."""
    for inner in _with_wrapped(function):
        if name in _names(inner.__code__, "LOAD_GLOBAL"):
            return inner.__globals__
    return None


def globals_used(function):
    """The names that the function, or one that it wraps, looks up in its globals."""
    return set().union(*(_names(inner.__code__, "LOAD_GLOBAL") for inner in _with_wrapped(function)))


def rename_global(function, old, new):
    """A copy of the function, and of those that it wraps, in which the global ``old`` is looked up as ``new``.

    Raises:
        ValueError: the code also uses ``old`` as the name of an attribute, which would be renamed too.
    """
    # Only functions that lead to the name are copied; whatever else they enclose stays shared with the originals.
    affected = [f for f in _with_wrapped(function) if uses_global(f, old) is not None]
    copies = {f: _copy(f, old, new, affected) for f in affected}
    for original, copy in copies.items():
        for theirs, ours in zip(original.__closure__ or (), copy.__closure__ or (), strict=True):
            if ours is not theirs:
                ours.cell_contents = copies[theirs.cell_contents]
        wrapped = original.__dict__.get("__wrapped__")
        if wrapped in copies:
            copy.__wrapped__ = copies[wrapped]
    return copies[function]


def _with_wrapped(function):
    """The function and every function that decorators have enclosed in it, each once."""
    found = [function]
    for outer in found:
        enclosed = (_enclosed_function(cell) for cell in outer.__closure__ or ())
        found += [inner for inner in dict.fromkeys(enclosed) if inner is not None and inner not in found]
    return found


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
    """Names that instructions of this kind refer to, also in the comprehensions and functions inside."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == opname}
    return names.union(*(_names(c, opname) for c in code.co_consts if isinstance(c, CodeType)))


def _rename(code, old, new):
    # co_names holds the names of attributes beside those of globals.
    if old in _names(code, "LOAD_ATTR") | _names(code, "LOAD_METHOD"):
        raise ValueError(f"{code.co_name} uses {old} as a global and as an attribute")
    constants = tuple(_rename(c, old, new) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=constants, co_names=tuple(new if n == old else n for n in code.co_names))
