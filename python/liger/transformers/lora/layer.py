# SPDX-License-Identifier: BSD-3-Clause
"""PEFT's LoRA layers, read at each call: adapters are added, switched, merged and removed at any time. PEFT
is not imported."""

from typing import NamedTuple

import torch
from torch import nn

from ..._core.dtensor.inputs import is_dtensor
from ..._core.modules.linear_layers import moves_nothing
from ..._core.modules.quantised import is_quantised
from ..recipe import trials
from .base_weight import dtype_of_four_bits, is_four_bit, state_of_four_bits

SEVERAL = "several of its adapters are active"
VARIANT = "its adapter is a variant of LoRA (DoRA, for example)"
BIASED = "its adapter has a bias"
UNCAST = "PEFT's casts of its input are switched off"
HOOKED = "a part of it has hooks, or another forward than its class"
TRAINS = "the weight of its base layer trains"
GATHERED = "its weights are DTensors, or of DeepSpeed ZeRO-3"
NOT_LINEAR = "its base layer or its adapter is no linear layer with a weight that can be read"

# During the forward, FSDP1 replaces the parameters by tensors.
_PLAIN = (nn.Parameter, torch.Tensor)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Part(NamedTuple):
    """One linear layer ``x W^T + bias + scale * dropout(x) A^T B^T``; a and b are None without an adapter.

    ``state``: the quantisation state of a 4-bit weight, else None. ``rate``: of the dropout, 0 in evaluation.
    """

    weight: torch.Tensor
    state: object
    bias: torch.Tensor | None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0
    rate: float = 0.0


def is_lora(layer):
    """True for a module with the parts of PEFT's LoRA layer around a linear layer."""
    modules = layer._modules
    return (
        (getattr(trials.original(layer).forward, "__module__", None) or "").startswith("peft.tuners.lora.")
        and {"base_layer", "lora_A", "lora_B", "lora_dropout"} <= modules.keys()
        and isinstance(modules["base_layer"], nn.Linear)
    )


def is_idle(layer):
    """True if the layer is its base layer alone: its adapters are merged, switched off, or not active."""
    return layer._disable_adapters or bool(layer.merged_adapters) or not _active(layer)


def _active(layer):
    names, known = layer._active_adapter, layer._modules["lora_A"]._modules
    return [name for name in ((names,) if type(names) is str else names) if name in known]


def why_not(layer):
    """Why the layer runs the code of PEFT as it is now; None if it does not, or if it is idle."""
    if is_idle(layer):
        return None
    (name, *others), modules = _active(layer), layer._modules
    if others:
        return SEVERAL
    if name in layer.lora_variant:
        return VARIANT
    if not layer.cast_input_dtype_enabled:
        return UNCAST
    base, first, second = (modules["base_layer"], *(modules[n]._modules[name] for n in ("lora_A", "lora_B")))
    dropout = modules["lora_dropout"]._modules[name]
    if any(map(_has_hooks, (base, first, second, dropout))):
        return HOOKED
    if type(dropout) not in (nn.Dropout, nn.Identity):
        return NOT_LINEAR
    for linear in (first, second):
        if type(linear).forward is not nn.Linear.forward:
            return NOT_LINEAR
    if second._parameters.get("bias") is not None or first._parameters.get("bias") is not None:
        return BIASED
    weights = [_weight(linear) for linear in (base, first, second)]
    if any(w is None or is_dtensor(w) or hasattr(w, "ds_id") for w in weights):
        return GATHERED
    if not all(type(w) in _PLAIN for w in weights[1:]):
        return NOT_LINEAR
    return _why_not_base(base, weights[0])


def _why_not_base(base, weight):
    if is_four_bit(base):
        return None if state_of_four_bits(base) is not None else NOT_LINEAR
    if type(base).forward is not nn.Linear.forward:
        return NOT_LINEAR
    if weight.requires_grad:
        return TRAINS
    if is_quantised(weight):
        return None if hasattr(weight, "dequantize") else NOT_LINEAR
    return None if type(weight) in _PLAIN else NOT_LINEAR


def _has_hooks(module):
    values = module.__dict__
    return bool(
        values["_forward_hooks"]
        or values["_forward_pre_hooks"]
        or values["_backward_hooks"]
        or values["_backward_pre_hooks"]
    )


def _weight(linear):
    # A parametrization is a property of the class: another reading of it may give another weight.
    weight = linear._parameters.get("weight")
    return linear.__dict__.get("weight") if weight is None else weight


def _stays(module, x):
    """True if no forward of the instance moves tensors: accelerate's, on one device, does not."""
    return "forward" not in module.__dict__ or moves_nothing(module, x)


def compute_dtype(x):
    """The dtype of products with x, which autocast decides; None for a tensor that autocast leaves alone."""
    device = x.device.type
    if device not in ("cpu", "cuda"):
        return None
    if not torch.is_autocast_enabled(device):
        return x.dtype if x.dtype in _DTYPES else None
    return torch.get_autocast_dtype(device) if x.dtype in _DTYPES[:3] else None


def part_of(layer, x):
    """The operands of a LoRA layer for x, or None: then its own forward must run.

    Args:
        layer: as for :func:`is_lora`.
        x: a plain tensor that no compiler and no transform traces; its dtype and its device decide, not its
            shape.
    """
    if is_idle(layer) or why_not(layer) is not None:
        return None
    (name,), modules = _active(layer), layer._modules
    base, first, second = (modules["base_layer"], *(modules[n]._modules[name] for n in ("lora_A", "lora_B")))
    dropout = modules["lora_dropout"]._modules[name]
    a, b = _weight(first), _weight(second)
    if not (a.dtype in _DTYPES and b.dtype == a.dtype and a.device == b.device == x.device):
        return None
    if not all(_stays(module, x) for module in (base, first, second, dropout)):
        return None
    found = base_part(base, x)
    if found is None:
        return None
    rate = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    return None if rate >= 1 else found._replace(a=a, b=b, scale=layer.scaling[name], rate=rate)


def base_part(base, x):
    """The operands of a frozen linear layer without adapters, whose hooks the caller has looked at; or
    None."""
    weight, dtype = _weight(base), compute_dtype(x)
    if dtype is None or weight.device != x.device:
        return None
    bias = base._parameters.get("bias")
    if is_four_bit(base):
        if not (x.dtype == dtype == dtype_of_four_bits(base, x)):
            return None
        return Part(weight, state_of_four_bits(base), bias)
    if is_quantised(weight):
        return Part(weight, None, bias) if x.dtype == dtype == weight.dtype else None
    fits = x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)
    return Part(weight, None, bias) if fits and weight.dtype in _DTYPES else None
