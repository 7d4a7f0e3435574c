# SPDX-License-Identifier: BSD-3-Clause
"""Recognition of LoRA layers by a trial, and the forward of their patched class.

Layers that an attention calls with one argument (q, k, v) are computed by the first of them, in one node. The
others find their result within that call of the attention, if they are called with that very tensor; if they
are not, they compute it.
"""

import ast
import functools
import inspect
import textwrap
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.compiler import is_compiling

from ..._core.op.autograd import is_traced
from ..recipe import trials
from ..recipe.classes import give_class, instance_forward, patched_class, recipe_of
from ..recipe.local import Local
from .base_weight import why_not_dense
from .layer import Part, is_lora, part_of, stand_in, why_not
from .linear import linears

# Attribute of a module with groups: the first layer of each group -> the layers after it.
GROUPS = "_liger_groups"


class _Call:
    """A running call of a module with groups, and the results of the latest group: they end with the call."""

    __slots__ = ("groups", "results", "version", "x")

    def __init__(self, groups):
        self.groups, self.results, self.version, self.x = groups, None, None, None

    def keep(self, x, results):
        self.x, self.version, self.results = x, x._version, results

    def found(self, layer, x):
        if not self.results or self.x is not x or self.version != x._version:
            return None
        return self.results.pop(layer, None)


_call = Local()


@dataclass(frozen=True)
class LoraLinearRecipe:
    kind: ClassVar[str] = "lora_linear"

    def unused_because(self, module):
        """Why each call reaches the original forward although the module is patched; None if it does not."""
        return why_not(module)

    def members(self, original):
        def forward(self, x, *args, **kwargs):
            if args or kwargs or is_traced(x):
                return original.forward(self, x, *args, **kwargs)
            call = _call.value
            # An inference tensor does not tell whether it was written.
            followers = None if call is None or x.is_inference() else call.groups.get(self)
            if followers is None and call is not None and (found := call.found(self, x)) is not None:
                return found
            part = part_of(self, x)
            if part is None:
                return original.forward(self, x)
            return _run_group(call, part, followers, x) if followers else linears(x, [part])[0]

        return {"forward": functools.wraps(original.forward)(forward)}


def _run_group(call, part, followers, x):
    parts = {follower: part_of(follower, x) for follower in followers if not follower._forward_pre_hooks}
    parts = {follower: each for follower, each in parts.items() if each is not None}
    same = {follower: each for follower, each in parts.items() if _kind(each) == _kind(part)}
    result, *others = linears(x, [part, *same.values()])
    call.keep(x, dict(zip(same, others, strict=True)))
    return result


def _kind(part):
    return part.dtype, part.result, part.a.dtype, part.a.shape[1]


# --- recognition --------------------------------------------------------------------------------------------


def lora_linear(module):
    """A recipe, a reason for leaving the module alone, or None for a module of another kind."""
    if not is_lora(module) or recipe_of(module) is not None:
        return None
    cls = trials.original(module)
    recipe = trials.remembered(lambda: _try(module), lora_linear, cls, cls.forward)
    if isinstance(recipe, str):
        return recipe
    reason = why_not_dense(module._modules["base_layer"])
    return recipe if reason is None else reason


def _try(module):
    random = trials.Random()
    x, scale = random.of_all_scales(3, 16), 0.75
    base, first, second = nn.Linear(16, 12), nn.Linear(16, 4, bias=False), nn.Linear(4, 12, bias=False)
    for linear in (base, first, second):
        for parameter in linear.parameters():
            parameter.data = random(*parameter.shape)
    own = {
        "lora_dropout": {"default": nn.Identity()},
        "fan_in_fan_out": False,
        "cast_input_dtype_enabled": True,
    }
    layer = stand_in(module, base, first, second, scale, **own)
    expected = trials.result_of(module, layer, x)
    if isinstance(expected, str):
        return expected
    frozen = base.weight.detach(), None, base.bias.detach()
    part = Part(*frozen, x.dtype, x.dtype, first.weight, second.weight, scale)

    def ours(x):
        return linears(x, [part])[0]

    if trials.error(ours(x), expected) > 1:
        return "it does not compute x W^T + s x A^T B^T"
    theirs = type(layer).forward.__get__(layer)
    return LoraLinearRecipe() if trials.same_gradients(ours, theirs, x) else trials.OTHER_GRADIENTS


# --- groups -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupRecipe:
    """A module of no other recipe whose forward calls groups."""

    kind: ClassVar[None] = None

    def members(self, original):
        return {}


def group_layers(module):
    """Makes groups of the patched LoRA layers among the children of a module that its forward calls with one
    argument. Only a hint: results are right whatever the forward does."""
    module.__dict__.pop(GROUPS, None)
    children = module._modules.items()
    layers = {name: child for name, child in children if isinstance(recipe_of(child), LoraLinearRecipe)}
    if len(layers) < 2 or instance_forward(module) is not None:
        return
    original, groups = trials.original(module), {}
    for names in _called_with_one_argument(original.forward):
        group = [layers[name] for name in names if name in layers]
        if len(group) > 1:
            groups[group[0]] = tuple(group[1:])
    if groups:
        module.__dict__[GROUPS] = groups
        give_class(module, patched_class(original, recipe_of(module) or GroupRecipe(), _holding_results))


def _holding_results(function):
    @functools.wraps(function)
    def forward(self, *args, **kwargs):
        if is_compiling() or (groups := self.__dict__.get(GROUPS)) is None:
            return function(self, *args, **kwargs)
        with _call.holding(_Call(groups)):
            return function(self, *args, **kwargs)

    return forward


@functools.cache
def _called_with_one_argument(forward):
    """Tuples of names of submodules that a forward calls with the same variable: in statements that always
    run, and before the variable is assigned again."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return ()
    groups, open_groups = [], {}
    for statement in getattr(function, "body", ()):
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return) and statement.value:
            for name, argument in _calls(statement.value):
                open_groups.setdefault(argument, []).append(name)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in open_groups:
                groups.append(open_groups.pop(node.id))
    groups += open_groups.values()
    return tuple(tuple(dict.fromkeys(group)) for group in groups if len(set(group)) > 1)


# Expressions that may not evaluate all of their parts, or evaluate them several times.
_UNSURE = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _calls(node):
    """(submodule, variable) of each ``self.submodule(variable)``, in the order of evaluation."""
    if isinstance(node, _UNSURE):
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[ast.Name(id=x)], keywords=[]
        ):
            yield name, x
