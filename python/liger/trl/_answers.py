# SPDX-License-Identifier: BSD-3-Clause
"""Cropping of a batch to its answers, so that the GEMMs of the lm_head skip prompts and padding."""

import torch
from torch.nn.functional import pad

from ..losses import TokenMetrics


class AnswerWidth:
    """The longest span from the first to the last valid token, over the rows of a mask (S, L) of targets.

    Attributes:
        length: L.

    The copy to the host is asynchronous and finishes while the model runs; ``int()`` waits for it.
    """

    def __init__(self, mask):
        mask, self.length = mask != 0, mask.shape[1]
        column = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask, column, -1).amax(1)
        span = torch.where(last >= 0, last - _first(mask) + 1, 1).amax()
        self._event = None
        if span.is_cuda:
            self._number = torch.empty((), dtype=span.dtype, pin_memory=True).copy_(span, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._number = span

    @classmethod
    def of_tokens(cls, mask):
        """From a mask (S, L) of tokens: the target of each position is the next token."""
        return cls(pad(mask[:, 1:], (0, 1)))

    def __int__(self):
        if self._event is not None:
            self._event.synchronize()
        return int(self._number)


def _first(mask):
    """(S,) column of the first true element of each row; 0 for a row without one."""
    return mask.to(torch.uint8).argmax(1)


def crop_to_answers(function, answer_width, *others):
    """A ``function(hidden, weight, bias, target, *others)`` that gets ``answer_width`` columns per sequence.

    The columns of a sequence start at its first valid token. Targets before the last ``answer_width.length``
    columns are ignored: the last virtual token of prompt learning predicts the first token, which the trainer
    does not score. The returned TokenMetrics are scattered to (S, L).
    """

    def cropped(hidden, weight, bias, target):
        sequences, length = target.shape
        width, moved = int(answer_width), [t.to(target.device) for t in others]
        if length > answer_width.length:
            column = torch.arange(length, device=target.device)
            target = target.masked_fill(column < length - answer_width.length, -100)
        if width >= length:
            return function(hidden, weight, bias, target, *moved)
        start = _first(target != -100).clamp(max=length - width)
        columns = start.unsqueeze(1) + torch.arange(width, device=target.device)
        rows = columns + length * torch.arange(sequences, device=target.device).unsqueeze(1)
        answers = hidden.flatten(0, 1).index_select(0, rows.flatten()).view(sequences, width, -1)
        value, tokens = function(answers, weight, bias, *(t.gather(1, columns) for t in (target, *moved)))
        fills = (0.0, 0.0, -1)  # of ignored tokens, as TokenMetrics defines them
        return value, TokenMetrics(
            *(
                t.new_full(target.shape, fill).scatter(1, columns, t)
                for t, fill in zip(tokens, fills, strict=True)
            )
        )

    return cropped
