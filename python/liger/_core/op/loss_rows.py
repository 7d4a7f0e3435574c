# SPDX-License-Identifier: BSD-3-Clause
"""Conversion of the arguments of public losses to the arguments of the ops, which take rows."""

from itertools import pairwise
from typing import NamedTuple

import torch

from ..dtensor.inputs import flatten_tokens, is_dtensor, unflatten_tokens
from ..math.dtypes import accumulate_dtype
from .tensors import wrong_shape


class Tokens(NamedTuple):
    """The token dimensions that rows had before they were flattened."""

    like: torch.Tensor  # a tensor of their shape
    order: tuple[int, ...] | None  # in which they were flattened; None: their own

    def flatten(self, tensor):
        """(tokens..., any) as rows."""
        dims = self.like.dim()
        if self.order is not None:
            tensor = tensor.permute(*self.order, *range(dims, tensor.dim()))
        return flatten_tokens(tensor, dims)

    def restore(self, rows):
        """One value per row, in the shape of the tokens."""
        if self.order is None:
            return unflatten_tokens(rows, self.like)
        shape = [self.like.shape[d] for d in self.order]
        inverse = sorted(range(len(shape)), key=self.order.__getitem__)
        # Contiguous, as other results are: callers may flatten it with view. A copy of one number per row.
        return rows.reshape(shape).permute(inverse).contiguous()


def memory_order(x):
    """The order of the token dimensions of (tokens..., features) in which they flatten to rows without a
    copy.

    None: their own order, or no order does, or torch.compile traces, where strides may be symbols that cannot
    be sorted. Megatron's (s, b, h) is such a tensor if it comes as a (b, s, h) view.
    """
    if x.dim() < 3 or is_dtensor(x) or torch.compiler.is_compiling() or x.is_contiguous() or x.numel() == 0:
        return None
    shape, stride = x.shape[:-1], x.stride()
    moving = [d for d in range(len(shape)) if shape[d] != 1]
    order = sorted(moving, key=lambda d: -stride[d])
    dense = all(stride[a] == stride[b] * shape[b] for a, b in pairwise(order))
    if order == moving or not dense:
        return None
    return (*order, *(d for d in range(len(shape)) if shape[d] == 1))


def flatten_rows(op, name, x, target, token_weight, target_name="target"):
    """x as (rows, features), target and token_weight as (rows,), and the :class:`Tokens` of per-row results.

    Rows are in the order of x in memory where that saves a copy of it.
    """
    if x.dim() == 0 or (x.dim() == 2 and target.dim() == 1):
        return x, target, token_weight, Tokens(target, None)  # already rows, or refused by the op's check
    for other_name, other in ((target_name, target), ("token_weight", token_weight)):
        if other is not None and other.shape != x.shape[:-1]:
            expected = f"the shape of {name} without its last dimension, {tuple(x.shape[:-1])}"
            raise wrong_shape(op, other_name, other, expected)
    if x.dim() == 1:
        flat_weight = None if token_weight is None else token_weight.reshape(-1)
        return x.unsqueeze(0), target.reshape(-1), flat_weight, Tokens(target, None)
    tokens = Tokens(target, memory_order(x))
    return *(t if t is None else tokens.flatten(t) for t in (x, target, token_weight)), tokens


def denominator_tensor(denominator, like):
    """A number as a device tensor, without synchronisation; tensors and None pass through."""
    if denominator is None or isinstance(denominator, torch.Tensor):
        return denominator
    return torch.full((), denominator, dtype=accumulate_dtype(like.dtype), device=like.device)


def refuse_gradients(op, **tensors):
    """Raises RuntimeError for a tensor that requires grad although the op has no gradient for it."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(f"{op}: {name} requires grad, but {op} has no gradient for it: detach it")
