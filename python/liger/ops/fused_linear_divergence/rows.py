# SPDX-License-Identifier: BSD-3-Clause
"""Distillation losses of rows of a student's logits, and the gradient of the logits.

The loss of a row is ``soft`` times its distance from the teacher plus ``hard`` times the cross entropy of its
target. Both use the same logits. At temperature 1 the divergence op adds the gradient of cross entropy in the
same pass. At other temperatures the gradient of cross entropy is computed first, in a separate buffer, and
added.

The logits of 16-bit models are float32: the gradient depends on the difference between student and teacher,
most of which a rounding to 16 bits would lose. The gradient is rounded to 16 bits once.
"""

from typing import NamedTuple

import torch

from ..._core.math.computed_rows import ignored_rows
from ..._core.math.dtypes import accumulate_dtype
from ..._core.math.row_blocks import row_blocks
from ..._core.op.by_name import options_among
from ..cross_entropy.stats import cross_entropy_stats_backward_
from ..divergence.op import divergence_ce_forward_, divergence_forward_
from ..divergence.rows import target_columns, target_logits

# Lower bound of the norm of a row of logits in the cosine distance.
_MIN_NORM = 1e-8
# Rows of the separate gradient of cross entropy that exist at a time.
_CE_GRADIENT_ROWS = 64


class Terms(NamedTuple):
    """The options of the loss of a row. A term is not computed if its factor, ``soft`` or ``hard``, is 0."""

    divergence: str
    beta: float
    temperature: float
    soft: float
    hard: float
    ignore_index: int

    @classmethod
    def of_op(cls, arguments):
        return options_among(cls, arguments)

    @property
    def distance(self):
        """(divergence, beta, temperature)"""
        return self[:3]

    @property
    def has_separate_ce(self):
        """True if cross entropy uses another softmax than the distance, so that its gradient is computed
        separately."""
        tempered = self.temperature != 1.0 and self.divergence != "cosine"
        return bool(self.soft and self.hard) and tempered

    @property
    def extra_logits(self):
        """Number of additional buffers of logits, for the separate gradient of cross entropy."""
        return int(self.has_separate_ce and self.divergence in _RULES)


class Targets(NamedTuple):
    """The targets of rows. Without targets all rows are valid.

    Attributes:
        target: (rows,) class indices.
        ignored: (rows,) whether the target is ``ignore_index``.
        unknown: (rows,) whether the target is out of range and not ignored; None if targets only mark ignored
            rows.
    """

    target: torch.Tensor
    ignored: torch.Tensor
    unknown: torch.Tensor | None
    ignore_index: int

    @classmethod
    def of_rows(cls, input, target, ignore_index, classes):
        """``classes``: the number of classes; None if targets only mark ignored rows."""
        if target is None:
            # Zeros with ignore_index -1: all rows are valid.
            target, ignore_index = input.new_zeros(input.shape[0], dtype=torch.int64), -1
        unknown = None if classes is None else target_columns(target, classes, ignore_index)[1]
        return cls(target, ignored_rows(target, ignore_index), unknown, ignore_index)

    def at(self, rows):
        unknown = None if self.unknown is None else self.unknown[rows]
        return Targets(self.target[rows], self.ignored[rows], unknown, self.ignore_index)

    def of(self, x):
        """(rows,) the element of each row at its target, in the dtype of the statistics; nan if out of
        range."""
        return target_logits(x, self.target, self.ignore_index)

    def column(self, x):
        """(rows, 1) the columns of the targets in x; 0 if out of range."""
        return target_columns(self.target, x.shape[1], self.ignore_index)[0]

    def zero_ignored(self, per_row):
        return torch.where(self.ignored, 0.0, per_row)

    def statistics(self, logits):
        """(2, N): the largest logit m of each row, and the sum of exp(logit - m)."""
        return torch.ops.liger.cross_entropy_stats.default(
            logits, self.target, None, 0, self.ignore_index, None, False
        )[:2]

    def coefficients(self, reference, coef_exp, coef_target):
        """The arguments of cross_entropy_stats_backward after the logits."""
        return self.target, reference, coef_exp, coef_target, None, None, 0, self.ignore_index, None, None

    def ce_coefficients(self, stats, weight):
        """The same for ``weight`` times the cross entropy of each row. ``stats``: :meth:`statistics`."""
        return self.coefficients(stats[0], weight / stats[1], weight)


