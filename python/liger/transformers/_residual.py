"""Residual addition and RMS norm in one op, inside decoder layers.

Layers of the form ``s = x + attention(norm(x)); return s + mlp(norm(s))``, with or without more norms around attention
and MLP. The patched forward calls attention, MLP and the other norms as modules. It fuses the addition with the norm
that follows it, unless that norm has hooks or was replaced, because the op does not call the module.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from .._core.dtensor import is_dtensor
from ..ops.rms_norm import fused_add_rms_norm
from . import _trials
from ._norms import NormRecipe, norm

OTHER_FORM = "it is not x + attention(norm(x)) followed by a norm and an MLP, so its addition is not fused"


@dataclass(frozen=True)
class Call:
    """Arguments of a module: for each of them the name of a parameter of the layer, or a constant in a tuple."""

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
    """The names of the submodules in the order of their calls; None for norms that the layer does not have."""

    before: str | None
    attention: str
    call: Call
    after_attention: str | None
    fused_norm: str
    mlp: str
    after_mlp: str | None
    mlp_tuple: bool
    wrapped: bool
    kind: ClassVar[str] = "fused_add_rms_norm"

    def run(self, module, x, given, extra):
        hidden = x if self.before is None else getattr(module, self.before)(x)
        update = _first(self.call.run(getattr(module, self.attention), hidden, given, extra))
        if self.after_attention is not None:
            update = getattr(module, self.after_attention)(update)
        hidden, x = _add_and_normalise(getattr(module, self.fused_norm), update, x)
        update = getattr(module, self.mlp)(hidden)
        if self.mlp_tuple:
            update = _first(update)
        if self.after_mlp is not None:
            update = getattr(module, self.after_mlp)(update)
        return (x + update,) if self.wrapped else x + update

    def members(self, original):
        recipe, parameters = self, _parameters(original.forward)
        names, defaults, takes_extra = parameters.names, parameters.defaults, parameters.takes_extra

        def forward(self, *args, **kwargs):
            given = {**defaults, **dict(zip(names, args, strict=False))}
            extra = {name: value for name, value in kwargs.items() if name not in names}
            given.update({name: value for name, value in kwargs.items() if name in names})
            if len(args) > len(names) or len(given) < len(names) or (extra and not takes_extra):
                return original.forward(self, *args, **kwargs)
            return recipe.run(self, given[names[0]], given, extra)

        return {"forward": functools.wraps(original.forward)(forward)}


def _first(output):
    return output[0] if isinstance(output, tuple) else output


def _add_and_normalise(module, update, x):
    """``(module(x + update), x + update)``."""
    recipe = getattr(type(module), "_liger_recipe", None)
    if isinstance(recipe, NormRecipe) and recipe.kind == "rms_norm" and _is_called_plainly(module):
        weight = getattr(module, "weight", None) if recipe.weighted else None
        same = update.shape == x.shape and update.dtype == x.dtype and is_dtensor(update) == is_dtensor(x)
        if same and recipe.takes(module, x, weight):
            eps = recipe.eps_of(module)
            return fused_add_rms_norm(update, x, weight, eps, recipe.offset, recipe.casting_mode)
    x = x + update
    return module(x), x


def _is_called_plainly(module):
    """Whether a call of the module does no more than its forward: hooks gather weights and record results."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return not any(hooks) and "forward" not in module.__dict__ and not _has_any_global_hook()


class _Parameters:
    def __init__(self, signature):
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = list(signature.parameters.values())[1:]
        named = [p for p in parameters if p.kind in (*positional, inspect.Parameter.KEYWORD_ONLY)]
        self.names = tuple(p.name for p in named)
        self.defaults = {p.name: p.default for p in named if p.default is not p.empty}
        self.takes_extra = any(p.kind == p.VAR_KEYWORD for p in parameters)
        self.positional_only_by_name = all(p.kind in positional for p in named)


def _parameters(forward):
    return _Parameters(inspect.signature(forward))


# --- recognition --------------------------------------------------------------------------------------------------


