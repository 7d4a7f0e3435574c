"""Recognition of modules that can be patched: first by their attributes, then by a trial.

A trial runs the forward of a module that looks like a norm, an MLP, an attention or a causal language model on a few
random numbers, small and large ones, in evaluation and in training. It uses a stand-in: an object of the same class
without the parameters. The module is patched only if the op that would replace it gives the same results. Each function
returns a recipe, a string with the reason for leaving the module alone, or None for a module of another kind.
"""

import inspect
import logging

import torch
from torch import nn

from . import _trials
from ._modules import ROPE_NAME, MLPRecipe, NormRecipe, RopeRecipe, TiledMLPRecipe, rotary_function
from ._rename import globals_used, rename_global, uses_global

logger = logging.getLogger("liger.transformers")

EPS_NAMES = ("variance_epsilon", "eps")
# (offset, casting_mode) in the order of trials: Llama and similar models, Gemma, variants, norms without casts.
NORM_KINDS = ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma"), (1.0, "llama"), (0.0, "none"))
MLP_INPUTS = (("gate_proj", "up_proj"), ("gate_up_proj",))
# Activations of gated MLPs, in the order of trials.
SWIGLU_ACTIVATIONS = ("silu",)
GEGLU_ACTIVATIONS = ("gelu_tanh", "gelu")
TILED_ACTIVATIONS = SWIGLU_ACTIVATIONS + GEGLU_ACTIVATIONS
ACTIVATION_NAMES = ("act_fn", "activation_fn")

IN_TRAINING = "in training it computes something else than in evaluation, by dropout for example"


def norm(module):
    eps_name = next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    if (
        not type(module).__name__.endswith("RMSNorm")
        or list(module._parameters) != ["weight"]
        or eps_name is None
    ):
        return None
    recipes = [NormRecipe(eps_name, offset, casting_mode) for offset, casting_mode in NORM_KINDS]
    errors, random = {recipe: [] for recipe in recipes}, _trials.Random()
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = random.of_all_scales(5, 16).to(dtype), random(16).to(dtype)
        stand_in = _trials.stand_in(module, weight=weight)
        try:
            expected, training = _in_both_modes(stand_in, x)
        except _trials.ERRORS as error:
            return _no_trial(module, error)
        if not torch.equal(expected, training):
            return IN_TRAINING
        for recipe in recipes:
            actual = recipe.run(x, weight, getattr(module, eps_name))
            errors[recipe].append(_trials.error(actual, expected))
    best = min(recipes, key=lambda recipe: sum(errors[recipe]))
    if max(errors[best]) <= 1:
        return best
    return "it does not compute a root-mean-square normalisation that liger has"


def mlp(module, activations, inplace):
    def recipes(inputs, act_name):
        return [MLPRecipe(inputs, act_name, activation, inplace) for activation in activations]

    return _mlp(module, recipes, activations)


def mlp_to_tile(module, num_shards):
    def recipes(inputs, _):
        return [TiledMLPRecipe(inputs, activation, num_shards) for activation in TILED_ACTIVATIONS]

    return _mlp(module, recipes, TILED_ACTIVATIONS)


def _mlp(module, recipes, activations):
    act_name = next((name for name in ACTIVATION_NAMES if hasattr(module, name)), None)
    inputs = next((names for names in MLP_INPUTS if {*names, "down_proj"} <= module._modules.keys()), None)
    if act_name is None or inputs is None:
        return None
    random = _trials.Random()
    x, width = random.of_all_scales(3, 16), 24 if len(inputs) == 1 else 12
    projections = {name: _trials.Projection(random(width, 16)) for name in inputs}
    projections["down_proj"] = _trials.Projection(random(16, 12))
    stand_in = _trials.stand_in(module, **projections, **{act_name: getattr(module, act_name)})
    try:
        expected, training = _in_both_modes(stand_in, x)
    except _trials.ERRORS as error:
        return _no_trial(module, error)
    if not torch.equal(expected, training):
        return IN_TRAINING
    for recipe in recipes(inputs, act_name):
        if _trials.error(recipe.run(stand_in, x), expected) <= 1:
            return recipe
    formula = " or ".join(dict.fromkeys(name.partition("_")[0] + "(gate)" for name in activations))
    return f"with {type(getattr(module, act_name)).__name__} it does not compute down({formula} * up)"


