# SPDX-License-Identifier: BSD-3-Clause
"""RMS norms with a gate: the forward of a patched class, and the trial that finds it."""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..._core.dtensor.inputs import is_dtensor
from ...ops.rms_norm_gated import rms_norm_gated
from ..recipe import trials
from .norm import EPS_NAMES

# Attributes with the size of a group of features, and with the number of groups.
_GROUP_SIZE, _GROUP_COUNT = "group_size", "n_groups"


@dataclass(frozen=True)
class GatedNormRecipe:
    """``group``: the attribute with the size or the number of groups; None for norms of whole rows.

    narrow: whether x and gate of 16 bits with a weight in float32, as under autocast, give the dtype of x.
    """

    eps_name: str
    offset: float
    casting_mode: str
    norm_before_gate: bool
    activation: str
    group: str | None
    narrow: bool = False
    kind: ClassVar[str] = "rms_norm_gated"

    def run(self, module, x, gate, weight):
        size = None if self.group is None else getattr(module, self.group)
        if self.group == _GROUP_COUNT:
            size = x.shape[-1] // size
        gating = size, self.norm_before_gate, self.activation
        eps = getattr(module, self.eps_name)
        return rms_norm_gated(x, gate, weight, eps, self.offset, self.casting_mode, *gating)

    def takes(self, x, gate, weight):
        if not isinstance(gate, torch.Tensor) or gate.shape != x.shape or x.dtype not in trials.DTYPES:
            return False
        dtypes = (x.dtype, torch.float32) if self.narrow else (x.dtype,)
        same = gate.dtype == x.dtype and weight.dtype in dtypes
        return same and all(is_dtensor(t) == is_dtensor(x) for t in (gate, weight))

    def members(self, original):
        recipe = self

        def forward(self, *args, **kwargs):
            gate = args[1] if len(args) == 2 else kwargs.get("gate")
            if (
                1 <= len(args) <= 2
                and len(args) + len(kwargs) == 2
                and recipe.takes(args[0], gate, self.weight)
            ):
                return recipe.run(self, args[0], gate, self.weight)
            return original.forward(self, *args, **kwargs)

        return {"forward": functools.wraps(original.forward)(forward)}


def gated_norm(module):
    """A recipe, a reason, or None for a module that is no RMS norm with a gate by its name."""
    cls = trials.original(module)
    if "RMSNorm" not in cls.__name__ or "Gated" not in cls.__name__ or module._modules:
        return None
    eps_name = next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    if eps_name is None or [*module._parameters, *module._buffers] != ["weight"]:
        return None
    key = (gated_norm, cls, cls.forward, trials.settings(module))
    return trials.remembered(lambda: _try(module, eps_name), *key)


def _try(module, eps_name):
    sizes = {name: getattr(module, name, None) for name in (_GROUP_SIZE, _GROUP_COUNT)}
    groups = [name for name, value in sizes.items() if isinstance(value, int)]
    width = 16
    if _GROUP_SIZE in groups:
        width = 2 * sizes[_GROUP_SIZE]
    elif _GROUP_COUNT in groups:
        width = 8 * sizes[_GROUP_COUNT]
    recipes = [
        GatedNormRecipe(eps_name, *values)
        for values in itertools.product(
            (0.0, 1.0), ("llama", "gemma", "none"), (True, False), ("silu", "sigmoid"), (None, *groups)
        )
    ]
    random = trials.Random()
    weight, errors = random(width), {recipe: [] for recipe in recipes}
    for shape, dtype in itertools.product(((5,), (), (3, 5)), (torch.float32, torch.bfloat16)):
        # Scales of the gate in the opposite order: products of all sizes.
        x, gate = random.of_all_scales(*shape, width), random.of_all_scales(*shape, width).flip(0)
        for g in (3 * random(*gate.shape), gate):
            given = x.to(dtype), g.to(dtype)
            stand_in = trials.stand_in(module, weight=weight.to(dtype))
            try:
                expected = trials.one_tensor(*trials.in_both_modes(stand_in, *given))
            except trials.ERRORS as error:
                if shape == (5,):
                    return trials.no_trial(module, error)
                continue  # The module does not take this number of dimensions, so the model never uses it.
            if isinstance(expected, str):
                return expected
            for recipe in recipes:
                actual = recipe.run(module, *given, weight.to(dtype))
                errors[recipe].append(trials.error(actual, expected))
            recipes = [recipe for recipe in recipes if max(errors[recipe]) <= 1]
    best = min(recipes, key=lambda recipe: sum(errors[recipe]), default=None)
    if best is None:
        return "it does not compute an RMS norm with a gate that liger has"

    def ours(x, gate, weight):
        return best.run(module, x, gate, weight)

    def theirs(x, gate, weight):
        stand_in = trials.stand_in(module, weight=weight)
        return type(stand_in).forward(stand_in, x, gate)

    inputs = random.of_all_scales(5, width), random(len(trials.SCALES), 5, width), weight
    if not trials.same_gradients(ours, theirs, *inputs):
        return trials.OTHER_GRADIENTS
    x, gate = (t.to(torch.bfloat16) for t in inputs[:2])
    try:
        expected = theirs(x, gate, weight)
    except trials.ERRORS:
        return best
    return dataclasses.replace(best, narrow=trials.error(ours(x, gate, weight), expected) <= 1)