def decoder_layer(module):
    """A recipe, a reason, or None for a module that is no layer with RMS norms."""
    cls = _trials.original(module)
    if not ("Layer" in cls.__name__ or "Block" in cls.__name__) or not inspect.isfunction(cls.forward):
        return None
    norms = {name: norm(child, ("rms_norm",)) for name, child in module._modules.items() if child is not None}
    norms = {name: recipe for name, recipe in norms.items() if isinstance(recipe, NormRecipe)}
    others = [child for name, child in module._modules.items() if child is not None and name not in norms]
    if len(norms) < 2 or len(others) < 2:
        return None
    parameters = _parameters(cls.forward)
    if not parameters.names or not parameters.positional_only_by_name:
        return OTHER_FORM
    for attention_output in (_pair, _alone, _triple):
        # An MLP of experts may return its router's logits, too.
        tried = (_try(module, norms, parameters, (attention_output, output)) for output in (_pair, _alone))
        found = next((recipe for recipe in tried if recipe is not None), None)
        if found is not None:
            return found
    return OTHER_FORM


def _try(module, norms, parameters, outputs):
    try:
        return _LayerTrial(module, norms, parameters, outputs).recipe()
    except (*_trials.ERRORS, _OtherFormError) as error:
        _trials.no_trial(module, error)
        return None


class _OtherFormError(Exception):
    """The calls of the submodules are not those of a layer that can be fused."""


def _alone(x):
    return x


def _pair(x):
    return x, None


def _triple(x):
    return x, None, None


class _Argument:
    """Stands for an argument of the layer; the layer may pass it on, but not look at it."""

    def __bool__(self):
        raise TypeError("the layer looks at an argument")


class _Recorder:
    """Stand-in for a submodule: a function of the hidden states, which appends its arguments to a list."""

    def __init__(self, child, name, calls, function):
        # What a layer asks of its submodules: numbers and flags, but no tensors.
        plain = {n: v for n, v in vars(child).items() if isinstance(v, bool | int | float | str | None)}
        self.__dict__.update(plain)
        self._name, self._calls, self._function = name, calls, function

    def __call__(self, *args, **kwargs):
        if self._function is _alone and not kwargs and len(args) == 1:
            return args[0]
        self._calls.append((self._name, args, kwargs))
        hidden = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        if len(hidden) != 1:
            raise _OtherFormError("a submodule does not get one tensor")
        return self._function(hidden[0])


def _never_drops(child):
    return type(child) is nn.Dropout and child.p == 0


