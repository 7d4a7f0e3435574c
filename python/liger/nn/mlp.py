"""The gated MLPs of Llama-like and Gemma-like models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._core.arguments import ANYTHING, COUNT, DTYPE, FLAG, arguments, choice
from .._core.linear_layers import caller_owns_output
from .._core.types import Approximate, Device
from ..ops.geglu import geglu
from ..ops.swiglu import swiglu

_OPTIONS: dict[str, Any] = {
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "bias": FLAG,
    "inplace": FLAG,
    "approximate": choice(Approximate),
    "device": ANYTHING,
    "dtype": DTYPE,
}


class _GatedMLP(nn.Module):
    @arguments(**_OPTIONS)
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        inplace: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.inplace = inplace
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device=device, dtype=dtype)

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
        inplace: the backward overwrites gate and up, which only this module uses, with their gradients. It saves their
            memory. Gate and up are not overwritten under ``retain_graph=True``, nor with forward hooks on a projection
            (or global ones), nor if a projection was replaced by a layer that may need its output.
        device, dtype: of the parameters.

    Shape:
        x: (..., hidden_size), float16, bfloat16 or float32 (float64 on the torch backend); the result has the shape and
        dtype of x.

    Raises:
        TypeError: an option of another type, an x that is not a tensor.
        ValueError: a size that is not positive.
        RuntimeError: as ``torch.nn.functional.linear`` and :func:`liger.swiglu`.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """

    @arguments(late=True)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), inplace=self._may_overwrite()))


class GEGLUMLP(_GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, with the submodule names of Hugging Face's GemmaMLP.

    Args:
        hidden_size, intermediate_size, bias, inplace, device, dtype: as in :class:`SwiGLUMLP`.
        approximate: ``"tanh"``, as in Gemma, or ``"none"`` for the exact GELU.

    Shape:
        As :class:`SwiGLUMLP`.

    Raises:
        TypeError, RuntimeError: as :class:`SwiGLUMLP`.
        ValueError: a size that is not positive, an unknown approximation.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """

    @arguments(**_OPTIONS)
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        inplace: bool = True,
        approximate: Approximate = "tanh",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias, inplace, device, dtype)
        self.approximate = approximate

    @arguments(late=True)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = geglu(self.gate_proj(x), self.up_proj(x), self.approximate, inplace=self._may_overwrite())
        return self.down_proj(product)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, {super().extra_repr()}"
