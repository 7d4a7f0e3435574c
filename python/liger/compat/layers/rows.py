# SPDX-License-Identifier: BSD-3-Clause
"""Norms, gated units and other row-wise functions, with the arguments of liger_kernel.

``in_place`` has no effect anywhere: no function writes into a tensor of the caller or into a gradient.
``..._forward`` and ``..._backward`` are the halves of an op, for autograd functions of others: they record no
graph.
"""

import functools

import torch

from ..._core.math.dtypes import accumulate_dtype
from ...ops.geglu import geglu
from ...ops.group_norm import group_norm
from ...ops.layer_norm import layer_norm
from ...ops.relu_squared import relu_squared
from ...ops.rms_norm import fused_add_rms_norm, rms_norm
from ...ops.softmax import softmax
from ...ops.swiglu import swiglu, swiglu_packed
from ...ops.tiled_mlp.tiled import tiled
from ..utils import LARGEST_BLOCK, calculate_settings

# The numbers by which liger_kernel passes a casting mode from the forward to the backward.
_CASTING_MODES = {-1: "none", 0: "llama", 1: "gemma"}


def _parameter_for(x, parameter):
    """The parameter in a dtype that the norms of liger take with x: the dtype of x, or float32."""
    if parameter is None or parameter.dtype in (x.dtype, torch.float32):
        return parameter
    return parameter.float()


def _apply_rms_norm(X, W, eps=1e-6, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
    """:func:`liger.rms_norm`; ``row_mode`` has no effect."""
    return rms_norm(X, _parameter_for(X, W), eps, offset, casting_mode)


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    return _apply_rms_norm(X, W, eps, offset, casting_mode)


def _casting_mode(function, value):
    """(number, name) of a casting mode that is given as either."""
    for pair in _CASTING_MODES.items():
        if value in pair:
            return pair
    names = ", ".join(f"{number} or '{name}'" for number, name in _CASTING_MODES.items())
    raise ValueError(f"{function}: casting_mode is {value!r}, expected one of {names}")


@torch.no_grad()
def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
    """The forward of :func:`liger.rms_norm`; ``row_mode`` has no effect.

    Returns:
        The output, X as (rows, hidden size), the reciprocals (rows,) of the root mean squares, the block size
        and the number of warps of liger_kernel's kernel, and the number of the casting mode.
    """
    number, mode = _casting_mode("rms_norm_forward", casting_mode)
    rows = X.detach().reshape(-1, X.shape[-1])
    output, rstd = torch.ops.liger.rms_norm(rows, _parameter_for(X, W), eps, offset, mode)
    if mode == "none":
        rstd = rstd.to(X.dtype)
    # Rows may be longer than liger_kernel allows; the limits of its kernel have no effect here.
    settings = calculate_settings(min(X.shape[-1], LARGEST_BLOCK))
    return output.view(X.shape), rows, rstd, *settings, number


@torch.no_grad()
def rms_norm_backward(
    dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode, needs_dw=None
):
    """The gradients of X, in the shape of dY, and of W, for what :func:`rms_norm_forward` returned.

    ``BLOCK_SIZE``, ``num_warps`` and ``row_mode`` have no effect. The gradient of W is None without W, and
    with ``needs_dw=False``.
    """
    _, mode = _casting_mode("rms_norm_backward", casting_mode)
    weight, needs_dw = _parameter_for(X, W), W is not None and needs_dw is not False
    rstd = RSTD.to(accumulate_dtype(X.dtype))
    grad = dY.reshape(X.shape).to(X.dtype)
    grad_x, grad_weight = torch.ops.liger.rms_norm_backward(
        grad, X, weight, rstd, offset, mode, True, needs_dw
    )
    return grad_x.view(dY.shape), grad_weight.to(W.dtype) if needs_dw else None


def _apply_fused_add_rms_norm(X, R, W, eps=1e-6, offset=0.0, casting_mode="llama", in_place=False):
    """(normalised sum, sum) of :func:`liger.fused_add_rms_norm`."""
    return fused_add_rms_norm(X, R, _parameter_for(X, W), eps, offset, casting_mode)


def liger_fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    return _apply_fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


def liger_layer_norm(X, W, B, eps=1e-6):
    """:func:`liger.layer_norm`."""
    return layer_norm(X, _parameter_for(X, W), _parameter_for(X, B), eps)


def liger_group_norm(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
    """:func:`liger.group_norm`; ``num_channels`` is the size of dimension 1 of X."""
    if X.shape[1] != num_channels:
        raise ValueError(
            f"liger_group_norm: X has {X.shape[1]} channels, expected num_channels, {num_channels}"
        )
    weight, bias = _parameter_for(X, affine_scaling_weight), _parameter_for(X, affine_shifting_bias)
    return group_norm(X, num_groups, weight, bias, eps)


def _apply_silu_mul(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    """``silu(a * gate_multiplier) * b * down_multiplier``, by :func:`liger.swiglu`."""
    product = swiglu(a if gate_multiplier == 1 else a * gate_multiplier, b)
    return product if down_multiplier == 1 else product * down_multiplier


def liger_swiglu(a, b):
    return swiglu(a, b)


def _apply_fused_gate_up(y, in_place=False):
    """``silu(gate) * up`` of one tensor with gate and up side by side, by :func:`liger.swiglu_packed`."""
    return swiglu_packed(y)


def liger_geglu(a, b):
    """``gelu(a) * b`` with the approximation by tanh, by :func:`liger.geglu`."""
    return geglu(a, b, "tanh")


def liger_softmax(x):
    return softmax(x)


def liger_relu_squared(x):
    return relu_squared(x)


def apply_tiled_mlp(fn, mlp_module, x, num_shards=None, compute_params=None):
    """``fn(mlp_module, x)`` one shard of tokens at a time, by :func:`liger.tiled`.

    Args:
        num_shards: None: ceil(tokens of a sequence / hidden size).
        compute_params: parameters that ``fn`` uses besides the parameters of ``mlp_module``; or None.
    """
    if num_shards is None:
        num_shards = -(-x.shape[-2] // x.shape[-1])
    num_shards = max(min(num_shards, x.shape[:-1].numel()), 1)
    return tiled(
        functools.partial(fn, mlp_module), x, num_shards=num_shards, parameters=tuple(compute_params or ())
    )
