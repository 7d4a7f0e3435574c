# SPDX-License-Identifier: BSD-3-Clause
"""Residual addition and RMS norm in one op, inside decoder layers.

Layers of the form ``s = x + attention(norm(x)); return s + mlp(norm(s))``, with or without more norms around
attention and MLP. The patched forward calls attention, MLP and the other norms as modules. It fuses the
addition with the norm behind it, unless that has hooks or was replaced: the op does not call the module.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import ClassVar

from ..._core.dtensor.inputs import is_dtensor
from ...ops.rms_norm import fused_add_rms_norm
from ..recipe import recomputed
from ..recipe.classes import is_called_plainly
from .norm import NormRecipe


@dataclass(frozen=True)
class Call:
    """Arguments of a module: names of parameters of the layer, or constants in a tuple."""

    positional: tuple
    keywords: tuple
    extra: bool

    def run(self, module, hidden, given, extra):
        values = {**given, HIDDEN: hidden}

        def value(source):
            return source[0] if isinstance(source, tuple) else values[source]

        arguments = {name: value(source) for name, source in self.keywords}
        if self.extra:
            arguments.update(extra)
        return module(*map(value, self.positional), **arguments)


# The source of the hidden states among the arguments of a module.
HIDDEN = "\0hidden"


@dataclass(frozen=True)
class AddNormRecipe:
    """The names of the submodules in the order of their calls; None for norms that it lacks."""

    before: str | None
    attention: str
    call: Call
    after_attention: str | None
    fused_norm: str
    mlp: str
    after_mlp: str | None
    mlp_tuple: bool
    wrapped: bool
    # True if the layer gives the output of attention and MLP its own shape, because they may return rows.
    attention_rows: bool = False
    mlp_rows: bool = False
    # Parameters that the layer tests for truth; it is not fused if one is neither None nor False.
    flags: tuple = ()
    # True if the backward recomputes the outputs of norms and gated products (recomputed.py).
    recompute: bool = False
    kind: ClassVar[str] = "fused_add_rms_norm"

    def run(self, module, x, given, extra):
        hidden = x if self.before is None else getattr(module, self.before)(x)
        update = first(self.call.run(getattr(module, self.attention), hidden, given, extra))
        if self.attention_rows:
            update = update.reshape(x.shape)
        if self.after_attention is not None:
            update = getattr(module, self.after_attention)(update)
        hidden, x = _add_and_normalise(getattr(module, self.fused_norm), update, x)
        update = getattr(module, self.mlp)(hidden)
        if self.mlp_tuple:
            update = first(update)
        if self.mlp_rows:
            update = update.reshape(x.shape)
        if self.after_mlp is not None:
            update = getattr(module, self.after_mlp)(update)
        return (x + update,) if self.wrapped else x + update

    def members(self, original):
        recipe, parameters = self, Parameters(original.forward)
        names, defaults, takes_extra = parameters.names, parameters.defaults, parameters.takes_extra

        def forward(self, *args, **kwargs):
            given = {**defaults, **dict(zip(names, args, strict=False))}
            extra = {name: value for name, value in kwargs.items() if name not in names}
            given.update({name: value for name, value in kwargs.items() if name in names})
            if len(args) > len(names) or len(given) < len(names) or (extra and not takes_extra):
                return original.forward(self, *args, **kwargs)
            if any(given[name] is not None and given[name] is not False for name in recipe.flags):
                return original.forward(self, *args, **kwargs)
            return recipe.run(self, given[names[0]], given, extra)

        forward = functools.wraps(original.forward)(forward)
        return {"forward": recomputed.recomputing(forward) if self.recompute else forward}


def first(output):
    return output[0] if isinstance(output, tuple) else output


def _add_and_normalise(module, update, x):
    """``(module(x + update), x + update)``."""
    recipe = getattr(type(module), "_liger_recipe", None)
    if isinstance(recipe, NormRecipe) and recipe.kind == "rms_norm" and is_called_plainly(module, x):
        weight = getattr(module, "weight", None) if recipe.weighted else None
        same = update.shape == x.shape and update.dtype == x.dtype and is_dtensor(update) == is_dtensor(x)
        # An x that must be widened is narrower than the sum that the op would return.
        if same and recipe.operand(module, x, weight) is x:
            eps = recipe.eps_of(module)
            hidden, total = fused_add_rms_norm(update, x, weight, eps, recipe.offset, recipe.casting_mode)
            if recomputed.is_active() and _same_kernel_shape(update, x):
                recomputed.register(recipe.op(eps), (total, weight, None), (hidden,))
            return hidden, total
    x = x + update
    return module(x), x


def _same_kernel_shape(update, x):
    """True if the norm of the stored sum reduces rows in the order of the fused op."""
    return all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (update, x))


class Parameters:
    """The parameters of a layer's forward; ``supported``: each can be passed by position."""

    def __init__(self, forward):
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        named = [p for p in parameters if p.kind in positional]
        self.names = tuple(p.name for p in named)
        self.defaults = {p.name: p.default for p in named if p.default is not p.empty}
        self.takes_extra = any(p.kind == p.VAR_KEYWORD for p in parameters)
        self.supported = bool(named) and all(p.kind in (*positional, p.VAR_KEYWORD) for p in parameters)
