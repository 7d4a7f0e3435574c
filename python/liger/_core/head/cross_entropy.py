# SPDX-License-Identifier: BSD-3-Clause
"""The row rule of cross entropy in plain torch, shared by cross_entropy and fused_linear_ce
(docs/guides/cross_entropy.md)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..math.computed_rows import ignored_rows
from ..math.dtypes import accumulate_dtype
from ..op.by_name import options_among
from ..op.tensors import wrong_shape


def check_targets(op, target, vocab, ignore_index):
    """Raises RuntimeError for the first target out of range. CPU tensors only: on a GPU it would
    synchronise."""
    bad = ~ignored_rows(target, ignore_index) & ((target < 0) | (target >= vocab))
    if bad.any():
        row = int(bad.nonzero()[0])
        raise RuntimeError(
            f"{op}: target at row {row} is {int(target[row])}, expected 0 <= target < {vocab} "
            f"or ignore_index {ignore_index}"
        )


def check_row_values(op, logits, **values):
    """Raises RuntimeError for values other than None or one float32 (float64 for float64 logits) per row."""
    shape, dtype = (logits.shape[0],), accumulate_dtype(logits.dtype)
    for name, tensor in values.items():
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
            found, expected = (str(d).removeprefix("torch.") for d in (tensor.dtype, dtype))
            raise RuntimeError(
                f"{op}: {name} has shape {tuple(tensor.shape)} and dtype {found}, expected {shape} {expected}"
            )


def check_row_stats(op, logits, stats):
    """Raises RuntimeError for statistics that are not from the forward: (2, rows), see
    :class:`RowResults`."""
    if stats.ndim != 2 or len(stats) != 2:
        raise wrong_shape(op, "stats", stats, f"(2, {logits.shape[0]})")
    check_row_values(op, logits, **{f"stats[{i}]": values for i, values in enumerate(stats)})


# The first fields of CEOptions: the options of the ops without a linear layer.
LOGIT_OPTIONS = 8


class CEOptions(NamedTuple):
    """The options of cross entropy, in the order of the op schemas. The last two are options of a linear
    layer."""

    ce_weight: torch.Tensor | None = None
    token_weight: torch.Tensor | None = None
    denominator: torch.Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    softcap: float | None = None
    reduction: str = "mean"
    accum_dtype: torch.dtype | None = None
    memory_budget: int | None = None

    @classmethod
    def of_op(cls, arguments):
        return options_among(cls, arguments)

    @property
    def of_logits(self):
        """The options of the ops without a linear layer."""
        return self[:LOGIT_OPTIONS]

    @property
    def exact(self):
        """True if the gradient of the weight is as exact as one float32 sum."""
        return self.accum_dtype in (None, torch.float32)

    def check(self, op, logits, target):
        """Raises RuntimeError if they do not fit logits (N, V) and target (N,)."""
        shared = self.ce_weight, self.token_weight, self.denominator, self.label_smoothing, self.softcap
        torch.ops.liger.check_cross_entropy(op, logits, target, *shared, self.reduction)

    def check_linear(self, input, weight, target, bias, op="fused_linear_ce", logits_dtype=None):
        """Raises RuntimeError if they do not fit input (N, H), weight (V, H) and target (N,)."""
        shared = self.ce_weight, self.token_weight, self.denominator, self.label_smoothing, self.softcap
        linear = self.reduction, self.accum_dtype, self.memory_budget, op, logits_dtype
        torch.ops.liger.check_fused_linear_ce(input, weight, target, bias, *shared, *linear)


class Metrics(NamedTuple):
    """Flags of the requested metrics, in the order of the op schemas."""

    z_loss: bool = False
    token_accuracy: bool = False
    argmax: bool = False
    logprobs: bool = False
    entropy: bool = False

    @classmethod
    def named(cls, names):
        # torch.compile of torch 2.10 does not trace cls._fields.
        return cls(**dict.fromkeys(names, True)) if names else _NO_METRICS

    @classmethod
    def of_op(cls, arguments):
        return options_among(cls, arguments, "return_")


class LogProbMetrics(NamedTuple):
    """Flags of the requested metrics of log-probabilities, in the order of the op schemas."""

    entropy: bool = False
    argmax: bool = False
    log_sum_sq_probs: bool = False
    mean_logits: bool = False

    @classmethod
    def named(cls, names):
        return cls(**dict.fromkeys(names, True))

    @classmethod
    def of_op(cls, arguments):
        return options_among(cls, arguments, "return_")


_NO_METRICS = Metrics()


def capped(logits, softcap):
    """The logits after the softcap, in the accumulation dtype."""
    z = logits.to(accumulate_dtype(logits.dtype))
    return z if softcap is None else softcap * torch.tanh(z / softcap)


@dataclass
class RowRule:
    """The options of one call, and per row all values that do not depend on the logits."""

    wide: torch.dtype
    vocab: int
    valid: torch.Tensor  # rows that are not ignored
    has_class: torch.Tensor  # valid rows whose target is in range
    class_index: torch.Tensor  # the target of rows that have a class, else 0
    weight: torch.Tensor  # class weight of the target of rows that have a class, else 0
    token_weight: torch.Tensor | None
    class_weight: torch.Tensor | None
    class_weight_sum: torch.Tensor | float
    label_smoothing: float
    lse_square_scale: float
    softcap: float | None

    def denominator(self, given, reduction):
        """The scalar that the reduction divides by."""
        if given is not None:
            return given.to(self.wide).reshape(()).clone()
        if reduction == "mean":
            return self.weight.sum()
        return torch.ones((), dtype=self.wide, device=self.class_index.device)

    def capped(self, logits):
        return capped(logits, self.softcap)


class Targets(NamedTuple):
    """The per-row values of :class:`RowRule` that depend on the targets alone."""

    valid: torch.Tensor
    has_class: torch.Tensor
    class_index: torch.Tensor
    weight: torch.Tensor


def read_targets(target, vocab, ignore_index, class_weight, wide):
    valid = ~ignored_rows(target, ignore_index)
    has_class = valid & (target >= 0) & (target < vocab)
    index = torch.where(has_class, target, 0).long()
    weight = torch.where(has_class, 1.0 if class_weight is None else class_weight[index], 0.0).to(wide)
    return Targets(valid, has_class, index, weight)


def make_rule(op, dtype, vocab, target, options):
    """The :class:`RowRule` of a call. Raises RuntimeError for a CPU target out of range."""
    if target.device.type == "cpu":
        check_targets(op, target, vocab, options.ignore_index)
    wide = accumulate_dtype(dtype)
    class_weight = None if options.ce_weight is None else options.ce_weight.to(wide)
    return RowRule(
        wide=wide,
        vocab=vocab,
        **read_targets(target, vocab, options.ignore_index, class_weight, wide)._asdict(),
        token_weight=None if options.token_weight is None else options.token_weight.to(wide),
        class_weight=class_weight,
        class_weight_sum=float(vocab) if class_weight is None else class_weight.sum(),
        label_smoothing=options.label_smoothing,
        lse_square_scale=options.lse_square_scale,
        softcap=options.softcap,
    )


def at_original_rows(results, metrics, reduction, index, rows):
    """Scatters the results of :meth:`RowResults.reduced` for the rows ``index`` (int64) to all ``rows`` rows;
    the other rows get the values of ignored rows."""
    per_row = reduction == "none"
    whole = per_row, per_row and metrics.z_loss, False
    has_rows = *whole, metrics.argmax, metrics.logprobs, metrics.entropy

    def scattered(values):
        ignored = -1 if values.dtype == torch.int64 else 0
        return values.new_full((rows,), ignored).index_copy_(0, index, values)

    return tuple(scattered(v) if scatter else v for v, scatter in zip(results, has_rows, strict=True))


class RowResults:
    """Per-row results of a call, filled one block of rows at a time."""

    def __init__(self, rule, metrics):
        self.rule, self.metrics, self._memory = rule, metrics, None
        rows, wide = rule.class_index.shape[0], rule.wide

        def buffer(needed, dtype=wide):
            return torch.empty(rows if needed else 0, dtype=dtype, device=rule.class_index.device)

        self.loss = buffer(True)
        # (2, rows): the maximum of the capped logits z, and the sum of exp(z - maximum). The log-sum-exp is
        # rounded where logits are large.
        self.stats = self.loss.new_empty(2, rows)
        self.z_loss = buffer(metrics.z_loss)
        self.predicted = buffer(metrics.argmax or metrics.token_accuracy, torch.int64)
        self.logprobs, self.entropy = buffer(metrics.logprobs), buffer(metrics.entropy)

    def fill(self, block, logits):
        """Computes the results of rows ``block``; returns the capped logits z and exp(z - their maximum),
        whose memory the next block reuses."""
        rule, metrics = self.rule, self.metrics
        valid = rule.valid[block]
        z = rule.capped(logits)
        if self._memory is None:
            self._memory = torch.empty_like(z, memory_format=torch.contiguous_format)
        largest = z.amax(-1)
        exp = torch.sub(z, largest.unsqueeze(1), out=self._memory[: z.shape[0]]).exp_()
        total = exp.sum(-1)
        log_total = total.log()
        target = z.gather(1, rule.class_index[block].unsqueeze(1)).squeeze(1)
        below = cost = None
        if rule.label_smoothing != 0.0 or metrics.entropy:
            below = largest.unsqueeze(1) - z
        if rule.label_smoothing != 0.0:
            weighted = below if rule.class_weight is None else below * rule.class_weight
            cost = weighted.sum(-1) + rule.class_weight_sum * log_total
        self.fill_from(block, largest, total, target, cost)
        if metrics.entropy:
            entropy = torch.where(exp == 0, 0.0, exp * below).sum(-1) / total + log_total
            self.entropy[block] = torch.where(valid, entropy, 0.0)
        if self.predicted.numel():
            self.predicted[block] = torch.where(valid, logits.argmax(-1), -1)
        return z, exp

    def fill_with_gradient(self, block, logits, upstream, out):
        """As :meth:`fill`, and writes the gradient to ``out``, which may be the logits."""
        z, exp = self.fill(block, logits)
        wide = out if out.dtype == self.rule.wide else None
        grad = row_gradient(self.rule, block, z, self.stats[:, block], upstream, exp, wide)
        if wide is None:
            out.copy_(grad)

    def fill_from(self, block, largest, total, target, cost):
        """Loss, z-loss and log-probabilities of rows ``block``.

        ``largest``: of their logits z. ``total``: ``sum(exp(z - largest))``. ``target``: the logit of the
        target. ``cost``: ``sum(w * (lse - z))`` if labels are smoothed.
        """
        rule, metrics = self.rule, self.metrics
        valid, has_class, weight = rule.valid[block], rule.has_class[block], rule.weight[block]
        self.stats[0, block] = torch.where(valid, largest, 0.0)
        self.stats[1, block] = torch.where(valid, total, 1.0)
        # Without an offset of all logits before anything is rounded.
        logp = (target - largest) - total.log()
        smoothing = rule.label_smoothing
        loss = torch.zeros_like(logp)
        if smoothing != 1.0:
            loss -= (1.0 - smoothing) * weight * logp
        if smoothing != 0.0:
            loss += smoothing / rule.vocab * cost

        def masked(values):
            """``values``, but nan where the target is out of range and 0 where the row is ignored."""
            return torch.where(valid, torch.where(has_class, values, torch.nan), 0.0)

        def scaled(values):
            return masked(values if rule.token_weight is None else rule.token_weight[block] * values)

        if rule.lse_square_scale != 0.0:
            z_loss = rule.lse_square_scale * weight * (largest + total.log()).square()
            loss += z_loss
            if metrics.z_loss:
                self.z_loss[block] = scaled(z_loss)
        elif metrics.z_loss:
            self.z_loss[block] = 0.0
        self.loss[block] = scaled(loss)
        if metrics.logprobs:
            self.logprobs[block] = masked(logp)

    def reduced(self, denominator, reduction):
        """(loss, z_loss, token_accuracy, argmax, logprobs, entropy) as the ops return them: metrics that were
        not requested are empty."""
        rule, metrics = self.rule, self.metrics

        def reduce(values):
            return values if reduction == "none" else values.sum() / denominator

        accuracy = self.loss.new_empty(0)
        if metrics.token_accuracy:
            hits = (self.predicted == rule.class_index) & rule.has_class
            accuracy = hits.sum(dtype=rule.wide) / rule.valid.sum(dtype=rule.wide)
        predicted = self.predicted if metrics.argmax else self.predicted.new_empty(0)
        z_loss = reduce(self.z_loss) if metrics.z_loss else self.z_loss
        return reduce(self.loss), z_loss, accuracy, predicted, self.logprobs, self.entropy


def gradient_weights(rule, block, largest, total):
    """Coefficients in the gradient of a row with logits z: (of exp(z - largest), of the one-hot target), each
    per row, and of the class weights, one number."""
    weight, smoothing = rule.weight[block], rule.label_smoothing
    hard = (1.0 - smoothing) * weight
    scale = hard + smoothing / rule.vocab * rule.class_weight_sum
    if rule.lse_square_scale != 0.0:
        scale = scale + 2.0 * rule.lse_square_scale * weight * (largest + total.log())
    return scale / total, hard, smoothing / rule.vocab


def row_upstream(rule, block, upstream):
    """The gradient with respect to the unweighted loss of each row; nan where the target is out of range."""
    if rule.token_weight is not None:
        upstream = upstream * rule.token_weight[block]
    return torch.where(rule.has_class[block], upstream, torch.nan)


def row_gradient(rule, block, z, stats, upstream, exp=None, out=None):
    """d(loss)/d(logits) of rows ``block`` in the accumulation dtype, from their capped logits z.

    Args:
        stats: the statistics of these rows from :class:`RowResults`.
        upstream: the gradient with respect to the loss of each row, or one scalar for all rows.
        exp: ``exp(z - largest)``, which is overwritten, or None.
        out: memory for the gradient, in the accumulation dtype, or None.
    """
    scale, hard, per_class = gradient_weights(rule, block, *stats)
    grad = (z - stats[0].unsqueeze(1)).exp_() if exp is None else exp
    out = grad if out is None else out
    index, upstream = rule.class_index[block].unsqueeze(1), row_upstream(rule, block, upstream).unsqueeze(1)
    scale, hard = scale.unsqueeze(1), hard.unsqueeze(1)
    if per_class == 0.0 and rule.softcap is None:
        grad_target = (grad.gather(1, index) * scale - hard) * upstream
        grad = torch.mul(grad, scale * upstream, out=out).scatter_(1, index, grad_target)
    else:
        grad.mul_(scale).sub_(per_class * (1.0 if rule.class_weight is None else rule.class_weight))
        grad.scatter_(1, index, grad.gather(1, index) - hard)
        if rule.softcap is not None:
            grad.mul_(1.0 - (z / rule.softcap).square_())
        grad = torch.mul(grad, upstream, out=out)
    valid = rule.valid[block]
    # Not on a GPU: reading the mask would synchronise.
    if valid.device.type == "cpu" and valid.all():
        return grad
    return grad.masked_fill_(~valid.unsqueeze(1), 0.0)
