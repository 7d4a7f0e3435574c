# SPDX-License-Identifier: BSD-3-Clause
"""The loss of an lm_head with LoRA adapters, from their first products: logits ``x W^T + down up^T``.

``down`` has r columns: the output of the adapters' first matrices, scaled. PEFT computes it, with dropout and
hooks, and may have several adapters.
"""

import torch

from ..._core.head.cross_entropy import CEOptions, Metrics
from ..._core.op.autocast import autocast_operands
from ..._core.op.loss_rows import denominator_tensor
from ...ops.fused_linear_ce.lora import lora_ce


def low_rank_parts(layer, x):
    """((down, up) or None without adapters, bias or None): operands of the logits besides x and W."""
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


def low_rank_ce(
    x,
    weight,
    down,
    up,
    target,
    bias=None,
    denominator=None,
    ignore_index=-100,
    softcap=None,
    memory_budget=None,
):
    """``cross_entropy(x @ weight.T + bias + down @ up.T, target)``: fused linear CE with adapters.

    down (N, r) and up (V, r) are rounded to the dtype of x; their gradients are not.
    """
    x, weight, bias = autocast_operands(x, weight, bias)
    options = CEOptions(
        denominator=denominator_tensor(denominator, x),
        ignore_index=ignore_index,
        softcap=softcap,
        memory_budget=memory_budget,
    )
    return lora_ce(x, weight, target, bias, (None, up, down), 1.0, options, Metrics())[0]
