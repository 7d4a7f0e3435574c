"""How the sequences of a batch lie: padded, (B, L), or packed one after the other, (T,) with cumulative lengths."""

import torch
import torch.nn.functional as F

from .._core.arguments import LayerNames, check_device, check_divisor, check_shape, wrong_dtype, wrong_shape
from .._core.dtypes import accumulate_dtype
from .._core.fakes import register_fake
from ..backend import targets_checked

_library = torch.library.Library("liger_losses", "FRAGMENT")
# 1, or nan where cumulative lengths do not fit; an op, so that compilers do not look at the values.
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


_NAMES = LayerNames("hidden")


class Batch:
    """Hidden states and targets of sequences, seen as rows, and everything per token or sequence in their order.

    Sequences are (S, L) here: of a packed batch L is ``max_length``, and the tokens of each are gathered.

    Attributes:
        hidden, target: (N, H) and (N,), with ``ignore_index`` wherever the mask is off.
        live: (S, L) whether a token counts.
        places: (S, L) the row of each token of a packed batch, else None.
        fits: None, or of a packed batch 1, and nan where its cumulative lengths do not fit: a factor of the loss.
        wide: the dtype of numbers per token and sequence, float32 or wider.
    """

    def __init__(
        self, op, hidden, target, mask=None, cu_seqlens=None, max_length=None, ignore_index=-100,
        names=_NAMES, mask_name="mask",
    ):  # fmt: skip
        self.op, self.packed, self.hidden = op, cu_seqlens is not None, hidden
        if hidden.dim() < 2:
            expected = "(sequences, length, hidden), or (tokens, hidden) with cu_seqlens"
            raise wrong_shape(op, names.input, hidden, expected)
        check_shape(
            op, names.target, target, hidden.shape[:-1], f"that of {names.input} without its last dimension"
        )
        check_device(op, names.target, target, names.input, hidden)
        live = target != ignore_index
        if mask is not None:
            self.check(mask_name, mask, target.shape)
            live = live & (mask != 0)
            target = torch.where(live, target, ignore_index)
        self.token_shape = target.shape
        self.hidden, self.target = hidden.flatten(0, -2), target.flatten()
        self.places = self.fits = None
        self.wide = accumulate_dtype(hidden.dtype)
        if not self.packed:
            if target.dim() != 2:
                raise RuntimeError(
                    f"{op}: {names.target} has shape {tuple(target.shape)}, expected (sequences, length), or cu_seqlens"
                )
            self.shape, self.live = target.shape, live
            return
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise RuntimeError(
                f"{op}: cu_seqlens has shape {tuple(cu_seqlens.shape)}, expected (sequences + 1,)"
            )
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise RuntimeError(f"{op}: cu_seqlens is {cu_seqlens.dtype}, expected int32 or int64")
        check_device(op, "cu_seqlens", cu_seqlens, names.target, target)
        if max_length is not None and max_length < 0:
            raise RuntimeError(f"{op}: max_length is {max_length}, expected the longest length")
        tokens = self.target.shape[0]
        length = tokens if max_length is None or tokens == 0 else max_length
        self.shape = torch.Size((cu_seqlens.shape[0] - 1, length))
        self.fits = torch.ops.liger_losses.check_packing.default(op, cu_seqlens, tokens, self.shape[1])
        starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
        places = starts + torch.arange(self.shape[1], device=cu_seqlens.device)
        # Lengths that do not fit may not lead out of the batch before the loss is nan.
        inside = (places >= 0) & (places < ends.clamp(max=tokens))
        self.places = torch.where(inside, places, 0).long()
        self.live = inside & self.placed(live)
        rows = torch.arange(tokens, device=cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
        self._sequence = sequence.clamp(max=max(self.shape[0] - 1, 0))
        # Rows before the first sequence and after the last count for nothing, as if the mask were off.
        outside = (rows < cu_seqlens[0]) | (rows >= cu_seqlens[-1])
        self.target = torch.where(outside, ignore_index, self.target)

    def check(self, name, tensor, *shapes):
        if all(tensor.shape != shape for shape in shapes):
            expected = " or ".join(str(tuple(shape)) for shape in shapes)
            raise RuntimeError(f"{self.op}: {name} has shape {tuple(tensor.shape)}, expected {expected}")
        if tensor.is_complex():
            raise wrong_dtype(self.op, name, tensor, "a real one")
        check_device(self.op, name, tensor, "the hidden states", self.hidden)
        if tensor.requires_grad:
            raise RuntimeError(f"{self.op}: {name} requires grad, but there is no gradient for it: detach it")

    def sequences(self, per_token, fill=0.0):
        """(S, L) of numbers per token; what the mask leaves out, be it NaN, becomes ``fill``."""
        return torch.where(self.live, self.floats(self.placed(per_token)), fill)

    def placed(self, per_token):
        """(S, L) of anything per token, of some token where there is none."""
        return at_places(per_token, self.places) if self.packed else per_token.reshape(self.shape)

    def floats(self, tensor):
        """Numbers in the dtype of the batch or a wider one, in which they are added up."""
        return tensor.to(torch.promote_types(tensor.dtype, self.wide))

    def lengths(self):
        """(S,) how many tokens of each sequence count."""
        return self.live.sum(-1)

    def spread(self, per_sequence):
        """(N,) of numbers per sequence: each for all of its tokens."""
        if not self.packed:
            return per_sequence.unsqueeze(1).expand(self.shape).flatten()
        if self.shape[0] == 0:
            return per_sequence.new_zeros(self.target.shape)
        return per_sequence[self._sequence]

    def rows(self, per_token, ignore_index):
        """(N,) of numbers per token in their order, 0 where the mask is off."""
        return torch.where(self.target != ignore_index, self.floats(per_token).flatten(), 0.0)


def at_places(per_token, places):
    """(S, L) of anything per token of a packed batch, of some token where there is none."""
    flat = per_token.reshape(-1)
    # A batch without a token has none to stand for others.
    return flat[places] if flat.shape[0] else flat.new_zeros(places.shape)


def sequence_scores(per_token, lengths, average):
    """(..., S) the sums of (..., S, L) over the tokens of sequences, or their means."""
    total = per_token.sum(-1)
    return total / lengths.clamp_min(1) if average else total


def sigmoid(x):
    """The same as torch's, with a derivative that keeps its digits: torch's, y * (1 - y), has few where y is near 1."""
    return F.logsigmoid(x).exp()


def either(condition, yes, no, like):
    """Two numbers by a condition, in the dtype of ``like``: ``torch.where`` alone takes the default dtype."""
    return torch.where(condition, like.new_full((), yes), no)


def as_scalar(name, value, batch):
    """A number, or a tensor of one element, as a scalar of float32 or wider on the device of the batch."""
    if isinstance(value, torch.Tensor) and value.is_meta and not batch.hidden.is_meta:
        # Nothing could be copied from there.
        raise RuntimeError(
            f"{batch.op}: {name} is on meta, expected the device of the hidden states, {batch.hidden.device}"
        )
    device, wide = batch.hidden.device, accumulate_dtype(batch.hidden.dtype)
    if not isinstance(value, torch.Tensor):
        return torch.full((), value, dtype=wide, device=device)
    check_divisor(batch.op, name, value)
    return value.detach().to(device, wide).reshape(())