class _LayerTrial:
    def __init__(self, module, norms, parameters, outputs):
        self.module, self.norms, self.parameters, self.outputs = module, norms, parameters, outputs
        random = _trials.Random()
        self.x = random.of_all_scales(3, 16)
        self.weights = {name: random(16) for name in norms}
        self.matrices = random(16, 16), random(16, 16)
        self.arguments = {name: _Argument() for name in (*parameters.names[1:], "\0extra")}

    def stand_in(self, dtype):
        """(a stand-in for the layer, the list of the calls of its submodules)."""
        calls = []
        children = {
            name: _Recorder(child, name, calls, self._function(name, calls, dtype))
            for name, child in self.module._modules.items()
            if child is not None
        }
        absent = {name: None for name, child in self.module._modules.items() if child is None}
        layer = _trials.stand_in(self.module, **children, **absent)
        # With checkpointing on, the layers of transformers replace some of their arguments.
        layer.__dict__["gradient_checkpointing"] = False
        return layer, calls

    def _function(self, name, calls, dtype):
        recipe = self.norms.get(name)
        if _never_drops(self.module._modules[name]):
            return _alone
        if recipe is not None:
            weight = self.weights[name].to(dtype) if recipe.weighted else None
            return lambda x: recipe.run(x, weight, None, recipe.eps_of(self.module._modules[name]))

        def transform(x):
            number = sum(called not in self.norms for called, _, _ in calls) - 1
            if number > 1:
                raise _OtherFormError("it calls more than attention and MLP")
            return self.outputs[number](x @ self.matrices[number].to(dtype))

        return transform

    def given(self, without):
        """Arguments of the layer, with the default or None for some of them, and one that the layer does not name."""
        defaults, extra = self.parameters.defaults, {}
        given = {n: defaults.get(n) if n in without else self.arguments[n] for n in self.parameters.names[1:]}
        if self.parameters.takes_extra and not without:
            extra = {"\0extra": self.arguments["\0extra"]}
        return given, extra

    def recipe(self):
        """The recipe if it gives the results of the layer, or None."""
        recipe = self._parse()
        for dtype in (torch.float32, torch.bfloat16):
            x = self.x.to(dtype)
            for without in ((), *((name,) for name in self.parameters.names[1:]), self.parameters.names[1:]):
                given, extra = self.given(without)
                expected = self._theirs(x, dtype, given, extra)
                if not torch.equal(*expected) or not self._matches(
                    recipe, x, dtype, given, extra, expected[0]
                ):
                    return None
        given, extra = self.given(())

        def ours(x):
            return _first(recipe.run(self.stand_in(torch.float32)[0], x, given, extra))

        def theirs(x):
            return self._theirs(x, torch.float32, given, extra)[0]

        return recipe if _trials.same_gradients(ours, theirs, self.x) else None

    def _theirs(self, x, dtype, given, extra):
        """The results of the original forward in evaluation and in training."""
        results = []
        for training in (False, True):
            layer, _ = self.stand_in(dtype)
            layer.training = training
            results.append(_first(type(layer).forward(layer, x, **given, **extra)))
        return results

    def _matches(self, recipe, x, dtype, given, extra, expected):
        layer, calls = self.stand_in(dtype)
        ours = _first(recipe.run(layer, x, given, extra))
        if _trials.error(ours, expected) > 1:
            return False
        # The attention must get the same objects.
        reference, expected_calls = self.stand_in(dtype)
        type(reference).forward(reference, x, **given, **extra)
        return len(calls) == len(expected_calls) and all(
            _same_arguments(*pair) for pair in zip(calls, expected_calls, strict=True)
        )

    def _parse(self):
        """The recipe that the calls of the original forward suggest."""
        layer, calls = self.stand_in(torch.float32)
        given, extra = self.given(())
        output = type(layer).forward(layer, self.x, **given, **extra)
        if isinstance(output, tuple) and len(output) != 1:
            raise _OtherFormError("it returns more than hidden states")
        order = [name for name, _, _ in calls]
        modules = [i for i, name in enumerate(order) if name not in self.norms]
        if len(modules) != 2 or len(set(order)) != len(order):
            raise _OtherFormError("it does not call attention and MLP once each")
        attention, mlp = modules
        before, between, after = order[:attention], order[attention + 1 : mlp], order[mlp + 1 :]
        if len(before) > 1 or len(between) not in (1, 2) or len(after) > 1:
            raise _OtherFormError("its norms are elsewhere")
        if calls[mlp][2] or len(calls[mlp][1]) != 1:
            raise _OtherFormError("its MLP has more arguments")
        return AddNormRecipe(
            before=before[0] if before else None,
            attention=order[attention],
            call=self._call(*calls[attention][1:]),
            after_attention=between[0] if len(between) == 2 else None,
            fused_norm=between[-1],
            mlp=order[mlp],
            after_mlp=after[0] if after else None,
            mlp_tuple=self.outputs[1] is not _alone,
            wrapped=isinstance(output, tuple),
        )

    def _call(self, args, kwargs):
        names = {id(argument): name for name, argument in self.arguments.items()}

        def source(value):
            if isinstance(value, torch.Tensor):
                return HIDDEN
            if isinstance(value, _Argument):
                return names[id(value)]
            if value is None or isinstance(value, bool):
                return (value,)
            raise _OtherFormError("its attention gets an argument of unknown origin")

        extra = "\0extra" in kwargs
        keywords = tuple((name, source(value)) for name, value in kwargs.items() if name != "\0extra")
        return Call(tuple(map(source, args)), keywords, extra)


def _same_arguments(ours, theirs):
    (name, args, kwargs), (their_name, their_args, their_kwargs) = ours, theirs

    def same(a, b):
        return isinstance(b, torch.Tensor) if isinstance(a, torch.Tensor) else a is b

    return (
        name == their_name
        and len(args) == len(their_args)
        and kwargs.keys() == their_kwargs.keys()
        and all(map(same, args, their_args))
        and all(same(kwargs[key], their_kwargs[key]) for key in kwargs)
    )
