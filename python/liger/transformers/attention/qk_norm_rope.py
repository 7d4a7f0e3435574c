# SPDX-License-Identifier: BSD-3-Clause
"""Attention with one op for the norms of queries and keys and the rotation: the patched class, and its trial.

The trial runs the forward with stand-ins for its submodules: as it is, with norms and rotation as single ops,
and with :class:`DeferredNorm` for the results of the norms.
"""

import copy
import functools
import inspect
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..norms.norm import NormRecipe, norm
from ..recipe import trials
from ..recipe.classes import instance_forward, patched_class
from ..recipe.rename import attributes_used, rename_attribute
from . import rotary
from .deferred_norm import DeferredNorm, deferred
from .rotary import RopeRecipe, renamed


@dataclass(frozen=True)
class QKNormRopeRecipe:
    """An attention where the rotary functions (``calls``, see RopeRecipe) also compute these norms."""

    calls: tuple
    norms: tuple
    kind: ClassVar[str] = "qk_norm_rope"

    def members(self, original):
        methods = {_new_name(name): _method(name) for name in self.norms}
        return {"forward": _deferring(original.forward, self.calls, self.norms), **methods}


def _new_name(name):
    return f"_liger_deferred_{name}"


def _method(name):
    def method(self, x):
        return deferred(getattr(self, name), x)

    return method


def _deferring(forward, calls, norms):
    """A copy of a forward that calls deferring methods instead of norms, and patched rotary functions.

    Raises:
        ValueError: the code cannot be renamed.
    """
    for name in norms:
        forward = rename_attribute(forward, name, _new_name(name))
    return renamed(forward, calls)


def attention(module):
    """As :func:`rotary.attention`, with norms where the trial shows that the rotation computes them."""
    recipe = rotary.attention(module)
    if not isinstance(recipe, RopeRecipe):
        return recipe
    cls = trials.original(module)
    read = attributes_used(cls.forward)
    children = {name: child for name, child in module._modules.items() if child is not None}
    used = {n: child for n, child in children.items() if n in read and instance_forward(child) is None}
    found = {name: norm(child, ("rms_norm",)) for name, child in used.items()}
    norms = {name: each for name, each in found.items() if isinstance(each, NormRecipe)}
    if not norms:
        return recipe
    # layer_idx is left out: a forward that does not rotate for it reads the norm, which is computed.
    settings = tuple(setting for setting in trials.settings(module) if setting[0] != "layer_idx")
    sizes = tuple((name, type(child), _out_features(child)) for name, child in children.items())
    # A recipe may name the attribute that holds eps, so the value of eps belongs in the key.
    numbers = tuple(trials.settings(used[name]) for name in norms)
    key = (attention, cls, cls.forward, recipe, settings, sizes, tuple(norms.items()), numbers)
    names = trials.remembered(lambda: _names(module, recipe, norms), *key)
    return QKNormRopeRecipe(recipe.calls, names) if names else recipe


def _out_features(child):
    return getattr(child, "out_features", None)


def _names(module, recipe, norms):
    """The names of the norms that the rotation computes, in every trial; an empty tuple without any."""
    try:
        return _Trial(module, recipe, norms).names()
    except trials.ERRORS as error:
        trials.no_trial(module, error)
        return ()


class _Recorded(DeferredNorm):
    """A deferred norm that records its uses in ``norm.uses``."""

    def heads(self):
        self.norm.uses.append("heads")
        return super().heads()

    def read(self):
        self.norm.uses.append("read")
        return super().read()


class _Projection:
    """Stand-in for a linear layer of any size: its weight has rank 4."""

    def __init__(self, random, out_features):
        self._random, self._out = random, random(4, out_features) / 2
        self._in = {}

    def __call__(self, x):
        width = x.shape[-1]
        if width not in self._in:
            self._in[width] = self._random(width, 4) / width**0.5
        return (x @ self._in[width].to(x.dtype)) @ self._out.to(x.dtype)


class _Cache:
    """Stand-in for a cache of keys and values that is empty."""

    def update(self, keys, values, *args, **kwargs):
        return keys, values

    def get_seq_length(self, *args):
        return 0


_HIDDEN, _TOKENS = 16, 3


