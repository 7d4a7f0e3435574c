"""What can be patched: modules are recognised by how they look and trusted only after they have been tried.

A module that looks like a norm, an MLP, an attention or a causal language model is run once on a few random numbers, as
a stand-in of the same class without its parameters, beside the op that would replace its code. Only if the results
agree is it patched. Each function here returns a recipe, a reason in words why a module that looks right is left alone,
or None for a module that does not look like one.
"""

import inspect

import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from ..ops.rope import rope
from ._loss import CausalLMRecipe, linear_heads
from ._modules import ROPE_NAME, MLPRecipe, NormRecipe, RopeRecipe, TiledMLPRecipe
from ._rename import rename_global, uses_global

EPS_NAMES = ("variance_epsilon", "eps")
# (offset, casting_mode): Llama and its kin, Gemma, norms without casts.
NORM_KINDS = ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma"), (1.0, "llama"), (0.0, "none"))
MLP_INPUTS = (("gate_proj", "up_proj"), ("gate_up_proj",))
# Of gated MLPs, in the order in which they are tried.
SWIGLU_ACTIVATIONS = ("silu",)
GEGLU_ACTIVATIONS = ("gelu_tanh", "gelu")
TILED_ACTIVATIONS = SWIGLU_ACTIVATIONS + GEGLU_ACTIVATIONS
ACTIVATION_NAMES = ("act_fn", "activation_fn")
SOFTCAP_NAME = "final_logit_softcapping"

# What code of a model may raise when it runs on a stand-in.
_TRIAL_ERRORS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def norm(module):
    eps_name = next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    if (
        not type(module).__name__.endswith("RMSNorm")
        or list(module._parameters) != ["weight"]
        or eps_name is None
    ):
        return None
    recipes = [NormRecipe(eps_name, offset, casting_mode) for offset, casting_mode in NORM_KINDS]
    errors, random = dict.fromkeys(recipes, 0.0), _Random()
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = random(3, 5, 16).to(dtype), random(16).to(dtype)
        stand_in = _stand_in(module, weight=weight)
        try:
            expected = _original(module).forward(stand_in, x)
        except _TRIAL_ERRORS as error:
            return _no_trial(error)
        for recipe in recipes:
            errors[recipe] += _error(recipe.run(x, weight, getattr(module, eps_name)), expected)
    best = min(recipes, key=errors.get)
    if errors[best] <= 1:
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
    random = _Random()
    x, width = random(3, 16), 24 if len(inputs) == 1 else 12
    projections = {name: _Projection(random(width, 16)) for name in inputs}
    projections["down_proj"] = _Projection(random(16, 12))
    stand_in = _stand_in(module, **projections, **{act_name: getattr(module, act_name)})
    try:
        expected = _original(module).forward(stand_in, x)
    except _TRIAL_ERRORS as error:
        return _no_trial(error)
    for recipe in recipes(inputs, act_name):
        if _error(recipe.run(stand_in, x), expected) <= 1:
            return recipe
    formula = " or ".join(dict.fromkeys(name.partition("_")[0] + "(gate)" for name in activations))
    return f"with {type(getattr(module, act_name)).__name__} it does not compute down({formula} * up)"


def attention(module):
    forward = _original(module).forward
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
        except _TRIAL_ERRORS as error:
            return _no_trial(error)
    return f"its {ROPE_NAME} is not the rotation that liger.rope computes"


def _rotates(apply_rotary_pos_emb, interleaved):
    """Whether the function rotates pairs of neighbours (``interleaved``) or of halves, as liger.rope does."""
    random = _Random()
    q, k = random(2, 4, 3, 8), random(2, 2, 3, 8)
    for rotary_dim in (8, 4):
        angles = random(2, 3, rotary_dim // 2)
        angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        try:
            expected = apply_rotary_pos_emb(q, k, cos, sin)
        except RuntimeError:
            # It has no partial rotation, so it will never be asked for one.
            if rotary_dim == 8:
                raise
            continue
        if max(map(_error, rope(q, k, cos, sin, interleaved=interleaved), expected)) > 1:
            return False
    return True


def causal_lm(module, fused):
    """A recipe for the model and the linear layers of its head, a reason, or None."""
    if not isinstance(module, PreTrainedModel):
        return None
    # transformers takes the causal loss for any class whose name tells it nothing.
    if LOSS_MAPPING.get(module.loss_type, ForCausalLMLoss) is not ForCausalLMLoss:
        return None
    head = module.get_output_embeddings()
    if head is None or "labels" not in inspect.signature(_original(module).forward).parameters:
        return None
    if getattr(module, "_loss_function", None) is not None:
        return "it has a loss function of its own"
    name = next((name for name, child in module.named_children() if child is head), None)
    if name is None:
        return "its head is not a direct submodule"
    if not fused:
        return CausalLMRecipe(name, fused=False)
    linears = linear_heads(head)
    if not linears or any(_original(linear).forward is not nn.Linear.forward for linear in linears):
        kind = f"{type(head).__module__}.{type(head).__qualname__}"
        return f"its head is a {kind}, not a plain linear layer: the loss is computed from full logits"
    return _try_causal_lm(module, name)


def _try_causal_lm(module, head_name):
    """Runs the model's own forward between a made-up backbone and head, and watches what reaches its loss function."""
    random, seen = _Random(), []
    hidden, weight = random(1, 4, 16), random(20, 16)

    def loss_function(logits, labels, *_, **__):
        seen.append(logits)
        return logits.new_zeros(())

    attributes = {
        module.base_model_prefix: lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden),
        head_name: lambda x: nn.functional.linear(x, weight),
        "_loss_function": loss_function,
    }
    tokens = torch.zeros(1, 4, dtype=torch.int64, device="cpu")
    try:
        _original(module).forward(_stand_in(module, **attributes), input_ids=tokens, labels=tokens)
    except _TRIAL_ERRORS as error:
        return _no_trial(error)
    logits, softcap = hidden @ weight.T, getattr(module.config, SOFTCAP_NAME, None)
    if len(seen) == 1 and seen[0].shape == logits.shape:
        if _error(seen[0], logits) <= 1:
            return CausalLMRecipe(head_name, fused=True)
        if softcap is not None and _error(seen[0], softcap * torch.tanh(logits / softcap)) <= 1:
            return CausalLMRecipe(head_name, fused=True, softcap=float(softcap))
    return "between head and loss it changes the logits, or it does not use its loss function"


# --- trials -------------------------------------------------------------------------------------------------------


class _Projection:
    """What a linear layer looks like to the code of an MLP."""

    _forward_hooks = ()
    bias = None

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return nn.functional.linear(x, self.weight)


def _original(module):
    cls = type(module)
    return getattr(cls, "_liger_original", cls)


def _stand_in(module, **attributes):
    """An object of the module's class with its settings, but with none of its tensors and submodules.

    Made without calling any constructor: those are intercepted while ZeRO-3 partitions parameters.
    """
    stand_in = object.__new__(_original(module))
    stand_in.__dict__.update(module.__dict__)
    stand_in.__dict__.update(_parameters={}, _buffers={}, _modules={}, training=False)
    stand_in.__dict__.update(attributes)
    return stand_in


class _Random:
    """The same numbers in every trial, and none taken from the global generator."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")


def _error(actual, expected):
    """The largest error in units of four roundings of the dtype; infinite where even shape or dtype differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    scale = expected.float().abs().max() * torch.finfo(expected.dtype).eps * 4
    return ((actual.float() - expected.float()).abs().max() / scale).item()


def _no_trial(error):
    return f"it could not be tried: {type(error).__name__}: {error}"
