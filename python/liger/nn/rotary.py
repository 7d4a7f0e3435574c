# SPDX-License-Identifier: BSD-3-Clause
"""Rotary position embedding as a module."""

from typing import Literal

import torch
from torch import nn

from .._core.op.arguments import FLAG, INTEGER, arguments
from ..ops.rope.op import check_heads_dim, rope


class ApplyRotaryEmb(nn.Module):
    """Rotates queries and keys by given cosines and sines, both in one pass.

    Args:
        interleaved: pairs are entries (2i, 2i + 1) of a head instead of (i, i + rotary_dim / 2).
        unsqueeze_dim: the dimension of the heads in q and k: 1 for (B, H, T, D), 2 for (B, T, H, D).

    Shape:
        q: (B, Hq, T, D); k: (B, Hk, T, D); cos, sin: (T, R), (1, T, R) or (B, T, R) with R <= D. Dtypes as in
        :func:`liger.rope`. The results have the shapes and dtypes of q and k.

    Raises:
        TypeError: an option of another type.
        ValueError: unsqueeze_dim is neither 1 nor 2.
        RuntimeError: in the forward, as :func:`liger.rope`.

    Example::

        >>> q, k, angles = torch.randn(1, 8, 10, 64), torch.randn(1, 2, 10, 64), torch.randn(10, 64)
        >>> q, k = liger.nn.ApplyRotaryEmb()(q, k, angles.cos(), angles.sin())

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864.
    """

    @arguments(interleaved=FLAG, unsqueeze_dim=INTEGER)
    def __init__(self, interleaved: bool = False, unsqueeze_dim: Literal[1, 2] = 1) -> None:
        super().__init__()
        check_heads_dim(type(self).__name__, unsqueeze_dim)
        self.interleaved, self.unsqueeze_dim = interleaved, unsqueeze_dim

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rope(q, k, cos, sin, self.unsqueeze_dim, self.interleaved)

    def extra_repr(self) -> str:
        return f"interleaved={self.interleaved}, unsqueeze_dim={self.unsqueeze_dim}"
