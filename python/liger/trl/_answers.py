"""Losses of answers: prompts and padding, of which a loss sees nothing, are left out of the head's products."""

import torch

from ..losses import TokenStatistics


class Longest:
    """The longest span, from the first token that counts to the last, of the rows of a mask (S, L).

    A GPU copies it while the model runs: whoever asks for it in the head does not wait.
    """

    def __init__(self, mask):
        mask = mask != 0
        place = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask, place, -1).amax(1)
        span = torch.where(last >= 0, last - _first(mask) + 1, 1).amax()
        self._event = None
        if span.is_cuda:
            self._number = torch.empty((), dtype=span.dtype, pin_memory=True).copy_(span, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._number = span

    def __int__(self):
        if self._event is not None:
            self._event.synchronize()
        return int(self._number)


def _first(mask):
    """(S,) the place of the first true element; 0 where there is none."""
    return mask.to(torch.uint8).argmax(1)


def of_answers(function, longest, *others):
    """``function(hidden, weight, bias, target, *others)``, given no more than ``longest`` columns of what is (S, L),
    which hold the tokens of a sequence that count. The statistics come back in their places."""

    def windowed(hidden, weight, bias, target):
        sequences, length = target.shape
        width, moved = int(longest), [t.to(target.device) for t in others]
        if width >= length:
            return function(hidden, weight, bias, target, *moved)
        start = _first(target != -100).clamp(max=length - width)
        columns = start.unsqueeze(1) + torch.arange(width, device=target.device)
        rows = columns + length * torch.arange(sequences, device=target.device).unsqueeze(1)
        answers = hidden.flatten(0, 1).index_select(0, rows.flatten()).view(sequences, width, -1)
        value, found = function(answers, weight, bias, *(t.gather(1, columns) for t in (target, *moved)))
        fills = TokenStatistics(0.0, 0.0, -1)
        return value, TokenStatistics(
            *(
                t.new_full(target.shape, fill).scatter(1, columns, t)
                for t, fill in zip(found, fills, strict=True)
            )
        )

    return windowed
