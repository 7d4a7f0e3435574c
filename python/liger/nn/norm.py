# SPDX-License-Identifier: BSD-3-Clause
"""Root-mean-square, layer and group normalisation as modules."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .._core.math.dtypes import accumulate_dtype
from .._core.op.arguments import MODULE, NORM, arguments, choice
from .._core.op.tensors import wrong_shape
from .._core.op.types import CastingMode, Device, GateActivation, Sizes
from ..ops.group_norm import group_norm
from ..ops.layer_norm import layer_norm
from ..ops.rms_norm import rms_norm
from ..ops.rms_norm_gated import rms_norm_gated

_RULES: dict[str, Any] = {
    **NORM,
    **MODULE,
    "activation": choice(GateActivation),
    "casting_mode": choice(CastingMode),
}


def _sizes(normalized_shape: Sizes) -> tuple[int, ...]:
    # The sizes may be integers of NumPy.
    sizes = normalized_shape if isinstance(normalized_shape, Sequence) else (normalized_shape,)
    return tuple(map(operator.index, sizes))


def _require_shape(name, x, sizes):
    if x.shape[-len(sizes) :] != sizes:
        raise wrong_shape(name, "x", x, f"(..., {', '.join(map(str, sizes))})")


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimensions; the constructor of :class:`torch.nn.RMSNorm`.

    ``y = x * rsqrt(mean(x^2) + eps) * (offset + weight)``, with statistics in float32.

    Args:
        normalized_shape: the size of the last dimension, or the sizes of the last dimensions.
        eps: added to the mean square; None means the eps of float32, and of float64 for a float64 x, as in
            :class:`torch.nn.RMSNorm` (its docstring names the eps of the dtype of x).
        elementwise_affine: whether there is a weight. It starts so that ``offset + weight`` is one.
        offset: added to the weight; 1.0 for Gemma, which stores weights around zero.
        casting_mode: where intermediate results are rounded to the dtype of x: ``"llama"``, ``"gemma"`` or
            ``"none"``, as in :func:`liger.rms_norm`.
        device, dtype: of the weight.

    Shape:
        x: (..., *normalized_shape), float16, bfloat16 or float32 (float64 on the torch backend); the result
        has the shape and dtype of x.

    Raises:
        TypeError: an option of another type, an x that is not a tensor.
        ValueError: an option out of range.
        RuntimeError: the shape of x does not end in normalized_shape, and as :func:`liger.rms_norm`.

    Example::

        >>> norm = liger.nn.RMSNorm(64, eps=1e-6)
        >>> y = norm(torch.randn(2, 10, 64))

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """

    weight: nn.Parameter | None

    @arguments(**_RULES)
    def __init__(
        self,
        normalized_shape: Sizes,
        eps: float | None = None,
        elementwise_affine: bool = True,
        offset: float = 0.0,
        casting_mode: CastingMode = "llama",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _sizes(normalized_shape)
        self.eps, self.offset, self.casting_mode = eps, offset, casting_mode
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight so that ``offset + weight`` is one."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    @arguments(late=True)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = torch.finfo(accumulate_dtype(x.dtype)).eps if self.eps is None else self.eps
        dims = len(self.normalized_shape)
        _require_shape("RMSNorm", x, self.normalized_shape)
        if dims == 1:
            return rms_norm(x, self.weight, eps, self.offset, self.casting_mode)
        weight = None if self.weight is None else self.weight.flatten()
        y = rms_norm(x.flatten(-dims), weight, eps, self.offset, self.casting_mode)
        return y.unflatten(-1, self.normalized_shape)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, "
            f"offset={self.offset}, casting_mode={self.casting_mode!r}"
        )


