"""The gated MLP of Llama-like models."""

from torch import nn

from ..ops.swiglu import swiglu


class SwiGLUMLP(nn.Module):
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

    def __init__(self, hidden_size, intermediate_size, bias=False, inplace=True, device=None, dtype=None):
        super().__init__()
        self.inplace = inplace
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device=device, dtype=dtype)

    def forward(self, x):
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), inplace=self.inplace))

    def extra_repr(self):
        return f"inplace={self.inplace}"
