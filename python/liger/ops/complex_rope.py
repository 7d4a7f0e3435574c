"""Rotary embedding from complex numbers (Llama 4, and the code that Meta publishes): :func:`liger.rope` of neighbouring
entries, with the real and imaginary parts as its tables."""

import torch

from .rope import rope


def complex_rope(q, k, freqs_cis, unsqueeze_dim=2, inplace=False):
    """Every pair of neighbouring entries of q and k, as a complex number, times one of freqs_cis.

    Args:
        q, k: (B, T, H, D) or, with ``unsqueeze_dim=1``, (B, H, T, D); otherwise as in :func:`liger.rope`.
        freqs_cis: (T, R/2) or (B, T, R/2), complex64 or complex128, R at most D: the entries from R on pass through.
            It gets no gradient. Its absolute value scales (attention scaling).
        unsqueeze_dim: the dimension of the heads in q and k, 1 or 2.
        inplace: as in :func:`liger.rope`.

    Returns:
        (q, k) rotated. Differentiable in q and k.

    Raises:
        RuntimeError: freqs_cis is not complex, and what :func:`liger.rope` raises.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864, equation 13.
    """
    if not freqs_cis.is_complex():
        raise RuntimeError(f"complex_rope: freqs_cis has dtype {freqs_cis.dtype}, expected a complex one")
    # (..., R/2, 2) of real and imaginary parts, each of which stands for both entries of its pair.
    parts = torch.view_as_real(freqs_cis)
    cos, sin = (parts[..., i].repeat_interleave(2, dim=-1) for i in (0, 1))
    return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, interleaved=True, inplace=inplace)
