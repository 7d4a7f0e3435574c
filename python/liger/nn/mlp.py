"""The gated MLPs of Llama-like and Gemma-like models."""

from typing import Any

from torch import nn

from .._core.arguments import ANYTHING, COUNT, DTYPE, FLAG, TEXT, arguments
from ..ops.geglu import geglu
from ..ops.swiglu import swiglu

_OPTIONS: dict[str, Any] = {
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "bias": FLAG,
    "inplace": FLAG,
    "approximate": TEXT,
    "device": ANYTHING,
    "dtype": DTYPE,
}


class _GatedMLP(nn.Module):
    @arguments(error=ValueError, **_OPTIONS)
    def __init__(self, hidden_size, intermediate_size, bias=False, inplace=True, device=None, dtype=None):
        super().__init__()
        self.inplace = inplace
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device=device, dtype=dtype)

    def extra_repr(self):
        return f"inplace={self.inplace}"


class SwiGLUMLP(_GatedMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, with the submodule names of Hugging Face's LlamaMLP.

    Args:
        hidden_size: size of the last dimension of x and of the result.
        intermediate_size: size of the last dimension of gate and up.
        bias: whether the three projections have a bias.
        inplace: the backward writes its gradients over gate and up, which nothing outside this module holds. It saves
            their memory; a graph kept by ``retain_graph=True`` is left alone.
        device, dtype: of the parameters.

    Shape:
        x: (..., hidden_size); the result too.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """

    @arguments(late=True)
    def forward(self, x):
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), inplace=self.inplace))


class GEGLUMLP(_GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, with the submodule names of Hugging Face's GemmaMLP.

    Args:
        hidden_size, intermediate_size, bias, inplace, device, dtype: as in :class:`SwiGLUMLP`.
        approximate: ``"tanh"``, as in Gemma, or ``"none"`` for the exact GELU.

    Shape:
        x: (..., hidden_size); the result too.

    Raises:
        ValueError: another approximation.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """

    @arguments(error=ValueError, **_OPTIONS)
    def __init__(
        self, hidden_size, intermediate_size, bias=False, inplace=True, approximate="tanh", device=None, dtype=None
    ):  # fmt: skip
        if approximate not in ("none", "tanh"):
            raise ValueError(f"GEGLUMLP: approximate is {approximate!r}, expected 'none' or 'tanh'")
        super().__init__(hidden_size, intermediate_size, bias, inplace, device, dtype)
        self.approximate = approximate

    @arguments(late=True)
    def forward(self, x):
        product = geglu(self.gate_proj(x), self.up_proj(x), self.approximate, inplace=self.inplace)
        return self.down_proj(product)

    def extra_repr(self):
        return f"approximate={self.approximate!r}, {super().extra_repr()}"
