# SPDX-License-Identifier: BSD-3-Clause
"""Rotary embedding with complex tables (Llama 4, and Meta's code): interleaved :func:`liger.rope` with the
real and imaginary parts as cos and sin."""

from typing import Literal

import torch

from ..._core.op.arguments import FLAG, INTEGER, arguments
from ..._core.op.tensors import check_device, wrong_dtype
from .op import check_heads, rope


def _check_table(q, tokens, freqs_cis):
    if not freqs_cis.is_complex():
        raise wrong_dtype("complex_rope", "freqs_cis", freqs_cis, "a complex one")
    leading, pairs = list(freqs_cis.shape[:-1]), freqs_cis.shape[-1] if freqs_cis.dim() else 0
    if leading not in ([tokens], [1, tokens], [q.shape[0], tokens]) or 2 * pairs > q.shape[-1]:
        raise RuntimeError(
            f"complex_rope: freqs_cis has shape {tuple(freqs_cis.shape)}, expected (tokens, rotary_dim / 2) or (batch, "
            f"tokens, rotary_dim / 2) for q of shape {tuple(q.shape)}"
        )
    check_device("complex_rope", "freqs_cis", freqs_cis, "q", q)
    if torch.is_grad_enabled() and freqs_cis.requires_grad:
        raise RuntimeError(
            "complex_rope: freqs_cis requires grad, but complex_rope is differentiable in q and k only"
        )


@arguments(unsqueeze_dim=INTEGER, inplace=FLAG)
def complex_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    freqs_cis: torch.Tensor,
    unsqueeze_dim: Literal[1, 2] = 2,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each pair of neighbouring elements of q and k, as a complex number, times an element of freqs_cis.

    Args:
        q, k: (B, T, H, D) or, with ``unsqueeze_dim=1``, (B, H, T, D); otherwise as in :func:`liger.rope`.
        freqs_cis: (T, R/2), (1, T, R/2) or (B, T, R/2), complex64 or complex128, R at most D: the elements
            from R on are copied. It gets no gradient. Absolute values other than 1 scale the result
            (attention scaling).
        unsqueeze_dim: the dimension of the heads in q and k, 1 or 2. Unlike :func:`liger.rope` with its
            default 1, the default is 2: Llama 4 rotates before it transposes the heads.
        inplace: as in :func:`liger.rope`.

    Returns:
        (q, k) rotated, as :func:`liger.rope` returns them. Differentiable in q and k.

    Raises:
        TypeError: an argument of another type.
        ValueError: unsqueeze_dim is neither 1 nor 2.
        RuntimeError: freqs_cis is not complex or requires grad, and as :func:`liger.rope`.

    Example::

        >>> q, k, angles = torch.randn(1, 10, 8, 64), torch.randn(1, 10, 2, 64), torch.randn(10, 32)
        >>> q, k = liger.complex_rope(q, k, torch.polar(torch.ones_like(angles), angles))

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864,
    equation 13.
    """
    check_heads("complex_rope", q, k, unsqueeze_dim)
    _check_table(q, q.shape[3 - unsqueeze_dim], freqs_cis)
    # (..., R/2, 2) real and imaginary parts; both elements of a pair use the same ones.
    parts = torch.view_as_real(freqs_cis.resolve_conj())
    cos, sin = (parts[..., i].repeat_interleave(2, dim=-1) for i in (0, 1))
    return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, interleaved=True, inplace=inplace)
