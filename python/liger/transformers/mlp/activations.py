# SPDX-License-Identifier: BSD-3-Clause
"""Activations that are modules: squared ReLU, and GELU where its code has several operations.

torch computes its own GELU in one kernel that saves its input only, so modules that call it are left alone.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...ops.gated import GELU_NAMES
from ...ops.relu_squared import relu_squared
from ..recipe import trials

# Variant of an activation -> (option of patch, function).
_FUNCTIONS: dict[str, tuple[str, Any]] = {
    "relu_squared": ("relu_squared", relu_squared),
    **{
        name: ("gelu", functools.partial(nn.functional.gelu, approximate=approximate))
        for approximate, name in GELU_NAMES.items()
    },
}


@dataclass(frozen=True)
class ActivationRecipe:
    variant: str

    @property
    def kind(self):
        return _FUNCTIONS[self.variant][0]

    def members(self, original):
        _, function = _FUNCTIONS[self.variant]

        def forward(self, *args, **kwargs):
            if kwargs or len(args) != 1 or args[0].dtype not in trials.DTYPES or args[0].dim() == 0:
                return original.forward(self, *args, **kwargs)
            return function(args[0])

        return {"forward": functools.wraps(original.forward)(forward)}


def activation(module, kinds):
    """A recipe, a reason, or None for a module that is no such activation by its name."""
    cls = trials.original(module)
    kind = _kind_by_name(cls)
    if kind not in kinds or module._modules or calls_one_kernel(module):
        return None
    if module._parameters or module._buffers:
        return "it has parameters"
    variants = [variant for variant, (k, _) in _FUNCTIONS.items() if k == kind]
    key = (activation, cls, cls.forward, trials.settings(module))
    return trials.remembered(lambda: _try(module, variants), *key)


def _kind_by_name(cls):
    name = cls.__name__.lower()
    if "relu" in name and ("squared" in name or name.endswith("2")):
        return "relu_squared"
    # QuickGELU is another formula.
    return "gelu" if "gelu" in name and "quick" not in name and "clip" not in name else None


def calls_one_kernel(module):
    """True if a module is a GELU of torch, or an activation of transformers that calls it."""
    act = getattr(module, "act", None)
    return (
        isinstance(module, nn.GELU)
        or act is nn.functional.gelu
        or (isinstance(act, functools.partial) and act.func is nn.functional.gelu)
    )


def _try(module, variants):
    random = trials.Random()
    for shape in ((5, 16), (16,), (3, 5, 16)):
        for dtype in (torch.float32, torch.bfloat16):
            x = random.of_all_scales(*shape).to(dtype)
            expected = trials.result_of(module, trials.stand_in(module), x)
            if isinstance(expected, str):
                return expected
            variants = [v for v in variants if trials.error(_FUNCTIONS[v][1](x), expected) <= 1]
    if not variants:
        return "it does not compute the formula that its name promises"
    theirs = trials.stand_in(module)
    if not trials.same_gradients(_FUNCTIONS[variants[0]][1], type(theirs).forward.__get__(theirs), x.float()):
        return trials.OTHER_GRADIENTS
    return ActivationRecipe(variants[0])
