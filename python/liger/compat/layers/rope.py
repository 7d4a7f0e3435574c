# SPDX-License-Identifier: BSD-3-Clause
"""Rotary position embeddings, with the arguments of liger_kernel. Nothing is written in place."""

import torch

from ...ops.rope.complex_rope import complex_rope
from ...ops.rope.mrope import mrope
from ...ops.rope.op import rope


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """:func:`liger.rope` of q and k (B, heads, T, D).

    Args:
        cos, sin: (T, R), (B, T, R), or these with a dimension of size 1 for the heads; R is the rotary
            dimension, or half of it if the tables have one value per pair.
        position_ids: without effect: cos and sin belong to the positions.
        rotary_dim: the number of rotated elements of a head; None: the width of the tables, at most D.
    """
    tables = _tables(q, cos, sin, unsqueeze_dim, rotary_dim)
    return rope(q, k, *tables, unsqueeze_dim=unsqueeze_dim)


def _tables(q, cos, sin, unsqueeze_dim, rotary_dim):
    """(T, R) or (B, T, R) tables of the op."""
    if rotary_dim is None:
        rotary_dim = min(cos.shape[-1], q.shape[-1])
    tables = []
    for table in (cos, sin):
        if table.dim() == 4:
            table = table.squeeze(unsqueeze_dim)
        if 2 * table.shape[-1] == rotary_dim:
            table = torch.cat((table, table), -1)
        tables.append(table[..., :rotary_dim])
    return tables


@torch.no_grad()
def rope_forward(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """:func:`liger_rotary_pos_emb` without a graph: q, k, and cos and sin for :func:`rope_backward`."""
    q, k = liger_rotary_pos_emb(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)
    cos, sin = (t.squeeze(unsqueeze_dim) if t.dim() == 4 else t for t in (cos, sin))
    return q, k, *(t.unsqueeze(0) if t.dim() == 2 else t for t in (cos, sin))


@torch.no_grad()
def rope_backward(dq, dk, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """The gradients of q and k from the gradients of the results of :func:`rope_forward`."""
    tables = _tables(dq, cos, sin, unsqueeze_dim, rotary_dim)
    if unsqueeze_dim == 2:
        dq, dk = dq.transpose(1, 2), dk.transpose(1, 2)
    dq, dk = torch.ops.liger.rope_backward(dq, dk, *tables)
    return (dq.transpose(1, 2), dk.transpose(1, 2)) if unsqueeze_dim == 2 else (dq, dk)


liger_rope = liger_rotary_pos_emb


def liger_rotary_pos_emb_gpt_oss(q, k, cos, sin):
    """:func:`liger.rope` with tables (B, T, D / 2), which have one value per pair."""
    return liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q, k, cos, sin):
    """:func:`liger.rope` of q and k (T, heads, D) with tables (T, D), in float32 and rounded once."""
    q, k = rope(q.unsqueeze(0), k.unsqueeze(0), cos, sin, unsqueeze_dim=2)
    return q.squeeze(0), k.squeeze(0)


def liger_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """:func:`liger.mrope` with tables (3, B, T, D) and consecutive sections."""
    return mrope(q, k, cos, sin, mrope_section, unsqueeze_dim)


liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb


def liger_llama4_text_rotary_pos_emb(xq, xk, freqs_cis, BLOCK_SIZE=None):
    """:func:`liger.complex_rope` of xq and xk (B, T, heads, D).

    Args:
        freqs_cis: (T, D / 2), (B, T, D / 2), or these with dimensions of size 1; complex, or real (a complex
            table that was cast to a real dtype).
        BLOCK_SIZE: without effect.
    """
    table = freqs_cis.reshape(-1, xq.shape[1], freqs_cis.shape[-1])
    return complex_rope(xq, xk, table if table.is_complex() else table.to(torch.complex64))


def liger_llama4_vision_rotary_pos_emb(query, key, freqs_ci):
    """:func:`liger_llama4_text_rotary_pos_emb` of the vision tower."""
    return liger_llama4_text_rotary_pos_emb(query, key, freqs_ci)
