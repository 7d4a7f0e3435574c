# SPDX-License-Identifier: BSD-3-Clause
"""Recognition of gated MLPs: first by their attributes, then by a trial.

A trial runs the forward of a module that looks like an MLP on a few random numbers, small and large ones, in
evaluation and in training. It uses a stand-in: an object of the same class without the parameters. A module
is patched only if the op that would replace it gives the same results and the same gradient of its input.
Each function returns a recipe, a string with the reason for leaving the module alone, or None for a module of
another kind. The same holds for the trials of other modules: norms/norm.py, norms/gated.py,
norms/residual_trial.py (decoder layers), mlp/activations.py, mlp/experts.py, attention/rotary.py,
attention/qk_norm_rope.py and head/causal_lm.py.
"""

import functools

from torch import nn

from ..recipe import trials
from .recipe import ACTIVATION_NAMES, MLPRecipe, TiledMLPRecipe

MLP_INPUTS = (("gate_proj", "up_proj"), ("gate_up_proj",))
# Activations of gated MLPs, in the order of trials.
SWIGLU_ACTIVATIONS = ("silu",)
GEGLU_ACTIVATIONS = ("gelu_tanh", "gelu")
TILED_ACTIVATIONS = SWIGLU_ACTIVATIONS + GEGLU_ACTIVATIONS


def mlp(module, activations, inplace, recompute=False, lora_linear=False):
    def recipes(inputs, act_name, dropouts):
        return [
            MLPRecipe(inputs, act_name, activation, inplace, recompute, dropouts, lora_linear)
            for activation in activations
        ]

    return _mlp(module, recipes, activations)


def mlp_to_tile(module, num_shards):
    def recipes(inputs, _, dropouts):
        return [TiledMLPRecipe(inputs, activation, num_shards, dropouts) for activation in TILED_ACTIVATIONS]

    return _mlp(module, recipes, TILED_ACTIVATIONS)


def _mlp(module, recipes, activations):
    act_name = next((name for name in ACTIVATION_NAMES if hasattr(module, name)), None)
    inputs = next((names for names in MLP_INPUTS if {*names, "down_proj"} <= module._modules.keys()), None)
    if act_name is None or inputs is None:
        return None
    random = trials.Random()
    x, width = random.of_all_scales(3, 16), 24 if len(inputs) == 1 else 12
    projections = {name: trials.Projection(random(width, 16)) for name in inputs}
    projections["down_proj"] = trials.Projection(random(16, 12))
    dropouts = tuple(name for name, child in module._modules.items() if isinstance(child, nn.Dropout))
    kept = {name: getattr(module, name) for name in (act_name, *dropouts)}
    stand_in = trials.stand_in(module, **projections, **kept)
    expected = trials.result_of(module, stand_in, x)
    if isinstance(expected, str):
        return expected
    for recipe in recipes(inputs, act_name, dropouts):
        if trials.error(recipe.run(stand_in, x), expected) <= 1:
            ours, theirs = functools.partial(recipe.run, stand_in), type(stand_in).forward.__get__(stand_in)
            return recipe if trials.same_gradients(ours, theirs, x) else trials.OTHER_GRADIENTS
    formula = " or ".join(dict.fromkeys(name.partition("_")[0] + "(gate)" for name in activations))
    return f"with {type(getattr(module, act_name)).__name__} it does not compute down({formula} * up)"
