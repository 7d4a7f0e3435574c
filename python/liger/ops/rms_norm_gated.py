# SPDX-License-Identifier: BSD-3-Clause
"""Root-mean-square normalisation with a gate: torch kernels, API.

With ``a = silu(gate)`` or ``sigmoid(gate)`` and ``w = offset + weight``: ``y = rms_norm(x) * w * a`` (norm
before gate), or ``y = rms_norm(x * a) * w``. Casting modes, as in ``rms_norm`` and the classes of
transformers:

``"llama"``  the normalised row is rounded to the dtype of x before the weight; its product with a weight of
             that dtype is rounded before the gate. ``a`` and ``x * a`` are float32. Qwen3-Next, Mamba2,
             Bamba, Zamba2, Nemotron-H.
``"gemma"``  all arithmetic in float32 and one rounding at the end. Falcon-H1, Kimi Linear.
``"none"``   as eager code without casts: every intermediate result is rounded.
"""

import torch

from .._core.math.dtypes import accumulate_dtype
from .._core.math.memory_format import laid_out_like
from .._core.op.arguments import FLAG, NORM, arguments, check
from .._core.op.by_name import by_name
from .._core.op.registration import declared_family
from .._core.op.types import CastingMode, GateActivation


def _activate(gate, casting_mode, activation):
    """(a, its derivative), in the dtype of the arithmetic."""
    wide = accumulate_dtype(gate.dtype)
    gate_wide = gate.to(wide)
    s = torch.sigmoid(gate_wide)
    if activation == "sigmoid":
        a, derivative = s, s * (1 - s)
    else:
        a = gate_wide * s
        derivative = s + a * (1 - s)
    return (a.to(gate.dtype).to(wide) if casting_mode == "none" else a), derivative


def _norm_input(x, a, casting_mode, norm_before_gate):
    wide = accumulate_dtype(x.dtype)
    if norm_before_gate:
        return x.to(wide)
    h = x.to(wide) * a
    return h.to(x.dtype).to(wide) if casting_mode == "none" else h


def _grouped(x, group_size):
    """The view (..., groups, group_size) in which each row is normalised; x itself without a group size."""
    return x if group_size is None else x.unflatten(-1, (x.shape[-1] // group_size, group_size))


def _scaled(xhat, x, weight, offset, casting_mode):
    """n * w with the roundings of the casting mode, in the dtype of the arithmetic."""
    wide = xhat.dtype
    n = xhat if casting_mode == "gemma" else xhat.to(x.dtype).to(wide)
    if weight is None:
        return n
    p = n * (weight.to(wide) + offset)
    return p.to(x.dtype).to(wide) if casting_mode != "gemma" and weight.dtype == x.dtype else p


@by_name(torch.ops.liger.rms_norm_gated.default)
def rms_norm_gated_torch(given):
    x, gate, weight, eps, offset, casting_mode, group_size, norm_before_gate, activation = given
    a, _ = _activate(gate, casting_mode, activation)
    h = _norm_input(x, a, casting_mode, norm_before_gate)
    rows = _grouped(h, group_size)
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    if casting_mode == "none":
        rstd = rstd.to(x.dtype).to(rstd.dtype)
    y = _scaled((rows * rstd).reshape(x.shape), x, weight, offset, casting_mode)
    if norm_before_gate:
        y = y * a
    return laid_out_like(x, y.to(x.dtype)), rstd.squeeze(-1).contiguous()


@by_name(torch.ops.liger.rms_norm_gated_backward.default)
def rms_norm_gated_backward_torch(given):
    """The derivative of the roundings in the forward is taken as 1."""
    grad_y, x, gate, weight, rstd, *options = given[:10]
    offset, casting_mode, group_size, norm_before_gate, activation = options
    need_grad_x, need_grad_gate, need_grad_weight = given.needs_grad
    wide = accumulate_dtype(x.dtype)
    a, derivative = _activate(gate, casting_mode, activation)
    h = _norm_input(x, a, casting_mode, norm_before_gate)
    rows = _grouped(h, group_size)
    rstd = rstd.to(wide).reshape(*rows.shape[:-1], 1)
    rows_hat = rows * rstd
    xhat = rows_hat.reshape(x.shape)
    g = grad_y.to(wide)
    grad_gate = None
    if norm_before_gate:
        grad_gate = g * _scaled(xhat, x, weight, offset, casting_mode) * derivative
        g = g * a
    grad_weight = (x if weight is None else weight).new_empty(0)
    if need_grad_weight and weight is not None:
        terms = g * (xhat if casting_mode == "gemma" else xhat.to(x.dtype).to(wide))
        grad_weight = terms.sum_to_size(weight.shape).to(weight.dtype, copy=True)
    if weight is not None:
        g = g * (weight.to(wide) + offset)
    g = _grouped(g, group_size)
    grad_h = (rstd * (g - rows_hat * (g * rows_hat).mean(-1, keepdim=True))).reshape(x.shape)
    grad_x = grad_h
    if not norm_before_gate:
        grad_x, grad_gate = grad_h * a, grad_h * x.to(wide) * derivative
    return (
        laid_out_like(x, grad_x.to(x.dtype)) if need_grad_x else x.new_empty(0),
        laid_out_like(gate, grad_gate.to(x.dtype)) if need_grad_gate else gate.new_empty(0),
        grad_weight,
    )


_rms_norm_gated = declared_family("rms_norm_gated", rms_norm_gated_torch, rms_norm_gated_backward_torch)


@arguments(late=True, enters=True, **NORM)
def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: CastingMode = "llama",
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: GateActivation = "silu",
) -> torch.Tensor:
    """Root-mean-square normalisation with a gate, as in linear attention and state space models.

    With ``norm(h) = h * rsqrt(mean(h^2) + eps)`` and ``a = silu(gate)``:
    ``y = norm(x) * (offset + weight) * a`` if ``norm_before_gate``, else
    ``y = norm(x * a) * (offset + weight)``. Statistics and gate are float32.

    Args:
        x: (..., H), float16, bfloat16 or float32 (float64 on the torch backend), any strides.
        gate: the shape, dtype and device of x.
        weight: (H,), the dtype of x or float32; None for no scale.
        eps: added to the mean square; finite and at least 0.
        offset: added to the weight.
        casting_mode: where intermediate results are rounded to the dtype of x: ``"llama"``: the normalised
            row before the weight, and its product with a weight of that dtype before the gate; ``"gemma"``:
            only y; ``"none"``: every intermediate result. Use the mode of the code that trained the weights.
        group_size: each ``group_size`` consecutive elements of the last dimension are normalised alone; None
            for the whole dimension.
        norm_before_gate: True as in Qwen3-Next, False as in Mamba2.
        activation: of the gate, ``"silu"`` or ``"sigmoid"``.

    Returns:
        y, of the shape and dtype of x. Differentiable in x, gate and weight.

    Raises:
        TypeError: an argument of another type.
        ValueError: eps or offset out of range, a group_size that does not divide H, an unknown casting mode
            or activation.
        RuntimeError: mismatched shapes, dtypes or devices.

    Example::

        >>> x, gate, weight = torch.randn(2, 10, 64), torch.randn(2, 10, 64), torch.ones(64)
        >>> y = liger.rms_norm_gated(x, gate, weight, group_size=16)

    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060; Yang et al., "Gated Delta Networks", arXiv
    2412.06464.
    """
    if norm_before_gate is not True:
        check("rms_norm_gated", "norm_before_gate", norm_before_gate, FLAG)
    return _rms_norm_gated(
        x, gate, weight, eps, offset, casting_mode, group_size, norm_before_gate, activation
    )[0]
