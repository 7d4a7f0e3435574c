# SPDX-License-Identifier: BSD-3-Clause
"""SwiGLU, ``silu(gate) * up`` (Shazeer, arXiv 2002.05202): the gated product with SiLU."""

from __future__ import annotations

import torch

from .._core.op.arguments import FLAG, arguments
from .._core.op.backend import register_family
from . import gated

_SILU = "silu"

# --- torch backend ------------------------------------------------------------------------------------------


def swiglu_torch(gate, up):
    return gated.product(gate, up, _SILU)


def swiglu_backward_torch(grad_out, gate, up, emit_product=False):
    return gated.backward(grad_out, gate, up, emit_product, _SILU)


def swiglu_backward__torch(grad_out, gate, up):
    gated.backward_(grad_out, gate, up, _SILU)


def swiglu_backward_product__torch(grad_out, gate, up):
    gated.backward_product_(grad_out, gate, up, _SILU)


def swiglu_packed_torch(gate_up):
    return gated.packed_product(gate_up, _SILU)


def swiglu_packed_backward_torch(grad_out, gate_up, emit_product=False):
    return gated.packed_backward(grad_out, gate_up, emit_product, _SILU)


def swiglu_packed_backward__torch(grad_out, gate_up):
    gated.packed_backward_(grad_out, gate_up, _SILU)


register_family(
    "swiglu",
    {
        "swiglu": swiglu_torch,
        "swiglu_backward": swiglu_backward_torch,
        "swiglu_backward_": swiglu_backward__torch,
        "swiglu_backward_product_": swiglu_backward_product__torch,
        "swiglu_packed": swiglu_packed_torch,
        "swiglu_packed_backward": swiglu_packed_backward_torch,
        "swiglu_packed_backward_": swiglu_packed_backward__torch,
    },
    "liger.triton_kernels.swiglu",
)


# --- fakes, autograd, vmap ----------------------------------------------------------------------------------

_swiglu, _swiglu_packed = gated.gated_forms("swiglu")


# --- public API ---------------------------------------------------------------------------------------------


@arguments(late=True, enters=True, inplace=FLAG)
def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    inplace: bool = False,
) -> torch.Tensor:
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
def swiglu_packed(
    gate_up: torch.Tensor,
    inplace: bool = False,
) -> torch.Tensor:
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
