# SPDX-License-Identifier: BSD-3-Clause
"""Rotary embedding of tokens with positions in time, height and width (Qwen2-VL and later):
:func:`liger.rope` with a merged table, in which every pair of elements uses one of the three positions.

The queries are larger than the tables by the number of heads, so merging the tables costs little compared
with the rotation.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from ..._core.op.arguments import FLAG, INTEGER, Rule, arguments
from ..._core.op.tensors import check_device, check_floating, check_like, check_shape, wrong_shape
from .op import check_heads, rope

_AXES = 3  # time, height, width


_SECTION = Rule("three integers", lambda v: isinstance(v, (list, tuple)) and all(map(INTEGER.has_type, v)))


def _check_tables(q, tokens_dim, cos, sin):
    batch, tokens, head_dim = q.shape[0], q.shape[tokens_dim], q.shape[-1]
    for name, table in (("cos", cos), ("sin", sin)):
        check_floating("mrope", name, table)
        if table.dim() != 4 or table.shape[0] != _AXES or table.shape[-1] % 2:
            raise wrong_shape("mrope", name, table, "(3, batch, tokens, rotary_dim), rotary_dim even")
    if cos.shape[1] not in (1, batch) or cos.shape[2] != tokens or cos.shape[3] > head_dim:
        raise RuntimeError(
            f"mrope: cos has shape {tuple(cos.shape)}, expected (3, {batch}, {tokens}, rotary_dim), rotary_dim at most "
            f"{head_dim}, for q of shape {tuple(q.shape)}"
        )
    check_shape("mrope", "sin", sin, cos.shape, "the shape of cos")
    check_like("mrope", "sin", sin, "cos", cos)
    check_device("mrope", "cos", cos, "q", q)


def _check_section(table, section, interleaved):
    half = table.shape[-1] // 2
    if len(section) != _AXES or min(section) < 0 or sum(section) != half:
        raise ValueError(
            f"mrope: mrope_section is {list(section)}, expected three sizes that add up to half of rotary_dim, {half}"
        )
    # Height and width use every third pair, from the second and the third pair on; all must be within the
    # table.
    if interleaved and any(
        3 * (size - 1) + axis >= half for axis, size in enumerate(section) if axis and size
    ):
        raise ValueError(
            f"mrope: mrope_section is {list(section)}, which {half} interleaved pairs do not hold"
        )


def _merged(table, section, interleaved):
    """(batch, tokens, rotary_dim): for every pair the value of its axis, in both halves."""
    half = table.shape[-1] // 2
    halves = []
    for values in table.split(half, -1):
        if interleaved:
            merged = values[0].clone()
            for axis in (1, 2):
                pairs = slice(axis, _AXES * section[axis], _AXES)
                merged[..., pairs] = values[axis, ..., pairs]
        else:
            merged = torch.cat([block[axis] for axis, block in enumerate(values.split(section, -1))], -1)
        halves.append(merged)
    return torch.cat(halves, -1)


@arguments(mrope_section=_SECTION, unsqueeze_dim=INTEGER, interleaved_sections=FLAG, inplace=FLAG)
def mrope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mrope_section: Sequence[int],
    unsqueeze_dim: Literal[1, 2] = 1,
    interleaved_sections: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multimodal rotary position embedding of queries and keys.

    Args:
        q, k: as in :func:`liger.rope`: (B, H, T, D), or (B, T, H, D) with ``unsqueeze_dim=2``.
        cos, sin: (3, B, T, R), any floating dtype: the tables of the positions in time, height and width, R
            even and at most D, with equal halves as in Hugging Face. They get no gradient.
        mrope_section: the numbers of pairs for time, height and width; their sum is R/2.
        unsqueeze_dim: the dimension of the heads in q and k, 1 or 2.
        interleaved_sections: pairs alternate between time, height and width; when the sections of height and
            width are exhausted, the remaining pairs use time (Qwen3-VL). Default: consecutive sections
            (Qwen2-VL, Qwen2.5-VL).
        inplace: as in :func:`liger.rope`.

    Returns:
        (q, k) rotated, as :func:`liger.rope` returns them. Differentiable in q and k.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: tables of another shape, and as :func:`liger.rope`.
        ValueError: sections whose sum is not R/2 or, interleaved, that exceed the table; an unsqueeze_dim
            other than 1 and 2.

    Example::

        >>> q, k, angles = torch.randn(1, 8, 10, 64), torch.randn(1, 2, 10, 64), torch.randn(3, 1, 10, 64)
        >>> q, k = liger.mrope(q, k, angles.cos(), angles.sin(), mrope_section=(8, 12, 12))

    Source: Wang et al., "Qwen2-VL", arXiv 2409.12191; the interleaved layout: "Qwen3-VL Technical Report",
    arXiv 2511.21631.
    """
    check_heads("mrope", q, k, unsqueeze_dim)
    _check_tables(q, 3 - unsqueeze_dim, cos, sin)
    section = list(mrope_section)
    _check_section(cos, section, interleaved_sections)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise RuntimeError("mrope: cos or sin requires grad, but mrope is differentiable in q and k only")
    cos, sin = (_merged(table, section, interleaved_sections) for table in (cos, sin))
    return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, inplace=inplace)
