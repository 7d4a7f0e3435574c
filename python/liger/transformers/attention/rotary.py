# SPDX-License-Identifier: BSD-3-Clause
"""Rotary embeddings: attention that calls the ops instead of the functions of its module.

Which form of rotation (attention/rotations.py) a function computes follows from a trial.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..recipe import recomputed, trials
from ..recipe.rename import globals_used, rename_global, uses_global
from .deferred_norm import DeferredNorm, computed, normalise_and_rotate
from .rotations import FIXED_UNSQUEEZE, FORMS, ComplexRotation, Rotation, cases, layout

UNSQUEEZE = "unsqueeze_dim"


def new_name(name):
    return f"_liger_{name}"


def is_rotary(name):
    """True if a global is called like transformers' functions that rotate queries and keys."""
    return "apply_" in name and ("rotary" in name or "rope" in name)


@dataclass(frozen=True)
class Function:
    """A function that rotates one or two tensors.

    ``unsqueeze`` is None if the function has that argument. ``layouts``: the numbers of dimensions of tensors
    and tables for which it computes the form; other arguments reach the original.
    """

    form: Rotation | ComplexRotation
    unsqueeze: int | None = None
    layouts: tuple = ((4, 2), (4, 3))

    def replacement(self, original):
        return rotary_function(original, self)


@dataclass(frozen=True)
class Caller:
    """A function that calls rotary functions: (name, Function) of each."""

    calls: tuple

    def replacement(self, original):
        return renamed(original, self.calls)


@dataclass(frozen=True)
class RopeRecipe:
    """An attention: (name, Function or Caller) of each rotary function that its forward calls."""

    calls: tuple
    kind: ClassVar[str] = "rope"

    def members(self, original):
        return {"forward": renamed(original.forward, self.calls)}


def renamed(function, calls):
    """A copy of the function that calls replacements, which are added to the globals of its module."""
    for name, found in calls:
        namespace = uses_global(function, name)
        if new_name(name) not in namespace:
            namespace[new_name(name)] = found.replacement(namespace[name])
        function = rename_global(function, name, new_name(name))
    return function


def rotary_function(original, found):
    """A function like the original that computes by the op what :class:`Function` allows."""
    signature = _signature(original)
    names, tensors, tables = signature.names, signature.tensors, signature.tables(found.form)
    default = signature.unsqueeze if found.unsqueeze is None else found.unsqueeze
    read = {*tensors, *tables, UNSQUEEZE}

    def rotated(args, kwargs):
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or any(
            n not in read and given[n] is not signature.defaults.get(n, original) for n in given
        ):
            return None
        values = [given.get(name) for name in (*tensors, *tables)]
        unsqueeze = given.get(UNSQUEEZE, default)
        if any(isinstance(value, DeferredNorm) for value in values):
            outputs = normalise_and_rotate(found, values[: len(tensors)], values[len(tensors) :], unsqueeze)
            if outputs is not None:
                return outputs
            values = [computed(value) for value in values]
        if not all(isinstance(value, torch.Tensor) for value in values):
            return None
        values = values[: len(tensors)], values[len(tensors) :]
        if layout(*values) not in found.layouts:
            return None
        outputs = found.form.rotate(*values, unsqueeze)
        if outputs is not None and recomputed.is_active():
            # Only norms of queries and keys save their inputs.
            recomputed.register_derived(_rotation(found.form, len(tensors), unsqueeze), *values, outputs)
        return outputs

    @functools.wraps(original)
    def apply(*args, **kwargs):
        ours = rotated(args, kwargs)
        if ours is None:
            given = {name: computed(value) for name, value in kwargs.items()}
            return original(*map(computed, args), **given)
        return tuple(ours) if len(tensors) == 2 else ours[0]

    return apply


def _rotation(form, count, unsqueeze):
    """The rotation as a function of ``count`` tensors and the tables. It must not refer to any tensor."""
    return lambda *tensors: form.rotate(tensors[:count], tensors[count:], unsqueeze)


class _Signature:
    """The roles of the parameters of a rotary function, by their order and names."""

    def __init__(self, parameters):
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = [p.name for p in parameters.values() if p.kind in positional]
        self.defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
        self.unsqueeze = parameters[UNSQUEEZE].default if UNSQUEEZE in parameters else None
        table = next((i for i, n in enumerate(self.names) if n in ("cos", "sin") or "freqs" in n), 0)
        self.tensors = tuple(self.names[:table])

    def tables(self, form):
        """The names of the tables in the order of the form; None if the function has other ones."""
        found = tuple(next((n for n in self.names if word in n), None) for word in form.parameters)
        return None if None in found else found


