# SPDX-License-Identifier: BSD-3-Clause
"""Samples of declared ops, drawn from their declarations: rows, strided rows with other options, no rows."""

import functools
from dataclasses import dataclass, field

import torch
from sample_tensors import floats, transposed

from liger._core.op.declared import declarations, overload, result_names


@dataclass(frozen=True)
class Sizes:
    """The dimensions and the dtype of the samples of an op.

    Attributes:
        leading: the independent dimensions of each sample.
        trailing: what stands for "..." behind a batch, of each sample.
        named: by the names of the declarations.
        dtype: of the arguments.
    """

    leading: tuple = ((3,), (2, 3), (0,))
    trailing: tuple = ((5,), (3, 3), ())
    named: dict = field(default_factory=lambda: {"H": 16, "I": 5, "channels": 6})
    dtype: torch.dtype = torch.float32

    def shape(self, dims, n):
        if dims == ("...",):
            return [*self.leading[n], self.named["H"]]
        shape = []
        for position, dim in enumerate(dims):
            if dim == "...":
                shape += self.trailing[n] if position else self.leading[n]
            elif dim == "batch":
                shape.append(self.leading[n][0])
            elif dim.isdigit():
                shape.append(int(dim))
            else:
                shape.append(2 * self.named[dim[1:]] if dim[0] == "2" else self.named[dim])
        return shape


_FLOATS = {">=": (1e-6, 1e-3, 1e-5), "finite": (0.0, 1.0, 0.0)}
# A divisor of all dimensions.
_DIVISOR = 2


def _option(declaration, argument, n):
    kind, *words = declaration.options.get(argument.name, ("none",))
    if kind == "in":
        return words[n % len(words)]
    if kind == "divides":
        return None if "Optional" in str(argument.type) and n == 0 else _DIVISOR
    if kind in _FLOATS:
        return _FLOATS[kind][n]
    return argument.default_value if n != 1 else not argument.default_value  # A flag.


def _forward(declaration, d, sizes):
    main = declaration.shapes[declaration.main]
    samples = []
    for n in range(len(sizes.leading)):
        values, optional = [], 0
        for argument in overload(declaration.ops[0])._schema.arguments:
            shape = declaration.shapes.get(argument.name)
            if shape is None:
                values.append(_option(declaration, argument, n))
                continue
            tensor = floats(d, *sizes.shape((main if shape.like else shape).dims, n)).to(sizes.dtype)
            if "Optional" in str(argument.type):
                optional += 1
                tensor = None if optional == n else tensor
            # One tensor of several has other strides than the rest.
            elif n == 1 and argument.name == declaration.main:
                tensor = transposed(tensor)
            values.append(tensor)
        samples.append(tuple(values))
    return samples


def samples_of(op, d, sizes=Sizes()):
    """Argument tuples of a declared op."""
    declaration = declarations()[op]
    forward = declaration.ops[0]
    if op == forward:
        return _forward(declaration, d, sizes)
    found = []
    names = [argument.name for argument in overload(forward)._schema.arguments]
    arguments = overload(op)._schema.arguments
    flags = [a.name for a in arguments if a.name.startswith(("need_", "emit_"))]
    optional = [a.name for a in arguments if a.name.startswith("grad_") and "Optional" in str(a.type)]
    for n, inputs in enumerate(_forward(declaration, d, sizes)):
        outputs = overload(forward)(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results = dict(zip(result_names(forward), outputs, strict=True))
        values = dict(zip(names, inputs, strict=True)) | results
        values |= {f"grad_{name}": torch.randn_like(result) for name, result in results.items()}
        values |= dict.fromkeys(optional if n == 1 else ())
        # All gradients, then all but one.
        for missing in (None, *flags):
            asked = {flag: flag != missing for flag in flags}
            found.append(tuple((values | asked)[a.name] for a in arguments))
    return found


SAMPLES = {op: functools.partial(samples_of, op) for op in declarations()}