class RowWeights(NamedTuple):
    """The factors of the two losses of each row, (rows,) float32, including ``soft`` and ``hard`` of
    :class:`Terms`. The factor of cross entropy is nan where the target is out of range."""

    soft: torch.Tensor
    hard: torch.Tensor

    @classmethod
    def of(cls, row_weight, terms, targets):
        soft, hard = row_weight * terms.soft, row_weight * terms.hard
        if targets.unknown is not None:
            hard = torch.where(targets.unknown, torch.nan, hard)
        return cls(soft, hard)

    def at(self, rows):
        return RowWeights(self.soft[rows], self.hard[rows])


class Rows(NamedTuple):
    """The inputs of the loss of some rows.

    Attributes:
        logits: (N, V) of the student. They may be overwritten.
        teacher: logits (N, V) in the dtype of the student's, or log-probabilities (N, k); unused if ``soft``
            is 0.
        indices: (N, k) classes of the teacher's log-probabilities, else None.
        targets: :class:`Targets`; ignored rows have loss 0.
        weights: :class:`RowWeights`.
        gradient: (N, V) memory for the gradient of the logits, possibly in a 16-bit dtype; None if it is not
            needed.
    """

    logits: torch.Tensor
    teacher: torch.Tensor
    indices: torch.Tensor | None
    targets: Targets
    weights: RowWeights
    gradient: torch.Tensor | None


def _cross_entropy(logits, targets):
    """(log-probabilities of the targets, :meth:`Targets.statistics`) of rows."""
    stats = targets.statistics(logits)
    return (targets.of(logits) - stats[0]) - stats[1].log(), stats


def _hard_rows(terms, rows):
    logits, targets, weights = rows.logits, rows.targets, rows.weights
    log_q, stats = _cross_entropy(logits, targets)
    if rows.gradient is not None:
        cross_entropy_stats_backward_(logits, *targets.ce_coefficients(stats, weights.hard))
    return None, targets.zero_ignored(weights.hard * -log_q)


def _distance(terms, rows):
    divergence, weights = (*terms.distance, False), rows.weights.soft
    tensors, ignore_index = (rows.logits, rows.teacher, rows.targets.target), rows.targets.ignore_index
    forward = torch.ops.liger.divergence_forward.default
    return forward(*tensors, weights, *divergence, ignore_index, True, False)[:2]


def _shared_softmax_rows(terms, rows):
    if rows.gradient is not None:
        tensors = rows.logits, rows.teacher, rows.targets.target, rows.weights.soft
        divergence, ratio = terms.distance, terms.hard / terms.soft
        soft, hard = divergence_ce_forward_(
            *tensors, *divergence, ratio, rows.targets.ignore_index, rows.gradient
        )
        return soft, hard if terms.hard else None
    soft, stats = _distance(terms, rows)
    if not terms.hard:
        return soft, None
    log_q = (rows.targets.of(rows.logits) - stats[0]) - stats[1]
    return soft, rows.targets.zero_ignored(rows.weights.hard * -log_q)


def _tempered_rows(terms, rows):
    log_q, stats = _cross_entropy(rows.logits, rows.targets)
    hard = rows.targets.zero_ignored(rows.weights.hard * -log_q)
    if rows.gradient is None:
        return _distance(terms, rows)[0], hard
    soft, backward = torch.empty_like(hard), torch.ops.liger.cross_entropy_stats_backward.default
    # Both gradients are in the accumulation dtype until they are added. The buffer of one has only a few
    # rows.
    for begin in range(0, len(hard), _CE_GRADIENT_ROWS):
        some = slice(begin, begin + _CE_GRADIENT_ROWS)
        logits, targets, weights = rows.logits[some], rows.targets.at(some), rows.weights.at(some)
        ce_gradient = backward(logits, *targets.ce_coefficients(stats[:, some], weights.hard))
        tensors, divergence = (logits, rows.teacher[some], targets.target, weights.soft), terms.distance
        soft[some] = divergence_forward_(*tensors, *divergence, False, targets.ignore_index, True)
        torch.add(logits, ce_gradient, out=rows.gradient[some])
    return soft, hard


