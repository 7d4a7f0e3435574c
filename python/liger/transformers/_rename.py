"""A copy of a function that looks up one global under another name.

A patched attention module must call another ``apply_rotary_pos_emb`` than the modules of unpatched models, which share
its code and its globals. Only the name in the copied code object differs: the globals stay the live ones of the model's
module, so later changes there are seen, and the new name is all that is ever added to them.
"""

import dis
from types import CellType, CodeType, FunctionType


def uses_global(function, name):
    """Whether the function, or one that it wraps, looks up this global. Returns the globals in question, or None."""
    if name in _global_names(function.__code__):
        return function.__globals__
    for inner in _wrapped(function):
        found = uses_global(inner, name)
        if found is not None:
            return found
    return None


def rename_global(function, old, new):
    """A copy of the function, and of those that it wraps, in which the global ``old`` is looked up as ``new``."""
    cells = []
    for cell in function.__closure__ or ():
        content = _content(cell)
        inner = (
            isinstance(content, FunctionType)
            and content is not function
            and uses_global(content, old) is not None
        )
        cells.append(CellType(rename_global(content, old, new)) if inner else cell)
    copy = FunctionType(
        _rename_in_code(function.__code__, old, new),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells) or None,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__qualname__, copy.__module__, copy.__doc__ = (
        function.__qualname__,
        function.__module__,
        function.__doc__,
    )
    copy.__dict__.update(function.__dict__)
    inner = function.__dict__.get("__wrapped__")
    if isinstance(inner, FunctionType) and uses_global(inner, old) is not None:
        copy.__wrapped__ = rename_global(inner, old, new)
    return copy


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # a cell that is still empty
        return None


def _wrapped(function):
    contents = (_content(cell) for cell in function.__closure__ or ())
    return [inner for inner in contents if isinstance(inner, FunctionType) and inner is not function]


def _global_names(code):
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names


def _rename_in_code(code, old, new):
    constants = tuple(_rename_in_code(c, old, new) if isinstance(c, CodeType) else c for c in code.co_consts)
    # co_names also holds attribute names, and a renamed attribute would be another attribute.
    attributes = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    if old in attributes:
        raise ValueError(
            f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name} has an attribute {old}"
        )
    return code.replace(co_consts=constants, co_names=tuple(new if n == old else n for n in code.co_names))
