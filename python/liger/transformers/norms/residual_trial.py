# SPDX-License-Identifier: BSD-3-Clause
"""The trial of a decoder layer: whether norms/residual.py may fuse its addition with the next norm.

The trial calls the forward of the layer with stand-ins for its submodules, which record their arguments.
"""

import dataclasses
import inspect

import torch
from torch import nn

from ..recipe import trials
from .norm import NormRecipe, norm
from .residual import HIDDEN, AddNormRecipe, Call, Parameters, first

OTHER_FORM = "it is not x + attention(norm(x)) followed by a norm and an MLP, so its addition is not fused"


def decoder_layer(module):
    """A recipe, a reason, or None for a module that is no layer with RMS norms."""
    cls = trials.original(module)
    if not ("Layer" in cls.__name__ or "Block" in cls.__name__) or not inspect.isfunction(cls.forward):
        return None
    norms = {name: norm(child, ("rms_norm",)) for name, child in module._modules.items() if child is not None}
    norms = {name: recipe for name, recipe in norms.items() if isinstance(recipe, NormRecipe)}
    others = [child for name, child in module._modules.items() if child is not None and name not in norms]
    if len(norms) < 2 or len(others) < 2:
        return None
    parameters = Parameters(cls.forward)
    if not parameters.supported:
        return OTHER_FORM
    children = tuple((name, child is None or _never_drops(child)) for name, child in module._modules.items())
    key = (decoder_layer, cls, cls.forward, trials.settings(module), children, tuple(norms.items()))
    # The names of attributes of submodules that the layer looks at.
    asked: list[str] = []
    return trials.remembered(lambda: _try_all(module, norms, parameters, asked), *key, unless=asked)


def _try_all(module, norms, parameters, asked):
    for attention_output in (_pair, _alone, _triple):
        # An MLP of experts may also return its router's logits.
        tried = (
            _try(module, norms, parameters, (attention_output, output), asked) for output in (_pair, _alone)
        )
        found = next((recipe for recipe in tried if recipe is not None), None)
        if found is not None:
            return found
    return OTHER_FORM


def _try(module, norms, parameters, outputs, asked):
    flags: list[str] = []
    while True:
        tested = []
        try:
            return _LayerTrial(module, norms, parameters, outputs, asked, tuple(flags), tested).recipe()
        except (*trials.ERRORS, _OtherFormError) as error:
            if not tested or tested[0] in flags:
                trials.no_trial(module, error)
                return None
            flags.append(tested[0])


class _OtherFormError(Exception):
    """The submodules are not called as in a layer that can be fused."""


def _alone(x):
    return x


def _pair(x):
    return x, None


def _triple(x):
    return x, None, None


class _Argument:
    """Stands for an argument of the layer; the layer may pass it on, but not look at it.

    A test of its truth ends the trial. In the next one it is false (``flags``).
    """

    def __init__(self, name, tested, flags):
        self.name, self.tested, self.flags = name, tested, flags

    def __bool__(self):
        if self.name in self.flags:
            return False
        self.tested.append(self.name)
        raise TypeError("the layer tests an argument")


