# SPDX-License-Identifier: BSD-3-Clause
"""Checks of the shapes, dtypes, devices and options of grouped_experts, with the names of its arguments."""

from typing import Any

import torch

from ..._core.op.arguments import FLAG, POSITIVE, check, choice
from ..._core.op.tensors import (
    check_device,
    check_floating,
    check_like,
    check_shape,
    wrong_dtype,
    wrong_shape,
)
from ..._core.op.types import ExpertActivation

OP = "grouped_experts"
OPTIONS: dict[str, Any] = {
    "activation": choice(ExpertActivation),
    **dict.fromkeys(("is_transposed", "is_interleaved", "recompute"), FLAG),
    **dict.fromkeys(("alpha", "limit"), POSITIVE),
}


def sizes_of(down_proj, is_transposed):
    """(experts, hidden size, intermediate size)"""
    experts, first, second = down_proj.shape
    return (experts, second, first) if is_transposed else (experts, first, second)


def _check_routing(x, top_k_index, top_k_weights):
    if x.dim() == 0:
        raise wrong_shape(OP, "x", x, "at least one dimension")
    check_floating(OP, "x", x)
    leading = x.shape[:-1]
    if top_k_index.dim() != x.dim() or top_k_index.shape[:-1] != leading or top_k_index.shape[-1] == 0:
        expected = f"{(*leading, 'K')}, the choices of each token of x, with K of at least 1"
        raise wrong_shape(OP, "top_k_index", top_k_index, expected)
    if top_k_index.dtype not in (torch.int64, torch.int32):
        raise wrong_dtype(OP, "top_k_index", top_k_index, "int64 or int32 expert indices")
    check_shape(OP, "top_k_weights", top_k_weights, top_k_index.shape, "the shape of top_k_index")
    check_floating(OP, "top_k_weights", top_k_weights)
    for name, tensor in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
        check_device(OP, name, tensor, "x", x)
    if top_k_index.numel() >= 2**31:
        raise RuntimeError(f"{OP}: top_k_index has {top_k_index.numel()} elements, expected fewer than 2^31")
    # On a GPU the check would synchronise; there a negative index gives NaN.
    if top_k_index.device.type == "cpu" and top_k_index.numel() and top_k_index.min() < 0:
        raise RuntimeError(
            f"{OP}: top_k_index has the element {int(top_k_index.min())}, expected expert indices of at least 0"
        )


def check_experts(tensors, a):
    """Checks the seven tensors, as ``grouped_experts_forward`` takes them, and the options of an op."""
    x, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias = tensors
    is_transposed = a.is_transposed
    _check_routing(x, top_k_index, top_k_weights)
    hidden, order = x.shape[-1], "(E, I, H)" if is_transposed else "(E, H, I)"
    if (
        down_proj.dim() != 3
        or 0 in (down_proj.shape[0], *down_proj.shape[1:])
        or sizes_of(down_proj, is_transposed)[1] != hidden
    ):
        expected = f"{order} of positive sizes with H = {hidden}, the last dimension of x"
        raise wrong_shape(OP, "down_proj", down_proj, expected)
    experts, _, intermediate = sizes_of(down_proj, is_transposed)
    columns = (hidden, 2 * intermediate) if is_transposed else (2 * intermediate, hidden)
    check_shape(OP, "gate_up_proj", gate_up_proj, (experts, *columns), "as x and down_proj require")
    parameters = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
    if gate_up_proj_bias is not None:
        check_shape(OP, "gate_up_proj_bias", gate_up_proj_bias, (experts, 2 * intermediate), "(E, 2I)")
        parameters["gate_up_proj_bias"] = gate_up_proj_bias
    if down_proj_bias is not None:
        check_shape(OP, "down_proj_bias", down_proj_bias, (experts, hidden), "(E, H)")
        parameters["down_proj_bias"] = down_proj_bias
    for name, tensor in parameters.items():
        check_like(OP, name, tensor, "x", x)
    for name in ("activation", "alpha", "limit"):
        check(OP, name, getattr(a, name), OPTIONS[name], optional=name == "limit")


def check_gradient(a):
    """Checks the arguments of the op ``grouped_experts_backward``."""
    check_experts(a[2:9], a)
    check_shape(OP, "grad_y", a.grad_y, a.x.shape, "the shape of x")
    columns = 2 * sizes_of(a.down_proj, a.is_transposed)[2]
    if a.kept.shape != (0, columns):
        rows = a.top_k_index.numel() + 1
        check_shape(OP, "kept", a.kept, (rows, columns), "as the forward returned it")
    for name in ("grad_y", "kept"):
        check_like(OP, name, getattr(a, name), "x", a.x)
