# SPDX-License-Identifier: BSD-3-Clause
"""PEFT's adapters on the weights of experts (``target_parameters``), without a dense copy of the weights; and
frozen quantised weights, with or without adapters.

PEFT wraps the experts once per weight, and before each call computes ``W + s B A`` for all experts. A patched
wrapper gives its factors to the patched experts instead. PEFT is not imported.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..._core.dtensor.inputs import is_dtensor
from ..._core.modules.hooks import hooks_of
from ..._core.op.autocast import autocast_operands
from ..._core.op.autograd import is_traced
from ...ops.grouped_experts.adapters import adapted_experts, adapter
from ...ops.grouped_experts.routing import Gate
from ..recipe import trials
from ..recipe.classes import recipe_of
from ..recipe.local import Local
from .base_weight import dense
from .layer import HOOKED, SEVERAL, is_of_peft, stand_in

WEIGHTS = ("gate_up_proj", "down_proj")
UNPATCHED = "its experts are not patched"
SWITCHED = "PEFT takes merged adapters out of the weights first"
TWICE = "it wraps a weight that another wrapper adapts"
TRAINS = "the weights of its experts train, too"
LATE = "PEFT has added it after liger.patch, which has to be called again"


# The experts that a wrapper calls, and weight -> its wrapper, the outermost first; or None.
_call = Local()


def is_wrapper(module):
    """True for PEFT's wrapper of a weight of experts."""
    return (
        is_of_peft(module, {"base_layer", "lora_A", "lora_B"})
        and module.__dict__.get("parameter_name") in WEIGHTS
    )


def _active(wrapper):
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def _chain(wrapper):
    """(experts, weight -> wrapper with an adapter to apply); or, as text, why the code of PEFT must run."""
    found, layer = {}, wrapper
    while is_wrapper(layer):
        active, name = _active(layer), layer.parameter_name
        if layer is not wrapper and any(hooks_of(layer)):
            return HOOKED
        if layer._disable_adapters and layer.merged_adapters:
            return SWITCHED
        if active and not (layer._disable_adapters or layer.merged_adapters):
            if len(active) > 1:
                return SEVERAL
            if name in found:
                return TWICE
            found[name] = layer
        layer = layer._modules["base_layer"]
    return (layer, found) if getattr(recipe_of(layer), "kind", None) == "experts" else UNPATCHED


def _weights_of(wrapper):
    (name,) = _active(wrapper)
    return wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.scaling[name]


def _factors(wrapper, is_transposed, dtype):
    """The factors of :func:`.adapter`; ``is_transposed``: the layout of the weight."""
    a, b, scale = _weights_of(wrapper)
    a = a.reshape(wrapper.num_experts, -1, a.shape[1])
    b = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    # PEFT knows the layout from an attribute of the experts, which some lack.
    known = wrapper._did_swap_in_out_features != is_transposed
    first, second = (a.mT, b.mT) if known else (b, a)
    return adapter(first, second, scale, dtype)


@dataclass(frozen=True)
class ExpertWeightRecipe:
    kind: ClassVar[str] = "lora_linear"

    def unused_because(self, module):
        """Why each call reaches the original forward although the module is patched; None if it does not."""
        found = _chain(module)
        if isinstance(found, str):
            return found
        experts, wrappers = found
        return TRAINS if wrappers and any(p.requires_grad for p in experts.parameters()) else None

    def members(self, original):
        def forward(self, x, *args, **kwargs):
            found = UNPATCHED if "adapter_names" in kwargs or is_traced(x) else _chain(self)
            if isinstance(found, str):
                return original.forward(self, x, *args, **kwargs)
            experts, wrappers = found
            if not wrappers:
                return experts(x, *args, **kwargs)
            with _call.holding((experts, wrappers)):
                return experts(x, *args, **kwargs)

        return {"forward": functools.wraps(original.forward)(forward)}


def why_unpatched(module):
    """Why a module without a recipe sums weights of patched experts and their adapters; None for others."""
    return LATE if is_wrapper(module) and isinstance(_chain(module), tuple) else None


def wrappers_of(experts):
    """The wrappers of this thread's call of patched experts, or None."""
    callee, wrappers = _call.value or (None, None)
    return wrappers if callee is experts else None


def takes(x, parameters, wrappers):
    """True if :func:`run` supports these tensors, which the op supports if they are dense and without
    adapters."""
    tensors = [w for wrapper in wrappers.values() for w in _weights_of(wrapper)[:2]]
    return (
        x.device.type in ("cpu", "cuda")
        and not is_traced(x)
        and x.numel() > 0
        and not any(p.requires_grad for p in parameters)
        and not any(map(is_dtensor, (x, *tensors)))
        and all(t.device == x.device for t in tensors)
    )


# The grouped GEMMs ask for the addresses of their operands, which a traced tensor does not have.
@torch.compiler.disable(reason="liger: experts with adapters or quantised weights run eagerly")
def run(recipe, parameters, states, wrappers, x, top_k_index, top_k_weights):
    """:meth:`ExpertsRecipe.run` with adapters, of weights that are read through :func:`.dense`."""
    weights, biases = parameters[:2], [*parameters[2:], None, None][:2]
    operand, *biases = autocast_operands(x, *biases)
    readers = [functools.partial(dense, state=state, dtype=operand.dtype) for state in states[:2]]
    adapters = [
        _factors(wrappers[name], recipe.is_transposed, operand.dtype) if name in wrappers else None
        for name in WEIGHTS
    ]
    gate = Gate(recipe.activation, recipe.is_interleaved, recipe.alpha, recipe.limit)
    y = adapted_experts(
        operand,
        top_k_index,
        top_k_weights,
        (*weights, *biases),
        adapters,
        gate,
        recipe.is_transposed,
        readers,
    )
    return y.to(x.dtype)


@contextlib.contextmanager
def summed(experts, wrappers):
    """Inside, the weights of the experts are the sums that PEFT computes, in all threads."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_call.holding(None))
        for wrapper in wrappers.values():
            stack.enter_context(wrapper._activate_lora(wrapper.active_adapters))
        yield


# --- recognition --------------------------------------------------------------------------------------------


def expert_weight(module):
    """A recipe, a reason for leaving the module alone, or None for a module of another kind."""
    if not is_wrapper(module) or recipe_of(module) is not None:
        return None
    cls = trials.original(module)
    return trials.remembered(lambda: _try(module), expert_weight, cls, cls.forward)


def _try(module):
    """Compares the sum of PEFT for random factors with the product of ours, in both layouts."""
    random, experts, inputs, outputs, rank = trials.Random(), 3, 6, 10, 2
    first, second = (
        nn.Linear(inputs, rank * experts, bias=False),
        nn.Linear(rank * experts, outputs, bias=False),
    )
    for linear in (first, second):
        linear.weight.data = random(*linear.weight.shape)
    for is_swapped in (False, True):
        base = nn.Module()
        base.register_parameter("gate_up_proj", nn.Parameter(random(experts, 1, 1)))
        own = {"num_experts": experts, "_did_swap_in_out_features": is_swapped}
        layer = stand_in(module, base, first, second, 0.75, parameter_name="gate_up_proj", **own)
        try:
            expected = type(layer).get_delta_weight(layer, "default")
            ours = torch.bmm(*_factors(layer, not is_swapped, torch.float32))
        except trials.ERRORS as error:
            return trials.no_trial(module, error)
        if trials.error(ours.mT if is_swapped else ours, expected) > 1:
            return "its adapter does not add s B A to the weight of each expert"
    return ExpertWeightRecipe()
