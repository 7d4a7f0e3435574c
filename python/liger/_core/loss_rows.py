"""Conversion of the arguments of public losses to those of the ops, which take rows."""

import torch

from .dtensor import flatten_tokens
from .dtypes import accumulate_dtype


def flatten_rows(op, name, x, target, token_weight, target_name="target"):
    """x as (rows, features), target and token_weight as (rows,)."""
    if x.dim() == 0 or (x.dim() == 2 and target.dim() == 1):
        return x, target, token_weight  # already rows, or refused by the op's check
    for other_name, other in ((target_name, target), ("token_weight", token_weight)):
        if other is not None and other.shape != x.shape[:-1]:
            raise RuntimeError(
                f"{op}: {other_name} has shape {tuple(other.shape)}, expected that of {name} without its last "
                f"dimension, {tuple(x.shape[:-1])}"
            )
    if x.dim() == 1:
        return x.unsqueeze(0), target.reshape(-1), None if token_weight is None else token_weight.reshape(-1)
    dims = x.dim() - 1
    return tuple(t if t is None else flatten_tokens(t, dims) for t in (x, target, token_weight))


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