def _cosine_rows(terms, rows):
    logits, teacher, _, targets, weights, gradient = rows
    column, wide = targets.column(logits), accumulate_dtype(logits.dtype)
    soft, hard = (logits.new_empty(logits.shape[0], dtype=wide) for _ in range(2))
    for block in row_blocks(logits):
        z, t = logits[block].to(wide), teacher[block].to(wide)
        norm, norm_t = (x.norm(dim=1, keepdim=True).clamp_min_(_MIN_NORM) for x in (z, t))
        # Not in place: the teacher's logits may be an argument of the op.
        t = t / norm_t
        cosine = (z * t).sum(1, keepdim=True) / norm
        soft[block] = 1.0 - cosine.squeeze(1)
        if terms.hard:
            log_q = z.log_softmax(1)
            hard[block] = -log_q.gather(1, column[block]).squeeze(1)
        if gradient is None:
            continue
        soft_weight, hard_weight = (w[block].unsqueeze(1) for w in weights)
        grad = z.mul_(cosine / norm).sub_(t).mul_(soft_weight / norm)
        if terms.hard:
            grad += log_q.exp_().mul_(hard_weight).scatter_add_(1, column[block], -hard_weight)
        logits[block] = grad.masked_fill_(targets.ignored[block].unsqueeze(1), 0.0)
    return targets.zero_ignored(soft * weights.soft), targets.zero_ignored(
        hard * weights.hard
    ) if terms.hard else None


class _Support:
    """The teacher's top-k classes and log-probabilities, without the padding entries of -inf.

    A padding entry repeats the first known class of its row. A row of padding alone uses its first class.

    Attributes:
        known: (N, k) entries that are not padding, and the first entry of a row of padding.
        log_p: (N, k) log-probabilities.
        column: (N, k) classes.
        some: (N,) whether a row has an entry that is not padding.
        unknown: (N,) whether a row has an index out of range.
    """

    def __init__(self, log_p, indices, logits, wide):
        known = log_p > -torch.inf
        classes = (indices >= 0) & (indices < logits.shape[1])
        self.unknown = (known & ~classes).any(1)
        self.some = known.any(1)
        known[:, 0] |= ~self.some
        self.first = known.int().argmax(1, keepdim=True)
        self.known, self.log_p = known, log_p.to(wide)
        self.column = self.repeat_first(torch.where(classes, indices, 0).long())

    def repeat_first(self, x):
        return torch.where(self.known, x, x.gather(1, self.first))


def _normaliser(logits, temperature, targets):
    """(largest logit m, log of the sum of exp(logit - m)) of each row of ``logits / temperature``."""
    if temperature == 1.0:
        largest, total = targets.statistics(logits)
        return largest, total.log()
    wide, blocks = accumulate_dtype(logits.dtype), []
    for block in row_blocks(logits):
        z = logits[block].to(wide) / temperature
        largest = z.amax(1)
        z -= torch.where(largest == -torch.inf, 0.0, largest).unsqueeze(1)
        blocks.append(torch.stack((largest, z.exp_().sum(1).log_())))
    return torch.cat(blocks, 1)


def _write_exponentials(logits, temperature, targets, largest, factor):
    """Overwrites logits with ``factor * exp(logits / temperature - largest)``, ignored rows with 0."""
    # A row without a finite logit has no largest one.
    reference = torch.where(largest == -torch.inf, 0.0, largest)
    if temperature == 1.0:
        zeros = torch.zeros_like(factor)
        cross_entropy_stats_backward_(logits, *targets.coefficients(reference, factor, zeros))
        return
    reference, factor = reference.unsqueeze(1), targets.zero_ignored(factor).unsqueeze(1)
    for block in row_blocks(logits):
        z = logits[block].to(reference.dtype) / temperature
        logits[block] = z.sub_(reference[block]).exp_().mul_(factor[block])