class _Trial:
    def __init__(self, module, recipe, norms):
        self.module, self.recipe, self.norms = module, recipe, norms
        self.forward = trials.original(module).forward
        random = trials.Random()
        self.x = random.of_all_scales(_TOKENS, _HIDDEN)
        self.projections = {
            name: _Projection(random, width)
            for name, child in module._modules.items()
            if (width := _out_features(child)) is not None
        }
        self.parameters = {
            name: random(*_shape(p)) for name, p in module._parameters.items() if p is not None
        }
        weights = {name: module._modules[name]._parameters.get("weight") for name in norms}
        self.weights = {name: None if w is None else random(*_shape(w)) for name, w in weights.items()}
        self.mask = torch.full((_TOKENS, _TOKENS), -1e4).triu(1)[None, None]
        self.head_dim = self._head_dim()
        self.tables = {
            width: (random(1, _TOKENS, width), random(1, _TOKENS, width)) for width in self._widths()
        }

    def _head_dim(self):
        widths = [w.shape[0] for w in self.weights.values() if w is not None]
        widths.append(getattr(self.module, "head_dim", None))
        if widths[0] is None:
            raise ValueError("neither its norms nor a head_dim tell the size of a head")
        return widths[0]

    def _widths(self):
        """Widths of the rotary tables: as the heads, half of them, and the part of them that rotates."""
        config = getattr(self.module, "config", None)
        settings = getattr(config, "rope_parameters", None)
        part = settings.get("partial_rotary_factor") if isinstance(settings, dict) else None
        part = part or getattr(config, "partial_rotary_factor", None) or 1.0
        widths = (
            self.head_dim,
            self.head_dim // 2,
            int(self.head_dim * part),
            int(self.head_dim * part) // 2,
        )
        return tuple(dict.fromkeys(width for width in widths if width))

    # --- the forward ----------------------------------------------------------------------------------------

    def names(self):
        names = tuple(self.norms)
        cases = [case for case in self._cases() if self._outputs(self.forward, (), case) is not None]
        if not cases:
            return ()
        # The norms of values, for example, are not rotated.
        names = tuple(name for name in names if self._is_fused(name, names, cases[0]))
        if not names or not all(self._agrees(names, case) for case in cases):
            return ()
        return names if self._same_gradients(names, cases[0]) else ()

    def _cases(self):
        for width in self.tables:
            for mask, cache, training in (
                (None, None, False),
                (self.mask, None, True),
                (None, _Cache(), True),
                (self.mask, _Cache(), False),
            ):
                yield {"width": width, "mask": mask, "cache": cache, "training": training}

    def _is_fused(self, name, names, case):
        return self._outputs(
            _deferring(self.forward, self.recipe.calls, names), names, case
        ) is not None and (self._used(name))

    def _used(self, name):
        return self.uses[name] and set(self.uses[name]) == {"heads"}

    def _agrees(self, names, case):
        """True if the results agree in both dtypes, and the rotation has computed the norms."""
        ours = _deferring(self.forward, self.recipe.calls, names)
        single = renamed(self.forward, self.recipe.calls)
        for dtype in (torch.float32, torch.bfloat16):
            results = self._outputs(ours, names, case, dtype)
            if results is None or not all(map(self._used, names)):
                return False
            expected = self._outputs(single, (), case, dtype)
            if max(map(trials.error, results, expected)) > 1:
                return False
        # The attention after the rotation has other rounding errors in the original.
        original = self._outputs(self.forward, (), case, patched=False)
        results = self._outputs(ours, names, case)
        return max(map(trials.error, results, original)) <= trials.GRADIENT_TOLERANCE

    def _same_gradients(self, names, case):
        ours = _deferring(self.forward, self.recipe.calls, names)

        def run(forward, names, patched, x, *weights):
            given = dict(zip(self.weights, weights, strict=True))
            return self._outputs(forward, names, case, x=x, weights=given, patched=patched)[0]

        functions = (
            functools.partial(run, ours, names, True),
            functools.partial(run, self.forward, (), False),
        )
        return trials.same_gradients(*functions, self.x, *self.weights.values())

    def _outputs(self, forward, names, case, dtype=torch.float32, x=None, weights=None, patched=True):
        """The tensors that a copy of the forward returns, None for an error; sets ``uses`` of ``names``."""
        layer = self._stand_in(names, case, dtype, weights or self.weights, patched)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # dropout
            try:
                output = forward(layer, **self._given(case, self.x.to(dtype) if x is None else x, dtype))
            except trials.ERRORS as error:
                trials.no_trial(self.module, error)
                return None
        output = output if isinstance(output, tuple) else (output,)
        return [t for t in output if isinstance(t, torch.Tensor)] or None

    def _given(self, case, x, dtype):
        given = {}
        _, *parameters = inspect.signature(self.forward).parameters.values()
        for index, parameter in enumerate(parameters):
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            name = parameter.name
            if index == 0:
                given[name] = x
            elif name == "position_embeddings":
                given[name] = tuple(table.to(dtype) for table in self.tables[case["width"]])
            elif name == "attention_mask":
                given[name] = None if case["mask"] is None else case["mask"].to(dtype)
            elif name == "cache" or name.startswith("past_key_value"):
                # "cache" in late releases of transformers 5.
                given[name] = case["cache"]
            elif name == "shared_kv_states":
                # Gemma 3n and Gemma 4 store their keys and values there for layers without their own.
                given[name] = {}
            elif parameter.default is parameter.empty:
                given[name] = None
        return given

    def _stand_in(self, names, case, dtype, weights, patched):
        children = {}
        self.uses = {name: [] for name in names}
        for name, child in self.module._modules.items():
            if name in self.norms:
                children[name] = self._norm(name, child, dtype, weights[name], patched)
            elif name in self.projections:
                children[name] = self.projections[name]
            elif child is None or not _has_tensors(child):
                children[name] = None if child is None else copy.deepcopy(child).train(case["training"])
            # Other children are left out: a forward that reads one fails its trial.
        for name in names:
            make = functools.partial(deferred, children[name], make=_Recorded)
            children[name].__dict__["uses"] = self.uses[name]
            children[_new_name(name)] = make
        parameters = {name: p.to(dtype) for name, p in self.parameters.items()}
        layer = trials.stand_in(self.module, **parameters, **children, training=case["training"])
        if hasattr(self.module, "config"):
            # Any attention implementation does; the eager one is in the module of the model.
            layer.__dict__["config"] = copy.deepcopy(self.module.config)
            layer.config._attn_implementation = "eager"
        return layer

    def _norm(self, name, child, dtype, weight, patched):
        given = {} if weight is None else {"weight": weight.to(dtype)}
        if hasattr(child, "normalized_shape"):
            given["normalized_shape"] = (self.head_dim,)
        stand_in = trials.stand_in(child, **given, **trials.NO_HOOKS)
        if patched:
            stand_in.__class__ = patched_class(type(stand_in), self.norms[name])
        return stand_in


def _shape(parameter):
    # ZeRO-3 partitions parameters and stores their shape.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _has_tensors(child):
    return any(True for _ in (*child.parameters(), *child.buffers()))
