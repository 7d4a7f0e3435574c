# SPDX-License-Identifier: BSD-3-Clause
"""Norms: the forward of a patched class, and the trial that finds it.

Root-mean-square norms with and without a weight (zero-centred ones too), and layer norms with and without
weight and bias. Which of them a class computes, a trial tells; its name decides if it gets one.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from types import NoneType

import torch
from torch import nn

from ..._core.dtensor.inputs import is_dtensor
from ...ops.layer_norm import layer_norm
from ...ops.rms_norm import rms_norm
from ..recipe import recomputed, trials
from ..recipe.classes import is_called_plainly

EPS_NAMES = ("variance_epsilon", "eps")
# Values of eps in the code of norms that have no such attribute (OLMo's).
_LITERAL_EPS = (1e-5, 1e-6)
_NAMES = ("RMSNorm", "LayerNorm", "L2Norm")
# (offset, casting_mode) to try: Llama and similar, Gemma, variants, norms without casts.
_RMS_KINDS = ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma"), (1.0, "llama"), (0.0, "none"))


@dataclass(frozen=True)
class NormRecipe:
    """``kind`` is the op. ``eps`` is a value, or an attribute's name; None there means float32's.

    mixed: the dtype of the result for an x of 16 bits and weights in float32, as under autocast: ``"narrow"``
        (x's), ``"wide"`` (float32), or None if the op does not give that result.
    """

    kind: str
    eps: float | str
    offset: float = 0.0
    casting_mode: str = "llama"
    weighted: bool = True
    mixed: str | None = None

    def run(self, x, weight, bias, eps):
        weight = weight if self.weighted else None
        if self.kind == "rms_norm":
            return rms_norm(x, weight, eps, self.offset, self.casting_mode)
        # Contiguous, as the result of torch's layer norm is: models view it in other shapes.
        return layer_norm(x.contiguous(), weight + self.offset if self.offset else weight, bias, eps)

    def op(self, eps):
        """``(x, weight, bias) -> (y,)``."""
        return lambda x, weight, bias: (self.run(x, weight, bias, eps),)

    def eps_of(self, module):
        eps = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        return torch.finfo(torch.float32).eps if eps is None else eps

    def operand(self, module, x, *tensors):
        """x as the op takes it; None where result or dtype would differ from the original's."""
        # The norms of torch return float32 in autocast.
        if x.dtype not in trials.DTYPES or (self._is_of_torch(module) and _autocast_widens(x)):
            return None
        dtype = x.dtype
        for t in tensors:
            if t is None:
                continue
            # A partitioned weight (ZeRO-3) is a vector until it is gathered.
            if t.dim() != 1 or is_dtensor(t) != is_dtensor(x):
                return None
            if t.dtype != dtype:
                if self.mixed is None or t.dtype != torch.float32:
                    return None
                dtype = torch.float32 if self.mixed == "wide" else dtype
        return x if dtype == x.dtype else x.to(dtype)

    def _is_of_torch(self, module):
        return self.kind == "layer_norm" or isinstance(module, nn.RMSNorm)

    def members(self, original):
        recipe = self

        def forward(self, *args, **kwargs):
            if not kwargs and len(args) == 1:
                weight = getattr(self, "weight", None) if recipe.weighted else None
                bias = getattr(self, "bias", None) if recipe.kind == "layer_norm" else None
                x = recipe.operand(self, args[0], weight, bias)
                if x is not None:
                    eps = recipe.eps_of(self)
                    y = recipe.run(x, weight, bias, eps)
                    if recomputed.is_active() and is_called_plainly(self, x, in_call=True):
                        recomputed.register(recipe.op(eps), (x, _kept(weight), _kept(bias)), (y,))
                    return y
            return original.forward(self, *args, **kwargs)

        return {"forward": functools.wraps(original.forward)(forward)}


def _kept(weight):
    """A weight as a recomputation reads it, before ZeRO-3 gathers it again in the norm's backward."""
    return weight.detach().clone() if hasattr(weight, "ds_id") else weight


def _autocast_widens(x):
    # is_autocast_enabled raises for meta.
    return x.dtype != torch.float32 and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def norm(module, kinds=("rms_norm", "layer_norm")):
    """A recipe of one of the kinds, a reason, or None for another module or kind."""
    cls = trials.original(module)
    if not any(word in cls.__name__ for word in _NAMES) or "Gated" in cls.__name__ or module._modules:
        return None
    tensors = {**module._parameters, **module._buffers}
    if not tensors.keys() <= {"weight", "bias"}:
        return None
    found = trials.remembered(lambda: _try(module, tensors), norm, cls, cls.forward, trials.settings(module))
    kind = found.kind if isinstance(found, NormRecipe) else _kind_by_name(cls)
    return found if kind in kinds else None


def _kind_by_name(cls):
    return "layer_norm" if "LayerNorm" in cls.__name__ else "rms_norm"


def _recipes(module, tensors):
    """The recipes to try, the specific ones after the common ones."""
    eps_name = next((n for n in EPS_NAMES if isinstance(getattr(module, n, ""), float | NoneType)), None)
    weighted = tensors.get("weight") is not None
    for eps in _LITERAL_EPS if eps_name is None else (eps_name,):
        if tensors.get("bias") is None:
            for offset, casting_mode in _RMS_KINDS if weighted else ():
                yield NormRecipe("rms_norm", eps, offset, casting_mode)
            for casting_mode in ("llama", "none"):
                yield NormRecipe("rms_norm", eps, 0.0, casting_mode, weighted=False)
        for offset in (0.0, 1.0) if weighted else (0.0,):
            yield NormRecipe("layer_norm", eps, offset, weighted=weighted)


def _try(module, tensors):
    if any(t is not None and t.dim() != 1 for t in tensors.values()):
        return "its weight is not a vector with one number per feature"
    shape = getattr(module, "normalized_shape", (0,))
    if len(shape) != 1:
        return "it normalises over several dimensions"
    width, random = 16, trials.Random()
    weight, bias = (None if tensors.get(n) is None else random(width) for n in ("weight", "bias"))

    def stand_in(dtype, weight=weight, bias=bias):
        given = {"weight": weight, "bias": bias}
        given = {n: None if given[n] is None else given[n].to(dtype) for n in tensors}
        if hasattr(module, "normalized_shape"):
            given["normalized_shape"] = (width,)
        return trials.stand_in(module, **given)

    recipes = list(_recipes(module, tensors))
    errors = {recipe: [] for recipe in recipes}

    def compare(recipe, x, expected):
        parameters = (t if t is None else t.to(x.dtype) for t in (weight, bias))
        actual = recipe.run(x, *parameters, recipe.eps_of(module))
        errors[recipe].append(trials.error(actual, expected))

    for dtype in (torch.float32, torch.bfloat16):
        x = random.of_all_scales(5, width).to(dtype)
        expected = trials.result_of(module, stand_in(dtype), x)
        if isinstance(expected, str):
            return expected
        for recipe in recipes:
            compare(recipe, x, expected)
        recipes = [recipe for recipe in recipes if max(errors[recipe]) <= 1]
    best = min(recipes, key=lambda recipe: sum(errors[recipe]), default=None)
    if best is None:
        return f"it does not compute a {_FORMULAS[_kind_by_name(trials.original(module))]} that liger has"
    for shape, dtype in itertools.product(((), (3, 5)), (torch.float32, torch.bfloat16)):
        x = random.of_all_scales(*shape, width).to(dtype)
        try:
            expected = trials.in_both_modes(stand_in(dtype), x)[0]
        except trials.ERRORS:
            continue  # The module does not take this number of dimensions, so the model never uses it.
        compare(best, x, expected)
    if max(errors[best]) > 1:
        return "it depends on the number of dimensions of its input"

    def ours(x, weight, bias):
        return best.run(x, weight, bias, best.eps_of(module))

    def theirs(x, weight, bias):
        module = stand_in(torch.float32, weight, bias)
        return type(module).forward(module, x)

    # A weight that the forward does not read has no gradient.
    inputs = (random.of_all_scales(5, width), weight, bias)
    if not trials.same_gradients(ours, theirs, *inputs):
        return trials.OTHER_GRADIENTS
    x = random.of_all_scales(5, width).to(torch.bfloat16)
    return dataclasses.replace(best, mixed=_mixed(best, stand_in(torch.float32), x))


def _mixed(recipe, stand_in, x):
    """``mixed`` of a recipe: what the module returns for an x of 16 bits and weights in float32."""
    if not recipe.weighted or isinstance(stand_in, nn.LayerNorm | nn.RMSNorm):
        return None
    try:
        expected = type(stand_in).forward(stand_in, x)
    except trials.ERRORS:
        return None
    mixed = "wide" if expected.dtype == torch.float32 else "narrow"
    given = x.float() if mixed == "wide" else x
    bias = getattr(stand_in, "bias", None)
    actual = recipe.run(given, stand_in.weight, bias, recipe.eps_of(stand_in))
    if actual.dtype != expected.dtype:
        return None
    # A module that returns float32 may have rounded to the dtype of x before.
    return mixed if trials.error(actual.to(x.dtype), expected.to(x.dtype)) <= 1 else None


_FORMULAS = {"rms_norm": "root-mean-square normalisation", "layer_norm": "layer normalisation"}