class RMSNormGated(nn.Module):
    """Root-mean-square normalisation with a gate, as ``RMSNormGated`` of Hugging Face models.

    With ``norm(h) = h * rsqrt(mean(h^2) + eps)``: ``y = norm(x) * (offset + weight) * silu(gate)``, or
    without ``norm_before_gate`` ``y = norm(x * silu(gate)) * (offset + weight)``.

    Args:
        hidden_size: the size of the last dimension.
        eps: added to the mean square.
        group_size: each ``group_size`` consecutive elements are normalised alone; None for the whole
            dimension.
        norm_before_gate: True as in Qwen3-Next, False as in Mamba2.
        activation: of the gate, ``"silu"`` or ``"sigmoid"``.
        offset: added to the weight, which starts so that the sum is one.
        casting_mode: ``"llama"``, ``"gemma"`` or ``"none"``, as in :func:`liger.rms_norm_gated`.
        device, dtype: of the weight.

    Shape:
        x and gate: (..., hidden_size), float16, bfloat16 or float32 (float64 on the torch backend); the
        result has the shape and dtype of x.

    Raises:
        TypeError: an option of another type, an x or gate that is not a tensor.
        ValueError: an option out of range, or a group_size that does not divide hidden_size.
        RuntimeError: as :func:`liger.rms_norm_gated`.

    Example::

        >>> norm = liger.nn.RMSNormGated(64, group_size=16)
        >>> y = norm(torch.randn(2, 10, 64), torch.randn(2, 10, 64))

    Source: as :func:`liger.rms_norm_gated`.
    """

    @arguments(**_RULES)
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        activation: GateActivation = "silu",
        offset: float = 0.0,
        casting_mode: CastingMode = "llama",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if group_size is not None and hidden_size % group_size:
            raise ValueError(
                f"RMSNormGated: group_size is {group_size}, expected a divisor of hidden_size, {hidden_size}"
            )
        self.hidden_size, self.eps, self.group_size = hidden_size, eps, group_size
        self.norm_before_gate, self.activation = norm_before_gate, activation
        self.offset, self.casting_mode = offset, casting_mode
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight so that ``offset + weight`` is one."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    @arguments(late=True)
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gating = self.group_size, self.norm_before_gate, self.activation
        return rms_norm_gated(x, gate, self.weight, self.eps, self.offset, self.casting_mode, *gating)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, group_size={self.group_size}, "
            f"norm_before_gate={self.norm_before_gate}, activation={self.activation!r}, offset={self.offset}, "
            f"casting_mode={self.casting_mode!r}"
        )


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimensions; the constructor of :class:`torch.nn.LayerNorm`.

    ``y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias``, with statistics in float32.

    Args:
        normalized_shape: the size of the last dimension, or the sizes of the last dimensions.
        eps: added to the variance.
        elementwise_affine: whether there is a weight, initially one.
        bias: whether there is also a bias, initially zero. No bias without a weight.
        device, dtype: of the parameters.

    Shape:
        x: (..., *normalized_shape), float16, bfloat16 or float32 (float64 on the torch backend); the result
        has the shape and dtype of x.

    Raises:
        TypeError: an option of another type, an x that is not a tensor.
        ValueError: an option out of range.
        RuntimeError: the shape of x does not end in normalized_shape, and as :func:`liger.layer_norm`.

    Example::

        >>> norm = liger.nn.LayerNorm(64)
        >>> y = norm(torch.randn(2, 10, 64))

    Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @arguments(**_RULES)
    def __init__(
        self,
        normalized_shape: Sizes,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _sizes(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        for name, exists in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            parameter = None
            if exists:
                parameter = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to one and the bias to zero."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @arguments(late=True)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = len(self.normalized_shape)
        _require_shape("LayerNorm", x, self.normalized_shape)
        if dims == 1:
            return layer_norm(x, self.weight, self.bias, self.eps)
        weight, bias = (None if p is None else p.flatten() for p in (self.weight, self.bias))
        return layer_norm(x.flatten(-dims), weight, bias, self.eps).unflatten(-1, self.normalized_shape)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, "
            f"bias={self.bias is not None}"
        )


class GroupNorm(nn.Module):
    """Group normalisation of channels; the constructor of :class:`torch.nn.GroupNorm`.

    ``y = (x - mean) * rsqrt(var + eps) * weight + bias``, with the statistics of each group of channels of
    each sample, in float32.

    Args:
        num_groups: a divisor of ``num_channels``.
        num_channels: the size of the second dimension of x.
        eps: added to the variance.
        affine: whether there are a weight, initially one, and a bias, initially zero.
        device, dtype: of the parameters.

    Shape:
        x: (N, num_channels, ...), float16, bfloat16 or float32 (float64 on the torch backend); the result has
        the shape and dtype of x.

    Raises:
        TypeError: an option of another type, an x that is not a tensor.
        ValueError: an option out of range, or a num_groups that does not divide num_channels.
        RuntimeError: an x with another number of channels, and as :func:`liger.group_norm`.

    Example::

        >>> norm = liger.nn.GroupNorm(8, 64)
        >>> y = norm(torch.randn(2, 64, 10, 10))

    Source: Wu and He, "Group Normalization", arXiv 1803.08494.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @arguments(**_RULES)
    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise ValueError(
                f"{type(self).__name__}: num_groups is {num_groups}, expected a divisor of num_channels, {num_channels}"
            )
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        for name in ("weight", "bias"):
            parameter = (
                nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype)) if affine else None
            )
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to one and the bias to zero."""
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    @arguments(late=True)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 2 or x.shape[1] != self.num_channels:
            raise wrong_shape("GroupNorm", "x", x, f"(batch, {self.num_channels}, ...)")
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"
