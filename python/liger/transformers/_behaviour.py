"""Recognition of gated MLPs and causal language models: first by their attributes, then by a trial.

A trial runs the forward of a module that looks like an MLP or a causal language model (norms: _norms.py, activations:
_activations.py, attention: _rotary.py, decoder layers: _layers.py) on a few random numbers, small and large ones, in
evaluation and in training. It uses a stand-in: an object of the same class without the parameters. The module is
patched only if the op that would replace it gives the same results. Each function returns a recipe, a string with the
reason for leaving the module alone, or None for a module of another kind.
"""

import inspect
from dataclasses import dataclass

import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from . import _trials
from ._loss import CausalLMRecipe, linear_heads
from ._modules import MLPRecipe, TiledMLPRecipe
from ._trials import no_trial as _no_trial

MLP_INPUTS = (("gate_proj", "up_proj"), ("gate_up_proj",))
# Activations of gated MLPs, in the order of trials.
SWIGLU_ACTIVATIONS = ("silu",)
GEGLU_ACTIVATIONS = ("gelu_tanh", "gelu")
TILED_ACTIVATIONS = SWIGLU_ACTIVATIONS + GEGLU_ACTIVATIONS
ACTIVATION_NAMES = ("act_fn", "activation_fn")
SOFTCAP_NAME = "final_logit_softcapping"


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
        expected, training = _trials.in_both_modes(stand_in, x)
    except _trials.ERRORS as error:
        return _no_trial(module, error)
    if not torch.equal(expected, training):
        return _trials.IN_TRAINING
    for recipe in recipes(inputs, act_name):
        if _trials.error(recipe.run(stand_in, x), expected) <= 1:
            return recipe
    formula = " or ".join(dict.fromkeys(name.partition("_")[0] + "(gate)" for name in activations))
    return f"with {type(getattr(module, act_name)).__name__} it does not compute down({formula} * up)"


def causal_lm(module, fused):
    """A recipe for the model, a reason, or None. ``fused``: the lm_head computes the loss."""
    if not isinstance(module, PreTrainedModel):
        return None
    # transformers uses the causal loss for every class name that it does not know.
    if LOSS_MAPPING.get(module.loss_type, ForCausalLMLoss) is not ForCausalLMLoss:
        return None
    head = module.get_output_embeddings()
    if head is None or "labels" not in inspect.signature(_trials.original(module).forward).parameters:
        return None
    if getattr(module, "_loss_function", None) is not None:
        return "it has a loss function of its own"
    name = next((name for name, child in module.named_children() if child is head), None)
    if name is None:
        return "its head is not a direct submodule"
    if not fused:
        return CausalLMRecipe(name, fused=False)
    linears = linear_heads(head)
    if not linears or any(_trials.original(linear).forward is not nn.Linear.forward for linear in linears):
        kind = f"{type(head).__module__}.{type(head).__qualname__}"
        return f"its head is a {kind}, not a plain linear layer: the loss is computed from full logits"
    return _try_causal_lm(module, name)


@dataclass
class _BackboneOutput(MoeModelOutputWithPast):
    """The output of a stand-in for the backbone; every other attribute is None."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _try_causal_lm(module, head_name):
    """Runs the forward of the model with stand-ins for backbone and head, and records the arguments of its loss."""
    random, recorded = _trials.Random(), []
    hidden, weight = random.of_all_scales(4, 16), random(20, 16)

    def loss_function(logits, labels, *_, **__):
        recorded.append(logits)
        return logits.new_zeros(())

    attributes = {
        module.base_model_prefix: lambda *_, **__: _BackboneOutput(last_hidden_state=hidden),
        head_name: lambda x: nn.functional.linear(x, weight),
        "_loss_function": loss_function,
    }
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device="cpu")
    try:
        for training in (False, True):
            stand_in = _trials.stand_in(module, **attributes, training=training)
            type(stand_in).forward(stand_in, input_ids=tokens, labels=tokens)
    except _trials.ERRORS as error:
        return _no_trial(module, error)
    logits, softcap = hidden @ weight.T, getattr(module.config, SOFTCAP_NAME, None)
    if len(recorded) == 2 and all(given.shape == logits.shape for given in recorded):
        if _all_close(recorded, logits):
            return CausalLMRecipe(head_name, fused=True)
        if softcap is not None and _all_close(recorded, softcap * torch.tanh(logits / softcap)):
            return CausalLMRecipe(head_name, fused=True, softcap=float(softcap))
    return "between head and loss it changes the logits, or it does not use its loss function"


def _all_close(results, expected):
    return all(_trials.error(result, expected) <= 1 for result in results)
