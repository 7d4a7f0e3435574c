# SPDX-License-Identifier: BSD-3-Clause
"""The row rule of cross entropy, from the statistics of shards of a row."""

from typing import NamedTuple

import torch

from ..._core.head.cross_entropy import RowResults, gradient_weights, make_rule, row_upstream
from ..._core.op.tensors import check_device, wrong_dtype, wrong_shape
from ...ops.cross_entropy.stats import cross_entropy_stats, cross_entropy_stats_backward_


class WholeRows(NamedTuple):
    """The statistics of rows over all classes. Every process adds in the order of ranks, so all get the same
    bits."""

    reference: torch.Tensor  # the largest logit
    total: torch.Tensor  # sum of exp(z - reference)
    target: torch.Tensor  # the target's logit
    cost: torch.Tensor | None  # sum of w * (lse - z)

    @classmethod
    def merge(cls, gathered):
        high, total, target, *class_sums = gathered.unbind(1)
        reference = high.amax(0)
        # A row of -inf: avoids inf - inf.
        finite = torch.where(reference == -torch.inf, 0.0, reference)
        total, cost = ((high - finite).exp_() * total).sum(0), None
        if class_sums:
            # Relative to the largest logits of the processes: an offset of all logits must not round the sum.
            class_sum, weight_sum = class_sums
            # A process without a finite logit has sums relative to 0.
            above = finite - torch.where(high == -torch.inf, 0.0, high)
            cost = (weight_sum * (above + total.log()) - class_sum).sum(0)
        return cls(reference, total, target.sum(0), cost)


class Rows:
    """The row rule of a call and its results, on the process with the classes from ``vocab_start`` on,
    ``classes`` in number."""

    def __init__(self, op, dtype, classes, target, options, vocab_start, vocab_size, metrics):
        ce_weight, self.classes = options.ce_weight, classes
        self.rule = make_rule(op, dtype, vocab_size, target, options)
        self.results = RowResults(self.rule, metrics)
        self.denominator = self.rule.denominator(options.denominator, options.reduction)
        self.reduction = options.reduction
        self.smoothing = options.label_smoothing != 0.0
        self.target = target
        self.shard_weight = None if ce_weight is None else ce_weight[vocab_start : vocab_start + classes]
        self.options = (vocab_start, options.ignore_index, options.softcap)

    def clear_others(self, computed):
        """Writes the results of the rows that are not computed, the ignored rows."""
        for values in (self.results.loss, self.results.z_loss, self.results.logprobs):
            computed.clear(values)

    def stats(self, rows, logits):
        if self.classes == 0:
            # Without classes the largest logit is -inf, and sums are 0.
            stats = torch.zeros(
                3 + 2 * self.smoothing, len(logits), dtype=self.rule.wide, device=logits.device
            )
            stats[0] = -torch.inf
            return stats
        stats = cross_entropy_stats(
            logits, self.target[rows], self.shard_weight, *self.options, self.smoothing
        )
        if not self.smoothing:
            return stats
        weight_sum = (
            logits.shape[1] if self.shard_weight is None else self.shard_weight.sum(dtype=stats.dtype)
        )
        return torch.cat([stats, torch.zeros_like(stats[:1]) + weight_sum])

    def fill(self, rows, gathered):
        """Computes losses and metrics of rows. Returns the arguments (reference, coef_exp, coef_target,
        coef_class) of cross_entropy_stats_backward for an upstream gradient of 1."""
        rule, merged = self.rule, WholeRows.merge(gathered)
        self.results.fill_from(rows, *merged)
        coef_exp, coef_target, coef_class = gradient_weights(rule, rows, merged.reference, merged.total)
        upstream = row_upstream(rule, rows, 1.0 / self.denominator)
        return (
            merged.reference,
            coef_exp * upstream,
            coef_target * upstream,
            coef_class * upstream if self.smoothing else None,
        )

    def write_gradient(self, rows, logits, coefficients):
        if self.classes == 0:
            return
        cross_entropy_stats_backward_(
            logits,
            self.target[rows],
            *coefficients,
            self.shard_weight if self.smoothing else None,
            *self.options,
            None,
        )

    def reduced(self):
        return self.results.reduced(self.denominator, self.reduction)


def check_class_weights(op, ce_weight, target, vocab):
    """Raises RuntimeError unless the weights cover the whole vocabulary and are on the device of the
    target."""
    if ce_weight is None:
        return
    if ce_weight.shape != (vocab,):
        expected = f"({vocab},), one weight for each class of the whole vocabulary"
        raise wrong_shape(op, "ce_weight", ce_weight, expected)
    if not ce_weight.is_floating_point():
        raise wrong_dtype(op, "ce_weight", ce_weight, "a floating dtype")
    check_device(op, "ce_weight", ce_weight, "target", target)
