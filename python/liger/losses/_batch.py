# SPDX-License-Identifier: BSD-3-Clause
"""Layout of a batch of sequences: padded, (S, L), or packed, (T,) with cumulative lengths ``cu_seqlens``."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.math.dtypes import accumulate_dtype
from .._core.op.fakes import register_fake
from .._core.op.loss_rows import refuse_gradients
from .._core.op.tensors import (
    check_device,
    check_divisor,
    check_ignore_index,
    check_shape,
    wrong_dtype,
    wrong_shape,
)
from .._core.runtime.environment import targets_checked

_library = torch.library.Library("liger_losses", "FRAGMENT")
# 1, or NaN if the cumulative lengths are invalid. An op, so that torch.compile does not trace the reads of
# values.
_library.define("check_packing(str op, Tensor cu_seqlens, SymInt tokens, SymInt length) -> Tensor")


def _check_packing(op, cu_seqlens, tokens, length):
    lengths = cu_seqlens.diff()
    wrong = (cu_seqlens[0] < 0) | (cu_seqlens[-1] > tokens) | (lengths < 0).any() | (lengths > length).any()
    if not cu_seqlens.is_cuda and wrong:
        raise RuntimeError(
            f"{op}: cu_seqlens is {cu_seqlens.tolist()}, expected numbers that never fall, from 0 to the {tokens} "
            f"tokens at most, and no sequence longer than max_length, {length}"
        )
    if cu_seqlens.is_cuda and targets_checked():
        torch._assert_async(~wrong, f"{op}: cu_seqlens do not fit {tokens} tokens and max_length {length}")
    return torch.where(wrong, cu_seqlens.new_full((), torch.nan, dtype=torch.float32), 1.0)


_library.impl("check_packing", _check_packing, "CompositeExplicitAutograd")


@register_fake("liger_losses::check_packing")
def _(op, cu_seqlens, tokens, length):
    return cu_seqlens.new_empty((), dtype=torch.float32)


class Batch:
    """Hidden states and targets of sequences, flattened to N rows, and conversions of data per token or per
    sequence.

    S is the number of sequences. L is the padded length; in a packed batch it is ``max_length``, and the
    tokens of each sequence are gathered into a row of (S, L).

    Attributes:
        shape: (S, L).
        longest: the longest length that the caller names, L, or of a packed batch without ``max_length`` the
            longest of its sequences, a scalar tensor.
        token_shape: the shape of the targets as given: (S, L), (T,) or (1, T).
        input, target: (N, H) and (N,). The target is ``ignore_index`` wherever the mask is 0.
        valid: (S, L) bool, whether a token counts.
        token_index: (S, L) int64, the row of each token of a packed batch; None if padded.
        packing_factor: a factor of the loss for packed batches: 1, or NaN if ``cu_seqlens`` is invalid; None
            if padded.
        accumulate_dtype: the dtype of sums per token and sequence: float32, or float64 for float64 input.

    Raises:
        RuntimeError: mismatched shapes, dtypes or devices.
    """

    token_index: Tensor | None
    packing_factor: Tensor | None
    longest: int | Tensor

    def __init__(
        self,
        op: str,
        input: Tensor,
        target: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_length: int | None = None,
        ignore_index: int = -100,
    ) -> None:
        self.op, self.packed, self.input = op, cu_seqlens is not None, input
        if input.dim() < 2:
            expected = "(sequences, length, hidden), or (tokens, hidden) with cu_seqlens"
            raise wrong_shape(op, "input", input, expected)
        check_shape(op, "target", target, input.shape[:-1], "the shape of input without its last dimension")
        check_device(op, "target", target, "input", input)
        check_ignore_index(op, "target", target, ignore_index)
        valid = target != ignore_index
        if mask is not None:
            self.check("mask", mask, target.shape)
            valid = valid & (mask != 0)
            target = torch.where(valid, target, ignore_index)
        self.token_shape = target.shape
        self.input, self.target = input.flatten(0, -2), target.flatten()
        self.token_index = self.packing_factor = None
        self.accumulate_dtype = accumulate_dtype(input.dtype)
        if cu_seqlens is None:
            if target.dim() != 2:
                raise wrong_shape(op, "target", target, "(sequences, length), or cu_seqlens")
            self.shape, self.valid, self.longest = target.shape, valid, target.shape[1]
            return
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise wrong_shape(op, "cu_seqlens", cu_seqlens, "(sequences + 1,)")
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise RuntimeError(f"{op}: cu_seqlens is {cu_seqlens.dtype}, expected int32 or int64")
        check_device(op, "cu_seqlens", cu_seqlens, "target", target)
        if max_length is not None and max_length < 0:
            raise ValueError(f"{op}: max_length is {max_length}, expected the longest length")
        tokens = self.target.shape[0]
        length = tokens if max_length is None or tokens == 0 else max_length
        self.shape = torch.Size((cu_seqlens.shape[0] - 1, length))
        self.longest = length
        if max_length is None and self.shape[0]:
            self.longest = cu_seqlens.diff().amax().clamp_min(1)
        self.packing_factor = torch.ops.liger_losses.check_packing.default(
            op, cu_seqlens, tokens, self.shape[1]
        )
        starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
        index = starts + torch.arange(self.shape[1], device=cu_seqlens.device)
        # Invalid lengths must not index out of bounds, although packing_factor makes the loss NaN afterwards.
        inside = (index >= 0) & (index < ends.clamp(max=tokens))
        self.token_index = torch.where(inside, index, 0).long()
        self.valid = inside & self.padded(valid)
        rows = torch.arange(tokens, device=cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
        self._sequence = sequence.clamp(max=max(self.shape[0] - 1, 0))
        # Rows before the first sequence and after the last one are ignored.
        outside = (rows < cu_seqlens[0]) | (rows >= cu_seqlens[-1])
        self.target = torch.where(outside, ignore_index, self.target)

    def check(self, name: str, tensor: Tensor, *shapes: torch.Size | tuple[int, ...]) -> None:
        """Raises RuntimeError unless the tensor is real, on the device of the batch, without gradient, and
        has one of the shapes."""
        if all(tensor.shape != shape for shape in shapes):
            expected = " or ".join(str(tuple(shape)) for shape in shapes)
            raise wrong_shape(self.op, name, tensor, expected)
        if tensor.is_complex():
            raise wrong_dtype(self.op, name, tensor, "a real one")
        check_device(self.op, name, tensor, "input", self.input)
        if tensor.requires_grad:
            raise RuntimeError(f"{self.op}: {name} requires grad, but there is no gradient for it: detach it")

    def padded_valid(self, per_token: Tensor) -> Tensor:
        """(S, L) in at least the accumulate dtype; 0 at ignored tokens, even where the input is NaN."""
        return torch.where(self.valid, self.upcast(self.padded(per_token)), 0.0)

    def padded(self, per_token: Tensor) -> Tensor:
        """(S, L) from one value per token; padding has an arbitrary value."""
        return (
            per_token.reshape(self.shape)
            if self.token_index is None
            else gather_tokens(per_token, self.token_index)
        )

    def upcast(self, tensor: Tensor) -> Tensor:
        """The tensor in the accumulate dtype, or in its own dtype if that is wider."""
        return tensor.to(torch.promote_types(tensor.dtype, self.accumulate_dtype))

    def lengths(self) -> Tensor:
        """(S,) number of valid tokens of each sequence."""
        return self.valid.sum(-1)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """(N,) from (S,): the value of a sequence for each of its tokens."""
        if not self.packed:
            return per_sequence.unsqueeze(1).expand(self.shape).flatten()
        if self.shape[0] == 0:
            return per_sequence.new_zeros(self.target.shape)
        return per_sequence[self._sequence]

    def valid_rows(self, per_token: Tensor, ignore_index: int) -> Tensor:
        """(N,) in at least the accumulate dtype; 0 at ignored tokens."""
        return torch.where(self.target != ignore_index, self.upcast(per_token).flatten(), 0.0)


def gather_tokens(per_token: Tensor, index: Tensor) -> Tensor:
    """(S, L) values from one value per token of a packed batch. Padding gets the value of any token."""
    flat = per_token.reshape(-1)
    # An empty batch has no row that an index could read.
    return flat[index] if flat.shape[0] else flat.new_zeros(index.shape)


def sequence_scores(per_token: Tensor, lengths: Tensor, average: bool) -> Tensor:
    """(..., S) from (..., S, L): the sum over the tokens of each sequence, or the mean over ``lengths``."""
    total = per_token.sum(-1)
    return total / lengths.clamp_min(1) if average else total


def sigmoid(x: Tensor) -> Tensor:
    """torch.sigmoid with an exact derivative near 1, where the y * (1 - y) of torch cancels."""
    return F.logsigmoid(x).exp()


def where_scalar(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """``torch.where`` of two Python numbers in the dtype of ``like``; torch.where alone uses the default
    dtype."""
    return torch.where(condition, like.new_full((), yes), no)


def as_scalar(name: str, value: float | Tensor, batch: Any) -> Tensor:
    """A number, or a tensor with one element, as a scalar on the device of the batch, in its accumulate
    dtype. ``batch``: a :class:`Batch`, or the tokens of a distillation batch. Raises RuntimeError for a
    tensor that requires grad."""
    # A scalar on the CPU is taken with tensors of any device, as torch does.
    if isinstance(value, torch.Tensor) and value.device not in (batch.input.device, torch.device("cpu")):
        raise RuntimeError(
            f"{batch.op}: {name} is on {value.device}, expected the device of input, {batch.input.device}"
        )
    device, dtype = batch.input.device, accumulate_dtype(batch.input.dtype)
    if not isinstance(value, torch.Tensor):
        return torch.full((), value, dtype=dtype, device=device)
    check_divisor(batch.op, name, value)
    refuse_gradients(batch.op, **{name: value})
    return value.detach().to(device, dtype).reshape(())
