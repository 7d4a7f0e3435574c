# SPDX-License-Identifier: BSD-3-Clause
"""The kind of an lm_head: which of its linear layers may compute the loss, and why none may.

A head is a plain nn.Linear, PEFT's LoRA layer around one, or PEFT's copies of one for ``modules_to_save``.
What tensor parallelism has made of a linear layer is in sharded.py. PEFT is not imported.
"""

import sys
from typing import NamedTuple

from torch import nn

from ..._core.dtensor.inputs import is_dtensor
from ..._core.modules.hooks import hooks_of
from ..._core.modules.linear_layers import overrides_forward
from ..._core.modules.quantised import is_quantised
from ..recipe import trials


class HeadKind(NamedTuple):
    """``layers``: the modules of the head that may compute the loss; ``is_lora``: the one layer is PEFT's
    LoRA layer; ``reason``: why no layer may compute the loss, else None."""

    layers: list[nn.Module]
    is_lora: bool = False
    reason: str | None = None


def kind_of(head) -> HeadKind:
    """The kind of a head as it is now: adapters may be added, merged or removed after patching."""
    if _is_lora_layer(head) and reads_lora(head):
        return HeadKind([head], is_lora=True)
    layers = linear_layers(head)
    return HeadKind(layers) if layers else HeadKind([], reason=_why_from_logits(head))


def linear_layers(head):
    """The plain linear layers of a head: itself, or PEFT's copies for ``modules_to_save``."""
    if isinstance(head, nn.Linear):
        return [head] if _is_plain(head) else []
    copies = getattr(head, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return []
    inner = [getattr(head, "original_module", None), *copies.values()]
    return inner if all(map(_is_plain, inner)) else []


def _is_plain(module):
    # Quantised layers have another class (bitsandbytes) or another kind of weight (torchao).
    return (
        isinstance(module, nn.Linear)
        and trials.original(module).forward is nn.Linear.forward
        and not is_quantised(module._parameters.get("weight"))
    )


def _why_from_logits(head):
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    weight = getattr(head, "weight", None)
    if is_quantised(weight):
        kind += f" whose weight is a {type(weight).__module__}.{type(weight).__qualname__}"
    return f"its head is a {kind}, not a plain linear layer: the loss is computed from full logits"


def _is_lora_layer(module):
    layers = sys.modules.get("peft.tuners.lora.layer")
    return layers is not None and trials.original(module) is layers.Linear


def reads_lora(layer):
    """True if logits of a LoRA layer are ``x W^T + b + s dropout(x) A^T B^T``, with weights that can be read.

    False for variants (DoRA and others), for quantised or sharded weights and for layers with hooks.
    """
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    linears = [layer.base_layer, *(layer.lora_B[name] for name in names)]
    return not any(name in getattr(layer, "lora_variant", {}) for name in names) and all(
        map(_is_readable, linears)
    )


def _is_readable(linear):
    weight = linear.weight
    # A weight with ds_id is gathered by ZeRO-3 inside a call of its layer only.
    return (
        trials.original(linear).forward is nn.Linear.forward
        and not overrides_forward(linear)
        and not any(hooks_of(linear))
        and not (is_dtensor(weight) or is_quantised(weight) or hasattr(weight, "ds_id"))
    )
