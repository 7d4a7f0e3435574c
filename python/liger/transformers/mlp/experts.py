# SPDX-License-Identifier: BSD-3-Clause
"""The experts of a mixture of experts: recognition by trial, the recipe, and
``experts_implementation="liger"``.

transformers stores the experts of a layer as two parameters, gate_up_proj and down_proj, of three dimensions.
A trial tells what the module computes from them; router and losses of the router are not part of it. 4-bit
weights of bitsandbytes (``replace_parameter_4bit``) and quantised weights of torchao are frozen: each use
makes a dense copy of one weight.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import math
from typing import ClassVar

import torch
from torch.nn.utils import parametrize

from ..._core.dtensor.inputs import is_dtensor
from ..._core.modules.quantised import is_quantised
from ...ops.grouped_experts.op import grouped_experts
from ..lora import expert_weights
from ..lora.base_weight import dense, state_of_parameter, stored, why_not_dense_experts
from ..lora.expert_weights import WEIGHTS
from ..recipe import trials
from ..recipe.classes import is_hooked
from .recipe import HOOKED

BIASES = ("gate_up_proj_bias", "down_proj_bias")
ALPHA_NAMES = ("alpha", "swiglu_alpha")
LIMIT_NAMES = ("limit", "swiglu_limit")
COUNT_NAMES = ("num_experts", "num_local_experts")
# Implementations that transformers chooses itself; any other value was set by the user.
DEFAULTS = (None, "eager", "grouped_mm", "batched_mm", "liger")
IMPLEMENTATION = "_experts_implementation"
_RECIPE = "_liger_experts"
QUANTISED = "its parameters were quantised after liger.patch, which has to be called again"


@dataclasses.dataclass(frozen=True)
class ExpertsRecipe:
    """``liger.grouped_experts`` with the options that the trial has found."""

    activation: str
    is_transposed: bool
    is_interleaved: bool
    has_bias: bool
    alpha: float
    limit: float | None
    # True if weights are tensor subclasses whose dense copies may take their place.
    has_dense: bool = False
    kind: ClassVar[str] = "experts"

    @property
    def names(self):
        return WEIGHTS + BIASES if self.has_bias else WEIGHTS

    def parameters(self, module):
        """(parameters as they are stored, quantisation state of each or None)"""
        return tuple(zip(*[stored(module, name) for name in self.names], strict=True))

    def run(self, hidden_states, top_k_index, top_k_weights, *parameters):
        y = grouped_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            *parameters,
            activation=self.activation,
            is_transposed=self.is_transposed,
            is_interleaved=self.is_interleaved,
            alpha=self.alpha,
            limit=self.limit,
        )
        # Under autocast the original also returns the dtype of its input.
        return y.to(hidden_states.dtype)

    def apply(self, parameters, states, wrappers, *tensors):
        """:meth:`run`, also with adapters and quantised weights; None if the code of the model must run."""
        if not wrappers and states.count(None) == len(states) and not any(map(is_quantised, parameters)):
            return self.run(*tensors, *parameters)
        if expert_weights.takes(tensors[0], parameters, wrappers):
            return expert_weights.run(self, parameters, states, wrappers, *tensors)
        return None

    def unused_because(self, module):
        """Why each call reaches the original forward although the module is patched; None if it does not."""
        if not self._reads(self.parameters(module)[0]):
            return QUANTISED
        return HOOKED if is_hooked(getattr(module, "act_fn", None)) else None

    def _reads(self, parameters):
        """True if at most the weights are quantised, in the way that the trial has seen."""
        return not any(map(is_quantised, parameters[len(WEIGHTS) if self.has_dense else 0 :]))

    def takes(self, module, parameters, states, hidden_states, top_k_index):
        """True if the op takes these: one dtype, ordinary tensors or dense copies, all DTensors or none."""
        device = hidden_states.device.type
        dtypes = {p.dtype if s is None else s.dtype for p, s in zip(parameters, states, strict=True)}
        return (
            device in ("cpu", "cuda", "meta")
            and not is_hooked(getattr(module, "act_fn", None))
            and (dtypes == {hidden_states.dtype} or torch.is_autocast_enabled(device))
            and self._reads(parameters)
            and top_k_index.dim() == hidden_states.dim()
            and all(is_dtensor(t) == is_dtensor(hidden_states) for t in (*parameters, top_k_index))
        )

    def members(self, original):
        recipe, names = self, _argument_names(original)

        def forward(self, *args, **kwargs):
            given, wrappers = dict(zip(names, args, strict=False)) | kwargs, expert_weights.wrappers_of(self)
            if len(args) <= len(names) and given.keys() == set(names):
                tensors = [given[name] for name in names]
                parameters, states = recipe.parameters(self)
                if recipe.takes(self, parameters, states, *tensors[:2]):
                    y = recipe.apply(parameters, states, wrappers or {}, *tensors)
                    if y is not None:
                        return y
            with expert_weights.summed(self, wrappers) if wrappers else contextlib.nullcontext():
                return original.forward(self, *args, **kwargs)

        return {"forward": functools.wraps(original.forward)(forward)}


def _argument_names(cls):
    """The names of hidden states, expert indices and routing weights in the forward."""
    return list(inspect.signature(cls.forward).parameters)[1:]


# --- recognition --------------------------------------------------------------------------------------------


def experts(module, activations):
    """A recipe, a string with the reason for leaving the module alone, or None for a module of another kind.

    ``activations``: the names of the activations to patch; ``"gpt_oss"`` goes with ``"silu"``.
    """
    packed = {name for name in WEIGHTS if state_of_parameter(module, name) is not None}
    names = packed.union(module._parameters)
    if not names.issuperset(WEIGHTS) or len(_argument_names(trials.original(module))) != 3:
        return None
    known = {"act_fn", "parametrizations"} if packed else {"act_fn"}
    if (
        not names.issubset(WEIGHTS + BIASES)
        or len(names.intersection(BIASES)) == 1
        or module._modules.keys() - known
    ):
        return "its experts have other parameters than two projections with or without biases"
    quantised = {name for name, p in module._parameters.items() if is_quantised(p)}
    if quantised.intersection(BIASES):
        return "its biases are quantised"
    for name in quantised:
        if (reason := why_not_dense_experts(module._parameters[name])) is not None:
            return reason
    implementation = getattr(getattr(module, "config", None), IMPLEMENTATION, None)
    if implementation not in DEFAULTS:
        return f"its experts_implementation is {implementation!r}"
    is_transposed = _layout(module)
    if is_transposed is None:
        return "its projections do not have the shapes of gated experts"
    found = _try_experts(_without_parametrizations(module), is_transposed, len(names) == 4)
    if isinstance(found, ExpertsRecipe):
        found = dataclasses.replace(found, has_dense=bool(quantised))
        activation = "silu" if found.activation == "gpt_oss" else found.activation
        return found if activation in activations else None
    return found


def _layout(module):
    """True if the weights are transposed, (E, inputs, outputs); None if they fit neither layout."""
    states = [state_of_parameter(module, name) for name in WEIGHTS]
    given = [s or module._parameters[name] for name, s in zip(WEIGHTS, states, strict=True)]
    # Under ZeRO-3 a parameter is empty, and its shape is an attribute.
    shapes = [tuple(getattr(p, "ds_shape", p.shape)) for p in given]
    if any(len(shape) != 3 for shape in shapes):
        return None
    (_, *first), (_, *second) = shapes
    for is_transposed, (outputs, inputs) in ((False, first), (True, first[::-1])):
        hidden, intermediate = second[::-1] if is_transposed else second
        if (outputs, inputs) == (2 * intermediate, hidden):
            return is_transposed
    return None


def _without_parametrizations(module):
    """The module with the class that it had before, whose parameters a stand-in may set."""
    twin = object.__new__(parametrize.type_before_parametrizations(module))
    twin.__dict__.update(module.__dict__)
    return twin


def _first_number(module, names):
    values = (getattr(module, name, None) for name in names)
    return next((float(v) for v in values if isinstance(v, (int, float)) and 0 < v < math.inf), None)


def _try_experts(module, is_transposed, has_bias):
    """Runs the eager forward of the module on random tokens, and compares every form of the op."""
    random, tokens, choices, count, hidden, intermediate = trials.Random(), 6, 2, 4, 16, 12
    x = random.of_all_scales(tokens, hidden).flatten(0, 1)
    # Every token has two different experts, one expert has no token.
    row = torch.arange(len(x), device="cpu")
    index = torch.stack((row % (count - 1), (row + 1 + row // 5 % 2) % (count - 1)), 1)
    weights = random(len(x), choices)
    shapes = {"gate_up_proj": (2 * intermediate, hidden), "down_proj": (hidden, intermediate)}
    parameters = {
        name: random(count, *(shape[::-1] if is_transposed else shape)) for name, shape in shapes.items()
    }
    if has_bias:
        parameters |= {BIASES[0]: random(count, 2 * intermediate), BIASES[1]: random(count, hidden)}
    stand_in = trials.stand_in(module, **parameters, **_own_attributes(module, count, hidden, intermediate))
    expected = trials.result_of(module, stand_in, x, index, weights)
    if isinstance(expected, str):
        return expected

    def by_scale(y):
        return y.reshape(len(trials.SCALES), -1)

    def function(run):
        # All gradients of a token by scale, as same_gradients expects of its first input.
        return lambda x, weights: run(x.flatten(0, 1), index, weights)

    def with_parameters(recipe):
        return lambda *tensors: recipe.run(*tensors, *parameters.values())

    for recipe in _recipes(module, is_transposed, has_bias):
        run = with_parameters(recipe)
        y = run(x, index, weights)
        if trials.error(by_scale(y), by_scale(expected)) <= 1:
            ours = function(run)
            theirs = function(type(stand_in).forward.__get__(stand_in))
            same = trials.same_gradients(ours, theirs, x.unflatten(0, (len(trials.SCALES), -1)), weights)
            return recipe if same else trials.OTHER_GRADIENTS
    return "its experts do not compute down(activation(gate) * up) with an activation that liger has"


def _recipes(module, is_transposed, has_bias):
    alpha, limit = _first_number(module, ALPHA_NAMES), _first_number(module, LIMIT_NAMES)
    activations = ("silu", "gelu_tanh", "gelu") if alpha is None else ("gpt_oss", "silu", "gelu_tanh", "gelu")
    limits = (None,) if limit is None else (limit, None)
    for activation, is_interleaved, bound in itertools.product(activations, (False, True), limits):
        yield ExpertsRecipe(activation, is_transposed, is_interleaved, has_bias, alpha or 1.0, bound)


def _own_attributes(module, count, hidden, intermediate):
    """The attributes of a stand-in that describe its sizes, its activation, and the eager forward."""
    sizes = dict.fromkeys(COUNT_NAMES, count)
    sizes |= dict.fromkeys(("hidden_dim", "hidden_size"), hidden)
    sizes |= dict.fromkeys(("intermediate_dim", "intermediate_size", "moe_intermediate_size"), intermediate)
    found = {name: value for name, value in sizes.items() if name in module.__dict__}
    if "act_fn" in module._modules:
        found["act_fn"] = module._modules["act_fn"]
    if hasattr(module, "config"):
        # Another implementation would decide the trial; a copy, since the model has the configuration.
        found["config"] = copy.copy(module.config)
        setattr(found["config"], f"{IMPLEMENTATION}_internal", "eager")
    return found


# --- experts_implementation="liger" -------------------------------------------------------------------------


@torch.compiler.assume_constant_result
def _recognised(module):
    """The fields of the recipe of a module that is not patched; stored in it, for every forward.

    A compiler calls this function, instead of tracing the trial, and takes a tuple of values for constant.

    Raises:
        ValueError: the op does not compute what the module computes.
    """
    with trials.without_modes():
        recipe = experts(module, ("silu", "gelu_tanh", "gelu"))
    if not isinstance(recipe, ExpertsRecipe):
        reason = recipe or "it has no gate_up_proj and down_proj"
        raise ValueError(f'experts_implementation="liger" cannot run {type(module).__name__}: {reason}')
    module.__dict__[_RECIPE] = dataclasses.astuple(recipe)
    return module.__dict__[_RECIPE]


def experts_forward(module, hidden_states, top_k_index, top_k_weights):
    """The function behind ``experts_implementation="liger"``."""
    fields = module.__dict__.get(_RECIPE)
    if fields is None:
        fields = _recognised(module)
    recipe, given = ExpertsRecipe(*fields), (hidden_states, top_k_index, top_k_weights)
    y = recipe.apply(*recipe.parameters(module), {}, *given)
    if y is not None:
        return y
    parameters = [getattr(module, name) for name in recipe.names]
    return recipe.run(*given, *(dense(p, None, p.dtype) for p in parameters))


def register():
    """Makes ``experts_implementation="liger"`` known, where transformers has the interface."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_EXPERTS_FUNCTIONS.register("liger", experts_forward)
