# SPDX-License-Identifier: BSD-3-Clause
"""PEFT's LoRA layers, read at each call: adapters change at any time. PEFT is not imported."""

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
GATHERED = "DeepSpeed ZeRO-3 gathers its weights at the calls of its parts"
NOT_LINEAR = "its base layer or its adapter is no linear layer with a weight that can be read"

# During the forward, FSDP1 replaces the parameters by tensors.
_PLAIN = (nn.Parameter, torch.Tensor)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Part(NamedTuple):
    """One linear layer ``x W^T + bias + scale * dropout(x) A^T B^T``; a and b are None without an adapter.

    ``state``: the quantisation state of a 4-bit weight, else None. ``dtype``: of the product with the weight;
    ``result``: of y and its gradient. ``rate``: of the dropout, 0 in evaluation.
    """

    weight: torch.Tensor
    state: object
    bias: torch.Tensor | None
    dtype: torch.dtype
    result: torch.dtype
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0
    rate: float = 0.0


def is_of_peft(layer, parts):
    """True for a module with the forward of a LoRA layer of PEFT and submodules of these names."""
    module = getattr(trials.original(layer).forward, "__module__", None) or ""
    return module.startswith("peft.tuners.lora.") and parts <= layer._modules.keys()


def is_lora(layer):
    """True for a module with the parts of PEFT's LoRA layer around a linear layer."""
    parts = {"base_layer", "lora_A", "lora_B", "lora_dropout"}
    return is_of_peft(layer, parts) and isinstance(layer._modules["base_layer"], nn.Linear)


def stand_in(module, base, first, second, scale, **attributes):
    """A stand-in (:func:`trials.stand_in`) for a LoRA layer with one adapter of two linear layers."""
    return trials.stand_in(
        module,
        base_layer=base,
        lora_A={"default": first},
        lora_B={"default": second},
        scaling={"default": scale},
        lora_variant={},
        merged_adapters=[],
        _disable_adapters=False,
        _active_adapter="default",
        **attributes,
    )


class _Pieces(NamedTuple):
    """The modules that a LoRA layer with one active adapter calls, and the scale of the adapter."""

    base: nn.Module
    first: nn.Module
    second: nn.Module
    dropout: nn.Module
    scale: float


def _pieces(layer):
    """:class:`_Pieces`; None for a layer that is its base layer alone (adapters merged, switched off, or not
    active); or, as text, why the layer runs the code of PEFT."""
    modules, names = layer._modules, layer._active_adapter
    firsts = modules["lora_A"]._modules
    active = [name for name in ((names,) if type(names) is str else names) if name in firsts]
    if layer._disable_adapters or layer.merged_adapters or not active:
        return None
    if len(active) > 1:
        return SEVERAL
    name = active[0]
    if name in layer.lora_variant:
        return VARIANT
    if not layer.cast_input_dtype_enabled:
        return UNCAST
    second, dropout = (modules[n]._modules[name] for n in ("lora_B", "lora_dropout"))
    found = _Pieces(modules["base_layer"], firsts[name], second, dropout, layer.scaling[name])
    return _why_not(*found[:4]) or found


def why_not(layer):
    """Why the layer runs the code of PEFT as it is now; None if it does not. A weight that is a DTensor is no
    reason here: FSDP2 has the whole weight during the forward."""
    found = _pieces(layer)
    return found if type(found) is str else None


def _why_not(base, first, second, dropout):
    for module in (base, first, second, dropout):
        values = module.__dict__
        if (
            values["_forward_hooks"]
            or values["_forward_pre_hooks"]
            or values["_backward_hooks"]
            or values["_backward_pre_hooks"]
        ):
            return HOOKED
    if not (type(first).forward is type(second).forward is nn.Linear.forward):
        return NOT_LINEAR
    if type(dropout) not in (nn.Dropout, nn.Identity):
        return NOT_LINEAR
    if first._parameters.get("bias") is not None or second._parameters.get("bias") is not None:
        return BIASED
    weight = _weight(base)
    if weight is None or hasattr(weight, "ds_id"):
        return NOT_LINEAR if weight is None else GATHERED
    if type(base).forward is not nn.Linear.forward:
        return None if is_four_bit(base) and state_of_four_bits(base) is not None else NOT_LINEAR
    if weight.requires_grad:
        return TRAINS
    readable = type(weight) in _PLAIN or is_dtensor(weight) or hasattr(weight, "dequantize")
    return None if readable else NOT_LINEAR


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
    found = _pieces(layer)
    if type(found) is not _Pieces:
        return None
    a, b = _weight(found.first), _weight(found.second)
    if not (
        type(a) in _PLAIN
        and type(b) in _PLAIN
        and a.dtype in _DTYPES
        and b.dtype == a.dtype
        and a.device == b.device == x.device
        and _stays(found.base, x)
        and _stays(found.first, x)
        and _stays(found.second, x)
        and _stays(found.dropout, x)
    ):
        return None
    dropout = found.dropout
    rate = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    return base_part(found.base, x, a, b, found.scale, rate) if rate < 1 else None


def base_part(base, x, *adapter):
    """The operands of a frozen linear layer without hooks, and of its adapter: the last fields of a
    :class:`Part`; or None."""
    weight, dtype = _weight(base), compute_dtype(x)
    if dtype is None or weight.device != x.device or is_dtensor(weight):
        return None
    bias = base._parameters.get("bias")
    if type(base).forward is not nn.Linear.forward and is_four_bit(base):
        # In evaluation its own forward has kernels that read the packed weight, and packs it anew for a CPU.
        if not base.training:
            return None
        of_weight = dtype_of_four_bits(base, x)
        if of_weight != dtype and torch.is_autocast_enabled(x.device.type):
            return None
        # Its forward casts x, and the result back.
        return Part(weight, state_of_four_bits(base), bias, of_weight, x.dtype, *adapter)
    if is_quantised(weight):
        fits = x.dtype == dtype == weight.dtype
    else:
        fits = x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)
    return Part(weight, None, bias, dtype, dtype, *adapter) if fits and weight.dtype in _DTYPES else None
