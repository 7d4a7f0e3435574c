"""Samples of declared ops, drawn from their declarations: rows, strided rows with other options, no rows."""

import torch
from sample_tensors import floats, transposed

from liger._core.declared import declarations, overload, result_names

# The independent dimensions of each sample, and what stands for "..." behind a batch.
_LEADING = ((3,), (2, 3), (0,))
_TRAILING = ((5,), (3, 3), ())
_FLOATS = {">=": (1e-6, 1e-3, 1e-5), "finite": (0.0, 1.0, 0.0)}
# A divisor of all dimensions.
_DIVISOR = 2
_SIZES = {"H": 16, "I": 5, "channels": 6}


def _shape(dims, n):
    if dims == ("...",):
        return [*_LEADING[n], _SIZES["H"]]
    shape = []
    for position, dim in enumerate(dims):
        if dim == "...":
            shape += _TRAILING[n] if position else _LEADING[n]
        elif dim == "batch":
            shape.append(_LEADING[n][0])
        elif dim.isdigit():
            shape.append(int(dim))
        else:
            shape.append(2 * _SIZES[dim[1:]] if dim[0] == "2" else _SIZES[dim])
    return shape


def _option(declaration, argument, n):
    kind, *words = declaration.options.get(argument.name, ("none",))
    if kind == "in":
        return words[n % len(words)]
    if kind == "divides":
        return None if "Optional" in str(argument.type) and n == 0 else _DIVISOR
    if kind in _FLOATS:
        return _FLOATS[kind][n]
    return argument.default_value if n != 1 else not argument.default_value  # A flag.


def _forward(declaration, d):
    main = declaration.shapes[declaration.main]
    samples = []
    for n in range(3):
        values, optional = [], 0
        for argument in overload(declaration.ops[0])._schema.arguments:
            shape = declaration.shapes.get(argument.name)
            if shape is None:
                values.append(_option(declaration, argument, n))
                continue
            tensor = floats(d, *_shape((main if shape.like else shape).dims, n))
            if "Optional" in str(argument.type):
                optional += 1
                tensor = None if optional == n else tensor
            # One tensor of several has other strides than the rest.
            elif n == 1 and argument.name == declaration.main:
                tensor = transposed(tensor)
            values.append(tensor)
        samples.append(tuple(values))
    return samples


def _of(op):
    declaration = declarations()[op]
    forward = declaration.ops[0]
    if op == forward:
        return lambda d: _forward(declaration, d)

    def samples(d):
        found = []
        names = [argument.name for argument in overload(forward)._schema.arguments]
        arguments = overload(op)._schema.arguments
        flags = [a.name for a in arguments if a.name.startswith(("need_", "emit_"))]
        optional = [a.name for a in arguments if a.name.startswith("grad_") and "Optional" in str(a.type)]
        for n, inputs in enumerate(_forward(declaration, d)):
            outputs = overload(forward)(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            values = dict(zip(names, inputs, strict=True)) | dict(
                zip(result_names(forward), outputs, strict=True)
            )
            values |= {f"grad_{name}": torch.randn_like(values[name]) for name in result_names(forward)}
            values |= dict.fromkeys(optional if n == 1 else ())
            # All gradients, then all but one.
            for missing in (None, *flags):
                asked = {flag: flag != missing for flag in flags}
                found.append(tuple((values | asked)[a.name] for a in arguments))
        return found

    return samples


SAMPLES = {op: _of(op) for op in declarations()}