class _Recorder:
    """Stand-in for a submodule: a function of the hidden states, which appends its arguments to a list."""

    def __init__(self, child, name, calls, function, asked):
        self._child, self._name, self._calls, self._function = child, name, calls, function
        self._asked = asked

    # isinstance() looks at it: a layer may call an MLP of experts in another way.
    @property  # type: ignore[misc]
    def __class__(self):
        self._asked.append("__class__")
        return trials.original(self._child)

    def __getattr__(self, name):
        # A layer may look at numbers and flags of its submodules, but not at tensors.
        value = vars(self._child).get(name, self)
        if not isinstance(value, bool | int | float | str | None):
            raise AttributeError(name)
        self._asked.append(name)
        return value

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
    """The layer with stand-ins that return outputs of certain forms.

    outputs: functions that turn the new hidden states of attention and MLP into what the submodule returns.
    """

    def __init__(self, module, norms, parameters, outputs, asked, flags, tested):
        self.module, self.norms, self.parameters, self.outputs = module, norms, parameters, outputs
        self.asked, self.flags = asked, flags
        random = trials.Random()
        self.x = random.of_all_scales(3, 16)
        self.weights = {name: random(16) for name in norms}
        self.matrices = random(16, 16), random(16, 16)
        names = (*parameters.names[1:], "\0extra")
        self.arguments = {name: _Argument(name, tested, flags) for name in names}
        # rows: whether attention and MLP return rows of tokens; wide: whether they return float32.
        self.rows, self.wide = (False, False), False

    def stand_in(self, dtype):
        """(a stand-in for the layer, the list of the calls of its submodules)."""
        calls = []
        children = {
            name: _Recorder(child, name, calls, self._function(name, calls, dtype), self.asked)
            for name, child in self.module._modules.items()
            if child is not None
        }
        absent = {name: None for name, child in self.module._modules.items() if child is None}
        layer = trials.stand_in(self.module, **children, **absent)
        # With checkpointing on, the layers of transformers replace some of their arguments.
        layer.__dict__["gradient_checkpointing"] = False
        return layer, calls

    def _function(self, name, calls, dtype):
        recipe = self.norms.get(name)
        if _never_drops(self.module._modules[name]):
            return _alone
        if recipe is not None:
            weight = self.weights[name].to(torch.float32 if self.wide else dtype) if recipe.weighted else None
            return lambda x: recipe.run(x, weight, None, recipe.eps_of(self.module._modules[name]))

        def transform(x):
            number = sum(called not in self.norms for called, _, _ in calls) - 1
            if number > 1:
                raise _OtherFormError("it calls more than attention and MLP")
            hidden = x @ self.matrices[number].to(x.dtype)
            hidden = hidden.flatten(0, 1) if self.rows[number] else hidden
            return self.outputs[number](hidden.float() if self.wide else hidden)

        return transform

    def given(self, without):
        """Arguments of the layer, some left at default or None, and one that it does not name."""
        defaults, extra = self.parameters.defaults, {}
        given = {n: defaults.get(n) if n in without else self.arguments[n] for n in self.parameters.names[1:]}
        if self.parameters.takes_extra and not without:
            extra = {"\0extra": self.arguments["\0extra"]}
        return given, extra

    def recipe(self):
        """The recipe if it gives the results of the layer, or None."""
        recipe = self._parse()
        for option, rows in (("attention_rows", (True, False)), ("mlp_rows", (False, True))):
            self.rows = rows
            try:
                self._theirs(self.x, torch.float32, *self.given(()))
            except trials.ERRORS:
                continue  # The layer needs hidden states of its own shape, so its submodules return them.
            recipe = dataclasses.replace(recipe, **{option: True})
            if not self._agrees(recipe, torch.float32, ()):
                return None
        self.rows, self.wide = (False, False), True
        if not self._agrees(recipe, torch.bfloat16, ()):
            return None
        self.wide = False
        names = self.parameters.names[1:]
        for dtype in (torch.float32, torch.bfloat16):
            if not all(
                self._agrees(recipe, dtype, without) for without in ((), *((n,) for n in names), names)
            ):
                return None
        given, extra = self.given(())

        def ours(x):
            return first(recipe.run(self.stand_in(torch.float32)[0], x, given, extra))

        def theirs(x):
            return self._theirs(x, torch.float32, given, extra)[0]

        return recipe if trials.same_gradients(ours, theirs, self.x) else None

    def _theirs(self, x, dtype, given, extra):
        """The results of the original forward in evaluation and in training."""
        results = []
        for training in (False, True):
            layer, _ = self.stand_in(dtype)
            layer.training = training
            results.append(first(type(layer).forward(layer, x, **given, **extra)))
        return results

    def _agrees(self, recipe, dtype, without):
        """True if results, order of calls and arguments agree, without some of the arguments of the layer."""
        x, (given, extra) = self.x.to(dtype), self.given(without)
        expected, training = self._theirs(x, dtype, given, extra)
        layer, calls = self.stand_in(dtype)
        ours = first(recipe.run(layer, x, given, extra))
        if not torch.equal(expected, training) or trials.error(ours, expected) > 1:
            return False
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
            flags=self.flags,
        )

    def _call(self, args, kwargs):
        def source(value):
            if isinstance(value, torch.Tensor):
                return HIDDEN
            if isinstance(value, _Argument):
                return value.name
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
