"""The operands of an lm_head with LoRA adapters of PEFT, which is not imported."""

import sys

import torch
from torch import nn

from ..._core.dtensor.inputs import is_dtensor
from ..._core.modules.hooks import hooks_of
from ..._core.modules.linear_layers import overrides_forward
from ..._core.modules.quantised import is_quantised


def is_lora_linear(module):
    """Whether a module is PEFT's LoRA layer around a linear layer, of that class or a patched one."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    return layers is not None and getattr(type(module), "_liger_original", type(module)) is layers.Linear


def supports(layer):
    """Whether logits of a LoRA layer are ``x W^T + b + s dropout(x) A^T B^T``, with weights that can be read.

    Not so for variants (DoRA and others), for quantised or sharded weights and for layers with hooks.
    """
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    linears = [layer.base_layer, *(layer.lora_B[name] for name in names)]
    return not any(name in getattr(layer, "lora_variant", {}) for name in names) and all(
        map(_is_readable, linears)
    )


def _is_readable(linear):
    forward = getattr(type(linear), "_liger_original", type(linear)).forward
    weight = linear.weight
    # A weight with ds_id is gathered by ZeRO-3 inside a call of its layer only.
    return (
        forward is nn.Linear.forward
        and not overrides_forward(linear)
        and not any(hooks_of(linear))
        and not (is_dtensor(weight) or is_quantised(weight) or hasattr(weight, "ds_id"))
    )


def low_rank_parts(layer, x):
    """((down, up) or None without active adapters, bias or None): the operands of the logits besides x and W."""
    bias = layer.base_layer.bias
    if layer.disable_adapters or layer.merged:
        return None, bias
    downs, ups = [], []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        first, second, scaling = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
        downs.append(
            first(layer.lora_dropout[name](layer._cast_input_dtype(x, first.weight.dtype))) * scaling
        )
        ups.append(second.weight)
        if second.bias is not None:
            added = (second.bias * scaling).to(x.dtype)
            bias = added if bias is None else bias + added
    if not downs:
        return None, bias
    return (downs[0], ups[0]) if len(downs) == 1 else (torch.cat(downs, -1), torch.cat(ups, 1)), bias