def _is_extensible(function):
    """True if the package kernels has made a module of the function, so that kernelize can replace it."""
    return isinstance(function, nn.Module)


def _signature(function):
    # The call of a module takes any arguments; its forward has the signature of the function.
    forward = function.forward if _is_extensible(function) else function
    return _Signature(inspect.signature(forward).parameters)


def attention(module):
    """A recipe for a module whose forward calls a rotary function, a reason, or None."""
    forward = trials.original(module).forward
    if not inspect.isfunction(forward):
        return None
    calls, reason = trials.remembered(lambda: _calls(forward), attention, forward)
    return RopeRecipe(calls) if calls else reason


def _calls(function):
    """(the calls to replace, why there are none, or None if the function calls no rotary function)."""
    calls, reason = [], None
    for name in sorted(filter(is_rotary, globals_used(function))):
        namespace = uses_global(function, name)
        called = namespace.get(name)
        if not inspect.isfunction(called) and not _is_extensible(called):
            continue
        try:
            rename_global(function, name, new_name(name))
        except ValueError as error:
            reason = str(error)
            continue
        found = trials.remembered(lambda f=called: recognise(f), recognise, called)
        if isinstance(found, str) and inspect.isfunction(called):
            inner, _ = _calls(called)
            found = Caller(inner) if inner else found
        if isinstance(found, str):
            reason = f"its {name} {found}"
        else:
            calls.append((name, found))
    return tuple(calls), reason


def recognise(function):
    """The :class:`Function` that gives the same results, or a reason."""
    signature = _signature(function)
    if len(signature.tensors) not in (1, 2):
        return "has other arguments than one or two tensors and the tables"
    fixed = FIXED_UNSQUEEZE if signature.unsqueeze is None else (None,)
    ran, found = False, []
    for form in FORMS:
        if signature.tables(form) is None:
            continue
        for unsqueeze in fixed:
            agree, disagree = _layouts(function, signature, form, unsqueeze)
            ran = ran or bool(agree or disagree)
            if agree - disagree:
                found.append(Function(form, unsqueeze, tuple(sorted(agree - disagree))))
        if found:
            # The dimension that explains the most layouts.
            best = max(found, key=lambda f: len(f.layouts))
            return _others(function, signature, best) or best
    return "is not a rotation that liger computes" if ran else "takes no arguments that a trial can give it"


def _call_rotation(function, signature, form, unsqueeze, tensors, tables, position):
    given = dict(zip((*signature.tensors, *signature.tables(form)), (*tensors, *tables), strict=True))
    if unsqueeze is None:
        given[UNSQUEEZE] = position
    results = function(**given)
    return results if isinstance(results, tuple | list) else (results,)


def _layouts(function, signature, form, unsqueeze):
    """(layouts in which a case agrees with the form, layouts in which one does not)."""
    agree, disagree = set(), set()
    for case in cases(form, len(signature.tensors), unsqueeze):
        tensors, tables, position = case
        ours, where = form.rotate(tensors, tables, position), layout(tensors, tables)
        try:
            theirs = _call_rotation(function, signature, form, unsqueeze, *case)
        except trials.ERRORS:
            # The function takes neither this width of the tables nor this layout, so the model never uses it.
            continue
        same = ours is not None and len(ours) == len(theirs)
        same = same and max(map(trials.error, ours, theirs)) <= 1
        (agree if same else disagree).add(where)
        if len(disagree) > len(agree) + 2:
            break  # another form
    return agree, disagree


def _others(function, signature, found):
    """A reason why a function that agrees with a form must still be left alone; None if there is none."""
    form, count = found.form, len(signature.tensors)
    for tensors, tables, position in cases(form, count, found.unsqueeze):
        if layout(tensors, tables) not in found.layouts or tensors[0].dtype != torch.float32:
            continue
        try:
            _call_rotation(function, signature, form, found.unsqueeze, tensors, tables, position)
        except trials.ERRORS:
            continue

        def theirs(*tensors, tables=tables, position=position):
            results = _call_rotation(function, signature, form, found.unsqueeze, tensors, tables, position)
            return torch.cat([t.flatten(1) for t in results], 1)

        def ours(*tensors, tables=tables, position=position):
            return torch.cat([t.flatten(1) for t in form.rotate(tensors, tables, position)], 1)

        if not trials.same_gradients(ours, theirs, *tensors):
            return trials.OTHER_GRADIENTS
        # Tables of fewer tokens than there are: a rotation of all tokens raises an error.
        shorter = [table[..., 1:, :] for table in tables]
        try:
            _call_rotation(function, signature, form, found.unsqueeze, tensors, shorter, position)
        except trials.ERRORS:
            return None
        return "rotates some of the tokens only"
    return None
