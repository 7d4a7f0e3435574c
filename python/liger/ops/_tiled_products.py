"""The gated products that a tiled MLP is made of, ``activation(gate) * up``, each with a backward that works in place.

SwiGLU is an op with kernels of its own. GeGLU is written here in torch, in blocks of rows.
"""

import torch

from ._rows import row_blocks
from .rms_norm import accumulate_dtype

# Names of activations, and what torch calls the approximation of the two that are GELU.
_APPROXIMATIONS = {"gelu_tanh": "tanh", "gelu": "none"}


def _wide(*tensors):
    wide = accumulate_dtype(tensors[0].dtype)
    return (t.to(wide) for t in tensors)


def gated_product(gate, up, activation):
    """A new tensor ``activation(gate) * up``, contiguous, computed in float32. gate and up are (rows, columns)."""
    if activation == "silu":
        return torch.ops.liger.swiglu.default(gate, up)
    product = gate.new_empty(gate.shape)
    for block in row_blocks(gate):
        wide_gate, wide_up = _wide(gate[block], up[block])
        activated = torch.nn.functional.gelu(wide_gate, approximate=_APPROXIMATIONS[activation])
        product[block] = activated * wide_up
    return product


def gated_backward_(grad_out, gate, up, activation, emit_product):
    """Writes the gradients over gate and up and, with ``emit_product``, the product over grad_out."""
    if activation == "silu":
        if emit_product:
            torch.ops.liger.swiglu_backward_product_.default(grad_out, gate, up)
        else:
            torch.ops.liger.swiglu_backward_.default(grad_out, gate, up)
        return
    approximation = _APPROXIMATIONS[activation]
    for block in row_blocks(gate):
        grad, wide_gate, wide_up = _wide(grad_out[block], gate[block], up[block])
        activated = torch.nn.functional.gelu(wide_gate, approximate=approximation)
        grad_gate = torch.ops.aten.gelu_backward(grad * wide_up, wide_gate, approximate=approximation)
        grad_up, product = grad * activated, activated * wide_up
        gate[block], up[block] = grad_gate, grad_up
        if emit_product:
            grad_out[block] = product