def attention(module):
    forward = _trials.original(module).forward
    if not inspect.isfunction(forward):
        return None
    namespace = uses_global(forward, ROPE_NAME)
    if namespace is None or ROPE_NAME not in namespace:
        return None
    try:
        rename_global(forward, ROPE_NAME, ROPE_NAME)
    except ValueError as error:
        return str(error)
    for interleaved in (False, True):
        try:
            if _rotates(namespace[ROPE_NAME], interleaved):
                return RopeRecipe(interleaved)
        except _trials.ERRORS as error:
            return _no_trial(module, error)
    return f"its {ROPE_NAME} is not the rotation that liger.rope computes"


def _rotates(apply_rotary_pos_emb, interleaved):
    """Whether the function gives the results of liger.rope with this value of ``interleaved``."""
    random, ours = _trials.Random(), rotary_function(apply_rotary_pos_emb, interleaved)
    scales = len(_trials.SCALES)
    q, k = random.of_all_scales(4, 3, 8), random.of_all_scales(2, 3, 8)
    heads_last = q.transpose(1, 2), k.transpose(1, 2)
    for rotary_dim in (8, 4):
        # Independent random cos and sin: attention scaling may be part of either.
        half = random(2, scales, 3, rotary_dim // 2)
        cos, sin = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
        for variant, (tensors, rows, options) in enumerate(
            (
                ((q, k), slice(None), {}),
                (heads_last, slice(None), {"unsqueeze_dim": 2}),
                ((q, k), 0, {"unsqueeze_dim": 0}),
                (heads_last, 0, {"unsqueeze_dim": 1}),
            )
        ):
            try:
                expected = apply_rotary_pos_emb(*tensors, cos[rows], sin[rows], **options)
            except (RuntimeError, TypeError):
                # The function supports neither partial rotation nor this layout, so the model never uses it.
                if variant == 0 and rotary_dim == 8:
                    raise
                continue
            if max(map(_trials.error, ours(*tensors, cos[rows], sin[rows], **options), expected)) > 1:
                return False
    return True


# --- modules without a trial ------------------------------------------------------------------------------------------


def not_looked_at(module):
    """A description of a computation that liger has a similar op for but patching does not replace; None for others.

    Called for modules that are neither patched nor left for a reason.
    """
    name = _trials.original(module).__name__
    if name.endswith("Experts"):
        return "experts"
    if isinstance(module, nn.LayerNorm) or name.endswith("LayerNorm"):
        return "layer norm"
    if isinstance(module, nn.RMSNorm) or name.endswith("RMSNorm"):
        return "RMS norm of another form"
    forward = _trials.original(module).forward
    if inspect.isfunction(forward):
        rotary = sorted(
            n for n in globals_used(forward) if n.startswith("apply_") and ("rot" in n or "rope" in n)
        )
        if rotary:
            return f"rotary embedding ({', '.join(rotary)})"
    return None


# --- trials -------------------------------------------------------------------------------------------------------


def _in_both_modes(stand_in, x):
    """(output in evaluation, output in training) of the module's own forward."""
    return type(stand_in).forward(stand_in, x), type(stand_in).forward(_trials.in_training(stand_in), x)


def _no_trial(module, error):
    # The error message is about the stand-in, not about the model, so it is logged only.
    logger.debug("liger: no trial of a %s: %s: %s", type(module).__name__, type(error).__name__, error)
    return "its forward needs more than a trial can give it, so that nothing is known of what it computes"
