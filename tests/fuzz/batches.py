# SPDX-License-Identifier: BSD-3-Clause
"""Random batches of sequences, padded or packed, masked, with references, and their log-probabilities by a
formula."""

import itertools

import formulas
import torch
from engine import maybe, one_of
from hypothesis import strategies as st
from lm_head import HIDDEN, VOCAB, budget


class Sequences:
    """A batch: hidden states, a projection and targets.

    Attributes:
        hidden, weight, bias, target: tensors; ``where`` has mask, cu_seqlens and max_length as they apply.
        rows: for each sequence the rows of its tokens that count, of hidden states seen as (rows, H).
        lengths: of the sequences, all tokens counted.
    """

    def __init__(self, draw, numbers, count, every=False):
        self.draw, self.numbers, self.count = draw, numbers, count
        self.vocab, self.width = draw(VOCAB), draw(HIDDEN)
        self.packed = draw(st.booleans())
        self.ignore_index = one_of(draw, -100, -1)
        if self.packed:
            self.lengths = [draw(st.integers(1 if every else 0, 5)) for _ in range(count)]
            begin, spare = one_of(draw, 0, 2), one_of(draw, 0, 3)
            ends = torch.tensor([begin, *self.lengths]).cumsum(0)
            tokens = int(ends[-1]) + spare
            self.shape = (1, tokens) if draw(st.booleans()) else (tokens,)
            self.places = [list(range(int(a), int(b))) for a, b in itertools.pairwise(ends)]
            self.where = {"cu_seqlens": ends.to(numbers.device, one_of(draw, torch.int32, torch.int64))}
            if draw(st.booleans()):
                self.where["max_length"] = max([*self.lengths, 1])
        else:
            length = draw(st.integers(1, 5))
            self.lengths, self.shape, self.where = [length] * count, (count, length), {}
            self.places = [list(range(i * length, (i + 1) * length)) for i in range(count)]
        self.target = numbers.classes(self.vocab, *self.shape, ignored=(self.ignore_index,), share=0.2)
        if every:
            target = self.target.clone(memory_format=torch.contiguous_format)
            for rows in self.places:
                target.view(-1)[rows[0]] = numbers.classes(self.vocab, 1)[0]
            self.target = target
        live = self.target != self.ignore_index
        if not every and draw(st.booleans()):
            self.mask = numbers.flags(*self.shape)
            live = live & self.mask
            self.mask = self.mask.to(one_of(draw, torch.bool, torch.int64, torch.float32))
        else:
            self.mask = None
        self.live = live
        flat = live.reshape(-1).tolist()
        self.rows = [[row for row in rows if flat[row]] for rows in self.places]
        self.hidden = numbers.normal(*self.shape, self.width)
        self.weight = numbers.normal(
            self.vocab, self.width, scale=one_of(draw, 0.3, 1.5) * self.width**-0.5, alike=False
        )
        self.bias = numbers.normal(self.vocab) if draw(st.booleans()) else None

    def head(self, temperatures=(1.0,)):
        """Options of the projection."""
        return {
            "ignore_index": self.ignore_index,
            "softcap": maybe(self.draw, 2.0, 30.0),
            "temperature": one_of(self.draw, *temperatures),
            "memory_budget": budget(self.draw, self.vocab, self.numbers.dtype),
        }

    def per_token(self, low, high):
        """Numbers per token in the order of the targets; where nothing counts they may be anything."""
        values = self.numbers.uniform(*self.shape, low=low, high=high, dtype=torch.float32)
        return torch.where(self.live, values, one_of(self.draw, 0.0, torch.nan, torch.inf))

    def reference(self, sums):
        """Arguments of a reference: a model, or what it says of tokens or, if ``sums``, of sequences."""
        kind = one_of(self.draw, "model", "tokens", *(("sums",) if sums else ()))
        if kind == "model":
            width = self.draw(HIDDEN)
            made = {
                "ref_input": self.numbers.normal(*self.shape, width),
                "ref_weight": self.numbers.normal(self.vocab, width, scale=width**-0.5, alike=False),
            }
            if self.draw(st.booleans()):
                made["ref_bias"] = self.numbers.normal(self.vocab)
            return made
        if kind == "tokens":
            return {"ref_logps": self.per_token(-4.0, -0.1)}
        return {"ref_logps": self.numbers.uniform(self.count, low=-9.0, high=-0.1, dtype=torch.float32)}

    def tensors(self):
        """What a comparison is given: the layer, by the names of the arguments."""
        made = {"input": self.hidden, "weight": self.weight}
        if self.bias is not None:
            made["bias"] = self.bias
        return made


def of_layers(given):
    """The names of the tensors of the model's layer and of its reference's, whose roundings an error may
    have."""
    return [n for n in given if not n.endswith("logps")]


class Scores:
    """Log-probabilities and entropies of a batch and of its reference, as a formula has them."""

    def __init__(self, batch, head, hidden, weight, bias, reference=None, average=False):
        self.batch, self.average = batch, average
        target = batch.target.reshape(-1)
        options = head["temperature"], head["softcap"]
        self.tokens, self.entropies = formulas.token_scores(
            hidden.flatten(0, -2), weight, bias, target, *options
        )
        self.sequences = formulas.sequence_scores(self.tokens, batch.rows, average)
        reference = reference or {}
        self.of_reference = [torch.zeros_like(s) for s in self.sequences]
        self.reference_tokens = None
        if "ref_input" in reference:
            model = reference["ref_input"].flatten(0, -2), reference["ref_weight"], reference.get("ref_bias")
            self.reference_tokens = formulas.token_scores(*model, target, *options)[0].detach()
        elif "ref_logps" in reference and reference["ref_logps"].shape == batch.target.shape:
            self.reference_tokens = reference["ref_logps"].reshape(-1).to(self.tokens.dtype)
        elif reference:
            self.of_reference = [
                s / (len(rows) if average else 1) if rows else torch.zeros_like(s)
                for s, rows in zip(reference["ref_logps"].to(self.tokens.dtype), batch.rows, strict=True)
            ]
        if self.reference_tokens is not None:
            self.of_reference = formulas.sequence_scores(self.reference_tokens, batch.rows, average)

    def ratios(self):
        return [s - r for s, r in zip(self.sequences, self.of_reference, strict=True)]


def stacked(values, like):
    return torch.stack(values).detach() if values else like.new_zeros(0)


def total_of(values, like):
    """Their sum, of nothing a zero that belongs to the graph."""
    return sum(values, start=like.tokens.sum() * 0.0 if like.tokens.isfinite().all() else 0.0)
