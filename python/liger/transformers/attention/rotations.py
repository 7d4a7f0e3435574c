# SPDX-License-Identifier: BSD-3-Clause
"""The forms in which models apply rotary embeddings, each as a call of liger.rope or liger.complex_rope.

A form has ``rotate(tensors, tables, unsqueeze)``, which returns the rotated tensors, or None if the op does
not take these arguments, and ``cases()``, the arguments of its trial.
"""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..._core.dtensor.inputs import is_dtensor
from ...ops.rope.complex_rope import complex_rope
from ...ops.rope.op import rope
from ..recipe import trials

# Functions without an argument for the dimension of the heads broadcast their tables along one of these.
FIXED_UNSQUEEZE = (-2, 1, -3)


@dataclass(frozen=True)
class Rotation:
    """A rotation by tables of cosines and sines.

    pairing: ``halves`` (elements i and i + R/2), ``interleaved`` (2i and 2i + 1), or ``split``: interleaved
        pairs, results as halves.
    table: ``full``: one number per element; ``first_half``: the code reads the first half of them; ``half``:
        one number per pair.
    negated: the rotation turns in the other direction.
    tail: the last R elements of a head are rotated, not the first ones.
    """

    pairing: str = "halves"
    table: str = "full"
    negated: bool = False
    tail: bool = False
    parameters: ClassVar[tuple] = ("cos", "sin")

    @property
    def is_of_heads(self):
        """True if the op gets whole heads in their own order, so that it may normalise them before."""
        return not self.tail and self.pairing != "split"

    def rotate(self, tensors, tables, unsqueeze, op=rope):
        """``op``: called with two tensors of heads, cos, sin, the dimension of the heads, and interleaved."""
        q = tensors[0]
        cos, sin = tables
        heads = _heads_dim(q, cos, unsqueeze)
        if heads is None or sin.shape != cos.shape or cos.requires_grad or sin.requires_grad:
            return None
        rotary = cos.shape[-1] * (2 if self.table == "half" else 1)
        if rotary > q.shape[-1] or rotary % 2 or not _like(tensors, cos, heads):
            return None
        cos, sin = self._expanded(cos), self._expanded(-sin if self.negated else sin)
        heads, *tensors = _four_dims(heads, *tensors)
        passed = [t[..., : t.shape[-1] - rotary] for t in tensors] if self.tail else None
        if self.tail:
            tensors = [t[..., t.shape[-1] - rotary :] for t in tensors]
        if self.pairing == "split":
            tensors = [_split_pairs(t, rotary) for t in tensors]
        interleaved = self.pairing == "interleaved"
        rotated = _pairwise(lambda q, k: op(q, k, cos, sin, heads, interleaved), tensors, heads)
        if self.tail and passed[0].shape[-1]:
            rotated = [torch.cat(parts, -1) for parts in zip(passed, rotated, strict=True)]
        return _as_given(rotated, q)

    def _expanded(self, table):
        if self.table == "full":
            return table
        half = table[..., : table.shape[-1] // 2] if self.table == "first_half" else table
        return half.repeat_interleave(2, -1) if self.pairing == "interleaved" else torch.cat((half, half), -1)

    def tables(self, random, *shape):
        """Pairs of tables for a trial: two values of R for heads of 8 elements."""
        for rotary in (8, 4):
            width = rotary // 2 if self.table == "half" else rotary
            # Independent random numbers: attention scaling may be part of either.
            yield random(*shape, width), random(*shape, width)


@dataclass(frozen=True)
class ComplexRotation:
    """Neighbouring elements, as complex numbers, times a table of complex numbers."""

    parameters: ClassVar[tuple] = ("freqs",)

    def rotate(self, tensors, tables, unsqueeze):
        q, (table,) = tensors[0], tables
        if not table.is_complex() or table.requires_grad or 2 * table.shape[-1] > q.shape[-1]:
            return None
        heads = _heads_dim(q, table, unsqueeze)
        if heads is None or not _like(tensors, table, heads):
            return None
        heads, *tensors = _four_dims(heads, *tensors)
        return _as_given(
            _pairwise(lambda q, k: complex_rope(q, k, table, unsqueeze_dim=heads), tensors, heads), q
        )

    def tables(self, random, *shape):
        yield (torch.complex(random(*shape, 4), random(*shape, 4)),)


FORMS: tuple[Rotation | ComplexRotation, ...] = (
    *(
        Rotation(pairing, table, negated, tail)
        for tail, negated, table, pairing in itertools.product(
            (False, True), (False, True), ("full", "first_half", "half"), ("halves", "interleaved", "split")
        )
    ),
    ComplexRotation(),
)


def _heads_dim(q, table, unsqueeze):
    """The dimension of q along which ``table.unsqueeze(unsqueeze)`` is broadcast, if it is one of heads.

    q: (B, H, T, D), (B, T, H, D), or without B. None for another layout, or a table of other tokens.
    """
    if q.dim() not in (3, 4) or not 2 <= table.dim() < q.dim():
        return None
    dims = table.dim() + 1
    heads = q.dim() - dims + (unsqueeze if unsqueeze >= 0 else unsqueeze + dims)
    tokens = heads - 1 if heads == q.dim() - 2 else heads + 1
    if heads not in (q.dim() - 3, q.dim() - 2) or table.shape[-2] != q.shape[tokens]:
        return None
    return heads if table.dim() == 2 or table.shape[0] in (1, q.shape[0]) else None


def _like(tensors, table, heads):
    """True if the tensors differ in the number of heads only, and all or none are DTensors."""
    q = tensors[0]

    def shape(t):
        return [size for dim, size in enumerate(t.shape) if dim != heads]

    plain = not any(map(is_dtensor, (*tensors, table))) or (
        len(tensors) > 1 and all(map(is_dtensor, (*tensors, table)))
    )
    return plain and all(t.dtype == q.dtype and t.dim() == q.dim() and shape(t) == shape(q) for t in tensors)


def _four_dims(heads, *tensors):
    """(dimension of the heads, the tensors), all with a batch dimension."""
    if tensors[0].dim() == 4:
        return heads, *tensors
    return heads + 1, *(t.unsqueeze(0) for t in tensors)


def _as_given(rotated, q):
    return [t.squeeze(0) for t in rotated] if q.dim() == 3 else list(rotated)


def _pairwise(op, tensors, heads):
    """The op takes a pair: for one tensor the other one has no heads."""
    if len(tensors) == 2:
        return op(*tensors)
    (q,) = tensors
    # Detached: the gradient of a slice would be a tensor of zeros with the size of q.
    return op(q, q.detach().narrow(heads, 0, 0))[:1]


def _split_pairs(t, rotary):
    """The first ``rotary`` elements: even ones, then odd ones. The others follow."""
    pairs = t[..., :rotary].unflatten(-1, (rotary // 2, 2)).transpose(-1, -2).flatten(-2)
    return pairs if rotary == t.shape[-1] else torch.cat((pairs, t[..., rotary:]), -1)


def cases(form, tensors, unsqueeze):
    """Arguments of a trial: (tensors, tables, unsqueeze), in every layout of :func:`_heads_dim`.

    ``unsqueeze``: the dimension of a function without such an argument; None for one with it.
    """
    random, scales = trials.Random(), len(trials.SCALES)
    # In the second round all sizes are equal, so that shapes do not tell a wrong layout from the right one.
    for q_heads, k_heads, tokens in ((6, 2, 3), (scales, scales, scales)):
        first = random.of_all_scales(q_heads, tokens, 8), random.of_all_scales(k_heads, tokens, 8)
        last = tuple(t.transpose(1, 2) for t in first)
        # As many tokens as scales, so that the comparison looks at each scale on its own.
        unbatched_last = random.of_all_scales(q_heads, 8), random.of_all_scales(k_heads, 8)
        unbatched_first = tuple(t.transpose(0, 1) for t in unbatched_last)
        layouts = (
            (first, (scales, tokens), 1),
            (first, (1, tokens), 1),
            (last, (scales, tokens), 2),
            (first, (tokens,), 0),
            (last, (tokens,), 1),
            (unbatched_last, (scales,), 1),
            (unbatched_first, (scales,), 0),
        )
        for (given, shape, position), dtype in itertools.product(layouts, (torch.float32, torch.bfloat16)):
            dims = len(shape) + 2
            if unsqueeze is not None and (unsqueeze if unsqueeze >= 0 else unsqueeze + dims) != position:
                continue
            for tables in form.tables(random, *shape):
                cast = [t if t.is_complex() else t.to(dtype) for t in tables]
                yield [t.to(dtype) for t in given[:tensors]], cast, position


def layout(tensors, tables):
    return tensors[0].dim(), tables[0].dim()
