# SPDX-License-Identifier: BSD-3-Clause
"""GeGLU, ``gelu(gate) * up`` (Shazeer, arXiv 2002.05202): the gated product with GELU, exact or by tanh."""

import torch

from .._core.op.arguments import FLAG, TEXT, arguments
from .._core.op.types import Approximate
from .gated import GELU_NAMES, register_gated

_geglu, _geglu_packed = register_gated("geglu", lambda a: GELU_NAMES[a.approximate])


@arguments(late=True, enters=True, approximate=TEXT, inplace=FLAG)
def geglu(
    gate: torch.Tensor, up: torch.Tensor, approximate: Approximate = "none", inplace: bool = False
) -> torch.Tensor:
    """``gelu(gate) * up``, elementwise, in float32 and rounded once.

    Args:
        gate: any shape of at least one dimension, float16, bfloat16 or float32 (float64 on the torch
            backend), any strides.
        up: the shape, dtype and device of gate.
        approximate: as in :func:`torch.nn.functional.gelu`: ``"none"`` for
            ``gate * (1 + erf(gate / sqrt(2))) / 2``, ``"tanh"`` for its approximation by tanh, which Gemma
            and most other models with GeGLU use.
        inplace: the backward overwrites gate and up with their gradients, which saves the memory of both. Set
            it if nothing else reads them, as in an MLP: autograd raises if it needs their old values. No
            effect in compiled code, if the graph is retained, or if gate or up needs no gradient, shares
            memory with the other, or overlaps itself.

    Returns:
        A tensor with the shape, dtype and, if dense, strides of gate. Differentiable in gate and up.

    Raises:
        TypeError: an argument of another type.
        ValueError: an unknown approximation.
        RuntimeError: mismatched shapes, dtypes or devices. With ``inplace``: gate or up is a leaf that
            requires grad.

    Example::

        >>> gate, up = torch.randn(2, 10, 192), torch.randn(2, 10, 192)
        >>> y = liger.geglu(gate, up, approximate="tanh")

    Sources: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202; Hendrycks and Gimpel, "Gaussian
    Error Linear Units", arXiv 1606.08415.
    """
    return _geglu((gate, up), inplace, approximate)


@arguments(late=True, enters=True, approximate=TEXT, inplace=FLAG)
def geglu_packed(
    gate_up: torch.Tensor, approximate: Approximate = "none", inplace: bool = False
) -> torch.Tensor:
    """``gelu(gate) * up`` of one tensor that holds gate and up side by side.

    Args:
        gate_up: (..., 2I), gate first; dtypes and strides as in :func:`geglu`.
        approximate: as in :func:`geglu`.
        inplace: the backward overwrites gate_up with its gradient, as in :func:`geglu`.

    Returns:
        (..., I), contiguous, with the dtype of gate_up. Differentiable in gate_up.

    Raises:
        TypeError: an argument of another type.
        ValueError: an unknown approximation.
        RuntimeError: an odd last dimension or a dtype that is not floating, and with ``inplace`` as in
            :func:`geglu`.

    Example::

        >>> gate_up = torch.nn.Linear(64, 2 * 192)(torch.randn(2, 10, 64))
        >>> y = liger.geglu_packed(gate_up, approximate="tanh")

    Sources: as :func:`geglu`.
    """
    return _geglu_packed((gate_up,), inplace, approximate)
