# SPDX-License-Identifier: BSD-3-Clause
"""Calls of the declared public functions, from their declarations."""

import liger
from liger._core.op.declared import declarations, overload

# A divisor of all dimensions, for the options without a default.
DIVISOR = 4
# The declaration of each public function, by its name.
DECLARED = {
    op: declaration
    for op, declaration in declarations().items()
    if op == declaration.ops[0] and hasattr(liger, op)
}


def is_of_batch(op):
    return DECLARED[op].dims[0] == "batch"


def shapes(op, main):
    """The shapes of the tensors of an op, by name, for a main tensor of the shape ``main``."""
    declaration = DECLARED[op]

    def size(dim):
        if dim.isdigit():
            return int(dim)
        position = declaration.dims.index(dim)
        return main[position if is_of_batch(op) else position - len(declaration.dims)]

    names = [a.name for a in overload(op)._schema.arguments if a.name in declaration.shapes]
    return {
        name: tuple(map(size, declaration.shapes[name].dims))
        if declaration.is_parameter(name)
        else tuple(main)
        for name in names
    }


def options(op):
    """The options without a default."""
    arguments = overload(op)._schema.arguments
    return {
        a.name: DIVISOR for a in arguments if a.name not in DECLARED[op].shapes and not a.has_default_value()
    }


def call(op):
    """The public function, which takes its tensors by position."""

    # Not in the function, which torch.compile traces.
    names, given = list(shapes(op, (2, DIVISOR, 2))), options(op)
    public = getattr(liger, op)

    def function(*tensors):
        return public(**dict(zip(names, tensors, strict=True)), **given)

    return function
