# SPDX-License-Identifier: BSD-3-Clause
"""The gated MLPs of Llama-like and Gemma-like models."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn

from .._core.modules.linear_layers import caller_owns_output
from .._core.op.arguments import MODULE, arguments, choice
from .._core.op.types import Approximate, Device
from ..ops.geglu import geglu
from ..ops.swiglu import swiglu

OPTIONS: dict[str, Any] = {**MODULE, "approximate": choice(Approximate)}

# Hugging Face's name of an activation -> the options of the module that it stands for.
Activations: TypeAlias = dict[str, dict[str, Any]]
SILU: Activations = {"silu": {}, "swish": {}}
GELU: Activations = {
    "gelu": {"approximate": "none"},
    "gelu_python": {"approximate": "none"},
    "gelu_new": {"approximate": "tanh"},
    "gelu_pytorch_tanh": {"approximate": "tanh"},
    "gelu_accurate": {"approximate": "tanh"},
}


def options_of(name: str, config: Any, activations: Activations) -> dict[str, Any]:
    """Constructor arguments of the MLP ``name`` from a configuration. Raises ValueError for an activation
    that is not among ``activations``."""
    # Gemma's configurations have both; hidden_activation is the one that its MLP uses.
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in activations:
        raise ValueError(
            f"{name}: the activation of the configuration is {activation!r}, expected one of {', '.join(activations)}"
        )
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "bias": getattr(config, "mlp_bias", False),
        **activations[activation],
    }


class Projections(nn.Module):
    """The submodules of all gated MLPs, with the names of Hugging Face."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, device: Device, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device=device, dtype=dtype)


class _GatedMLP(Projections):
    inplace: bool

    def _may_overwrite(self) -> bool:
        return self.inplace and caller_owns_output(self.gate_proj) and caller_owns_output(self.up_proj)

    def extra_repr(self) -> str:
        return f"inplace={self.inplace}"


class SwiGLUMLP(_GatedMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, with the submodule names of Hugging Face's LlamaMLP.

    Args:
        hidden_size: size of the last dimension of x and of the result.
        intermediate_size: size of the last dimension of gate and up.
        bias: whether the three projections have a bias.
        inplace: the backward overwrites gate and up, which only this module uses, with their gradients. It
            saves their memory. Gate and up are not overwritten under ``retain_graph=True``, nor with forward
            hooks on a projection (or global ones), nor if a projection was replaced by a layer that may need
            its output.
        device, dtype: of the parameters.

    Shape:
        x: (..., hidden_size), float16, bfloat16 or float32 (float64 on the torch backend); the result has the
        shape and dtype of x.

    Raises:
        TypeError: an option of another type, an x that is not a tensor.
        ValueError: a size that is not positive.
        RuntimeError: as ``torch.nn.functional.linear`` and :func:`liger.swiglu`.

    Example::

        >>> mlp = liger.nn.SwiGLUMLP(64, 192, inplace=True)
        >>> y = mlp(torch.randn(2, 10, 64))

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """

    @arguments(**OPTIONS)
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        inplace: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias, device, dtype)
        self.inplace = inplace

    @classmethod
    def from_config(
        cls, config: Any, inplace: bool = False, device: Device = None, dtype: torch.dtype | None = None
    ) -> SwiGLUMLP:
        """The MLP of a Hugging Face configuration, or of any object with ``hidden_size``,
        ``intermediate_size``, ``hidden_activation`` or ``hidden_act``, and ``mlp_bias`` if the projections
        have biases.

        Raises:
            ValueError: the configuration has another activation.
        """
        return cls(**options_of(cls.__name__, config, SILU), inplace=inplace, device=device, dtype=dtype)

    @arguments(late=True)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), inplace=self._may_overwrite()))


class GEGLUMLP(_GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, with the submodule names of Hugging Face's GemmaMLP.

    Args:
        hidden_size, intermediate_size, bias, inplace, device, dtype: as in :class:`SwiGLUMLP`.
        approximate: ``"none"`` for the exact GELU, or ``"tanh"``, as in Gemma.

    Shape:
        As :class:`SwiGLUMLP`.

    Raises:
        TypeError, RuntimeError: as :class:`SwiGLUMLP`.
        ValueError: a size that is not positive, an unknown approximation.

    Example::

        >>> mlp = liger.nn.GEGLUMLP(64, 192, approximate="tanh")
        >>> y = mlp(torch.randn(2, 10, 64))

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """

    @arguments(**OPTIONS)
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        approximate: Approximate = "none",
        inplace: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias, device, dtype)
        self.approximate, self.inplace = approximate, inplace

    @classmethod
    def from_config(
        cls, config: Any, inplace: bool = False, device: Device = None, dtype: torch.dtype | None = None
    ) -> GEGLUMLP:
        """As :meth:`SwiGLUMLP.from_config`; the activation decides ``approximate``: ``"gelu"`` is the exact
        one, ``"gelu_pytorch_tanh"`` and ``"gelu_new"`` are its approximation by tanh."""
        return cls(**options_of(cls.__name__, config, GELU), inplace=inplace, device=device, dtype=dtype)

    @arguments(late=True)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = geglu(self.gate_proj(x), self.up_proj(x), self.approximate, inplace=self._may_overwrite())
        return self.down_proj(product)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, {super().extra_repr()}"