def _topk_rows(terms, rows):
    logits, teacher, indices, targets, weights, gradient = rows
    wide, need_grad = accumulate_dtype(logits.dtype), gradient is not None
    support, ce_gradient = _Support(teacher, indices, logits, wide), None
    weights = RowWeights(torch.where(support.unknown, torch.nan, weights.soft), weights.hard)
    if terms.has_separate_ce:
        log_q_target, stats = _cross_entropy(logits, targets)
        if need_grad:
            backward = torch.ops.liger.cross_entropy_stats_backward.default
            ce_gradient = backward(logits, *targets.ce_coefficients(stats, weights.hard))
    z_target = targets.of(logits) / terms.temperature
    z = logits.gather(1, support.column).to(wide) / terms.temperature
    z = torch.where(support.known, z, -torch.inf)
    # The remaining classes are the tail. Its probability is a sum: 1 - sum(q) would lose digits by
    # cancellation.
    logits.scatter_(1, support.column, -torch.inf)
    largest, log_sum = _normaliser(logits, terms.temperature, targets)
    # From here on logits are relative to the largest one, so that a common offset cannot cause rounding
    # errors.
    origin = torch.maximum(largest, z.amax(1))
    tail, z, z_target = (largest - origin) + log_sum, z - origin.unsqueeze(1), z_target - origin
    lse = torch.logaddexp(tail, z.logsumexp(1))
    if terms.hard and not terms.has_separate_ce:
        log_q_target = z_target - lse
    hard = targets.zero_ignored(weights.hard * -log_q_target) if terms.hard else None

    log_p, log_mass = support.log_p, support.log_p.logsumexp(1)
    if terms.divergence == "topk_tail":
        # With all classes in the support, 1 - sum(p) is only rounding error.
        p_tail = torch.where(tail > -torch.inf, -torch.expm1(log_mass), 0.0).clamp_min_(0.0)
    else:
        log_mass = torch.where(support.some, log_mass, 0.0)
        log_p, p_tail = log_p - log_mass.unsqueeze(1), torch.zeros_like(log_mass)
    p, log_q, log_q_tail = log_p.exp(), z - lse.unsqueeze(1), tail - lse
    soft = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(1)
    soft += torch.where(p_tail > 0, p_tail * (p_tail.log() - log_q_tail), 0.0)
    soft = targets.zero_ignored(torch.where(support.some, soft * weights.soft, 0.0))
    if not need_grad:
        return soft, hard

    q, q_tail = log_q.exp(), log_q_tail.exp()
    soft_weight = torch.where(support.some, weights.soft / terms.temperature, 0.0)
    grad_tail, grad_support = soft_weight * (q_tail - p_tail), soft_weight.unsqueeze(1) * (q - p)
    if terms.hard and not terms.has_separate_ce:
        target_column = targets.column(logits)
        found = (support.column == target_column) & support.known
        inside = torch.where(found, grad_support, 0.0).sum(1)
        at_target = torch.where(found.any(1), inside, grad_tail * (z_target - tail).exp())
        grad_tail, grad_support = (
            grad_tail + weights.hard * q_tail,
            grad_support + weights.hard.unsqueeze(1) * q,
        )
    factor = torch.where(tail == -torch.inf, 0.0, grad_tail * (-log_sum).exp())
    _write_exponentials(logits, terms.temperature, targets, largest, factor)
    grad_support = support.repeat_first(targets.zero_ignored(grad_support.t()).t())
    logits.scatter_(1, support.column, grad_support.to(logits.dtype))
    if ce_gradient is not None:
        logits.add_(ce_gradient)
    elif terms.hard:
        # expm1 instead of softmax - onehot, which loses all digits if the target is very probable.
        at_target = targets.zero_ignored(torch.addcmul(at_target, weights.hard, torch.expm1(log_q_target)))
        logits.scatter_(1, target_column, at_target.to(logits.dtype).unsqueeze(1))
    return soft, hard


_RULES = {"cosine": _cosine_rows, "topk_tail": _topk_rows, "topk": _topk_rows}


# Rules that write the gradient to ``Rows.gradient``. The others overwrite the logits with it.
_DIRECT = (_shared_softmax_rows, _tempered_rows)


def _rule(terms):
    if not terms.soft:
        return _hard_rows
    return _RULES.get(terms.divergence, _tempered_rows if terms.has_separate_ce else _shared_softmax_rows)


def distil_rows(terms, rows):
    """Computes both terms of the loss of :class:`Rows`, and writes the gradient of their sum to
    ``rows.gradient``.

    Returns:
        (distance from the teacher, cross entropy), (N,) each, multiplied by their weights, float32; None for
        a term that is not computed.
    """
    rule = _rule(terms)
    losses = rule(terms, rows)
    if rows.gradient is not None and rule not in _DIRECT:
        rows.gradient.copy_(rows.logits)
    return losses
