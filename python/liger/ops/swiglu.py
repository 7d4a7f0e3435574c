# SPDX-License-Identifier: BSD-3-Clause
"""SwiGLU, ``silu(gate) * up`` (Shazeer, arXiv 2002.05202): the gated product with SiLU."""

import torch

from .._core.op.arguments import FLAG, arguments
from .gated import register_gated

_swiglu, _swiglu_packed = register_gated("swiglu", lambda a: "silu")


@arguments(late=True, enters=True, inplace=FLAG)
def swiglu(gate: torch.Tensor, up: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """``silu(gate) * up``, elementwise, in float32 and rounded once.

    Args:
        gate: any shape of at least one dimension, float16, bfloat16 or float32 (float64 on the torch
            backend), any strides.
        up: the shape, dtype and device of gate.
        inplace: the backward overwrites gate and up with their gradients, which saves the memory of both. Set
            it if nothing else reads them, as in an MLP: autograd raises if it needs their old values. No
            effect in compiled code, if the graph is retained, or if gate or up needs no gradient, shares
            memory with the other, or overlaps itself.

    Returns:
        A tensor with the shape, dtype and, if dense, strides of gate. Differentiable in gate and up.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: mismatched shapes, dtypes or devices. With ``inplace``: gate or up is a leaf that
            requires grad.

    Example::

        >>> gate, up = torch.randn(2, 10, 192), torch.randn(2, 10, 192)
        >>> y = liger.swiglu(gate, up)

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """
    return _swiglu((gate, up), inplace)


@arguments(late=True, enters=True, inplace=FLAG)
def swiglu_packed(gate_up: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """``silu(gate) * up`` of one tensor that holds gate and up side by side.

    Args:
        gate_up: (..., 2I), gate first; dtypes and strides as in :func:`swiglu`.
        inplace: the backward overwrites gate_up with its gradient, as in :func:`swiglu`.

    Returns:
        (..., I), contiguous, with the dtype of gate_up. Differentiable in gate_up.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: an odd last dimension or a dtype that is not floating, and with ``inplace`` as in
            :func:`swiglu`.

    Example::

        >>> gate_up = torch.nn.Linear(64, 2 * 192)(torch.randn(2, 10, 64))
        >>> y = liger.swiglu_packed(gate_up)

    Source: as :func:`swiglu`.
    """
    return _swiglu_packed((gate_up,), inplace)
