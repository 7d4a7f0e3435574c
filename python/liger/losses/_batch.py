"""How the sequences of a batch lie: padded, (B, L), or packed one after the other, (T,) with cumulative lengths."""

import torch

from ..ops._arguments import LayerNames, check_device, check_divisor, check_shape, wrong_dtype, wrong_shape

_NAMES = LayerNames("hidden")


class Batch:
    """Hidden states and targets of sequences, seen as rows, and everything per token or sequence in their order.

    Sequences are (S, L) here: of a packed batch L is ``max_length``, and the tokens of each are gathered.

    Attributes:
        hidden, target: (N, H) and (N,), with ``ignore_index`` wherever the mask is off.
        live: (S, L) whether a token counts.
        places: (S, L) the row of each token of a packed batch, else None.
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
        self.places = None
        if not self.packed:
            if target.dim() != 2:
                raise RuntimeError(
                    f"{op}: {names.target} has shape {tuple(target.shape)}, expected (sequences, length), or cu_seqlens"
                )
            self.shape, self.live = target.shape, live
            return
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
            raise RuntimeError(
                f"{op}: cu_seqlens has shape {tuple(cu_seqlens.shape)}, expected (sequences + 1,)"
            )
        tokens = self.target.shape[0]
        self.shape = torch.Size((cu_seqlens.numel() - 1, tokens if max_length is None else max_length))
        starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
        places = starts + torch.arange(self.shape[1], device=cu_seqlens.device)
        inside = places < ends
        self.places = torch.where(inside, places, 0).long()
        self.live = inside & live.flatten()[self.places]
        rows = torch.arange(tokens, device=cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
        self._sequence = sequence.clamp(max=max(self.shape[0] - 1, 0))
        # Rows before the first sequence and after the last count for nothing.
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
        if self.packed:
            per_token = per_token.reshape(-1)[self.places]
        return torch.where(self.live, per_token, fill)

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
        return torch.where(self.target != ignore_index, per_token.flatten(), 0.0)


def sequence_scores(per_token, lengths, average):
    """(..., S) the sums of (..., S, L) over the tokens of sequences, or their means."""
    total = per_token.sum(-1)
    return total / lengths.clamp_min(1) if average else total


def as_scalar(name, value, batch):
    """A number, or a tensor of one element, as a float32 scalar on the device of the batch."""
    device = batch.hidden.device
    if not isinstance(value, torch.Tensor):
        return torch.full((), value, dtype=torch.float32, device=device)
    check_divisor(batch.op, name, value)
    return value.detach().to(device, torch.float32).reshape(())
