"""Distillation losses of rows of a student's logits, and the gradient of the logits.

The loss of a row is ``soft`` times its distance from the teacher plus ``hard`` times the cross entropy of its target.
Both see one set of logits. At temperature 1 the divergences' own op adds cross entropy to the gradient, and no pass is
added; at others it is made first, in memory of its own, and added.

Logits of models in 16 bits are float32: what a student near its teacher learns from is their difference, of which a
rounding to 16 bits would leave little. Their gradient is rounded once, when it goes to memory of 16 bits.
"""

from typing import NamedTuple

import torch

from .._core.dtypes import accumulate_dtype
from .._core.row_blocks import row_blocks
from .cross_entropy_stats import cross_entropy_stats_backward_
from .divergence import divergence_ce_forward_, divergence_forward_
from .divergence_torch import target_columns, target_logits

# The norm that a row of logits has at least, for the cosine.
_LEAST_NORM = 1e-8
# Rows of a gradient that is made for itself at a time.
_APART = 64


class Terms(NamedTuple):
    """What the loss of a row consists of. ``soft`` or ``hard`` may be 0, then that part is not computed."""

    divergence: str
    beta: float
    temperature: float
    soft: float
    hard: float
    ignore_index: int

    @property
    def hard_apart(self):
        """Whether cross entropy has a softmax of its own, and so a gradient that is made for itself and added."""
        tempered = self.temperature != 1.0 and self.divergence != "cosine"
        return bool(self.soft and self.hard) and tempered

    @property
    def apart(self):
        """How many more tensors of logits are needed, for that gradient."""
        return int(self.hard_apart and self.divergence in _RULES)


class Targets(NamedTuple):
    """The targets of rows, and whether they count. Rows without any all count.

    Attributes:
        unknown: rows whose target is no class and not ignored, or None where only ``ignore_index`` means anything.
    """

    target: torch.Tensor
    ignored: torch.Tensor
    unknown: torch.Tensor | None
    ignore_index: int

    @classmethod
    def of_rows(cls, input, target, ignore_index, classes):
        """``classes``: how many there are, or None where targets are no labels."""
        if target is None:
            # No class is -1.
            target, ignore_index = input.new_zeros(input.shape[0], dtype=torch.int64), -1
        unknown = None if classes is None else target_columns(target, classes, ignore_index)[1]
        return cls(target, target == ignore_index, unknown, ignore_index)

    def at(self, rows):
        unknown = None if self.unknown is None else self.unknown[rows]
        return Targets(self.target[rows], self.ignored[rows], unknown, self.ignore_index)

    def of(self, x):
        """(rows,) the element of each row at the target, in the dtype of the statistics; nan where that is no class."""
        return target_logits(x, self.target, self.ignore_index)

    def column(self, x):
        """(rows, 1) the columns of x that targets are; 0 where they are none."""
        return target_columns(self.target, x.shape[1], self.ignore_index)[0]

    def live(self, per_row):
        return torch.where(self.ignored, 0.0, per_row)

    def statistics(self, logits):
        """(largest logit, log of the sum of exponentials past it) of each row."""
        largest, total, _ = torch.ops.liger.cross_entropy_stats.default(
            logits, self.target, None, 0, self.ignore_index, None, False
        )
        return largest, total.log()

    def coefficients(self, reference, coef_exp, coef_target):
        """What follows the logits in the arguments of the gradient ops of cross entropy."""
        return self.target, reference, coef_exp, coef_target, None, None, 0, self.ignore_index, None, None


class RowWeights(NamedTuple):
    """What the two losses of each row are multiplied by, float32: ``soft`` and ``hard`` are among the factors. nan in
    the place of ``hard`` where a target is no class."""

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
    """Rows of logits, and what is known of them.

    Attributes:
        logits: (N, V) of the student. They may be overwritten in any case.
        teacher: logits (N, V) of the dtype of the student's, log-probabilities (N, k), or anything where ``soft`` is 0.
        indices: (N, k) classes of the log-probabilities of the teacher, else None.
        targets: :class:`Targets`; ignored rows lose nothing.
        weights: :class:`RowWeights`.
        gradient: (N, V), memory for the gradient of the logits, maybe of fewer bits; None where none is wanted.
    """

    logits: torch.Tensor
    teacher: torch.Tensor
    indices: torch.Tensor | None
    targets: Targets
    weights: RowWeights
    gradient: torch.Tensor | None


def _cross_entropy(logits, targets):
    """(log-probabilities of the targets, log-sum-exp) of rows."""
    largest, log_sum = targets.statistics(logits)
    return (targets.of(logits) - largest) - log_sum, largest + log_sum


def _hard_rows(terms, rows):
    logits, targets, weights = rows.logits, rows.targets, rows.weights
    log_q, lse = _cross_entropy(logits, targets)
    if rows.gradient is not None:
        cross_entropy_stats_backward_(logits, *targets.coefficients(lse, weights.hard, weights.hard))
    return None, targets.live(weights.hard * -log_q)


def _distance(terms, rows):
    return torch.ops.liger.divergence_forward.default(
        rows.logits, rows.teacher, rows.targets.target, rows.weights.soft, terms.divergence, terms.beta,
        terms.temperature, False, rows.targets.ignore_index, True, False,
    )[:2]  # fmt: skip


def _of_one_softmax(terms, rows):
    if rows.gradient is not None:
        soft, hard = divergence_ce_forward_(
            rows.logits, rows.teacher, rows.targets.target, rows.weights.soft, terms.divergence, terms.beta,
            terms.temperature, terms.hard / terms.soft, rows.targets.ignore_index, rows.gradient,
        )  # fmt: skip
        return soft, hard if terms.hard else None
    soft, stats = _distance(terms, rows)
    if not terms.hard:
        return soft, None
    log_q = (rows.targets.of(rows.logits) - stats[0]) - stats[1]
    return soft, rows.targets.live(rows.weights.hard * -log_q)


def _tempered_rows(terms, rows):
    log_q, lse = _cross_entropy(rows.logits, rows.targets)
    hard = rows.targets.live(rows.weights.hard * -log_q)
    if rows.gradient is None:
        return _distance(terms, rows)[0], hard
    soft, backward = torch.empty_like(hard), torch.ops.liger.cross_entropy_stats_backward.default
    # Both gradients are wide until they are added. The second one has memory for a few rows.
    for begin in range(0, len(hard), _APART):
        some = slice(begin, begin + _APART)
        logits, targets, weights = rows.logits[some], rows.targets.at(some), rows.weights.at(some)
        apart = backward(logits, *targets.coefficients(lse[some], weights.hard, weights.hard))
        soft[some] = divergence_forward_(
            logits, rows.teacher[some], targets.target, weights.soft, terms.divergence, terms.beta, terms.temperature,
            False, targets.ignore_index, True,
        )  # fmt: skip
        torch.add(logits, apart, out=rows.gradient[some])
    return soft, hard


def _cosine_rows(terms, rows):
    logits, teacher, _, targets, weights, gradient = rows
    column, wide = targets.column(logits), accumulate_dtype(logits.dtype)
    soft, hard = (logits.new_empty(logits.shape[0], dtype=wide) for _ in range(2))
    for block in row_blocks(logits):
        z, t = logits[block].to(wide), teacher[block].to(wide)
        norm, norm_t = (x.norm(dim=1, keepdim=True).clamp_min_(_LEAST_NORM) for x in (z, t))
        # Not in place: they may be the caller's.
        t = t / norm_t
        cosine = (z * t).sum(1, keepdim=True) / norm
        soft[block] = 1.0 - cosine.squeeze(1)
        if terms.hard:
            log_q = z.log_softmax(1)
            hard[block] = -log_q.gather(1, column[block]).squeeze(1)
        if gradient is None:
            continue
        of_soft, of_hard = (w[block].unsqueeze(1) for w in weights)
        grad = z.mul_(cosine / norm).sub_(t).mul_(of_soft / norm)
        if terms.hard:
            grad += log_q.exp_().mul_(of_hard).scatter_add_(1, column[block], -of_hard)
        logits[block] = grad.masked_fill_(targets.ignored[block].unsqueeze(1), 0.0)
    return targets.live(soft * weights.soft), targets.live(hard * weights.hard) if terms.hard else None


class _Support:
    """The classes whose log-probabilities a teacher gave: log p, and where they are, without the entries of -inf.

    Such entries fill up rows, so their class means nothing: they repeat the first one that is known. A row of nothing
    else keeps its first class, so that it has one, and is told by ``some``. ``unknown`` are rows with an index that is
    no class.
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
    """(largest logit, log of the sum of exponentials past it) of each row of ``logits / temperature``."""
    if temperature == 1.0:
        return targets.statistics(logits)
    wide, parts = accumulate_dtype(logits.dtype), []
    for block in row_blocks(logits):
        z = logits[block].to(wide) / temperature
        largest = z.amax(1)
        z -= torch.where(largest == -torch.inf, 0.0, largest).unsqueeze(1)
        parts.append(torch.stack((largest, z.exp_().sum(1).log_())))
    return torch.cat(parts, 1)


def _write_exponentials(logits, temperature, targets, reference, factor):
    """Overwrites logits with ``factor * exp(logits / temperature - reference)``, ignored rows with 0."""
    if temperature == 1.0:
        nothing = torch.zeros_like(factor)
        cross_entropy_stats_backward_(logits, *targets.coefficients(reference, factor, nothing))
        return
    reference, factor = reference.unsqueeze(1), targets.live(factor).unsqueeze(1)
    for block in row_blocks(logits):
        z = logits[block].to(reference.dtype) / temperature
        logits[block] = z.sub_(reference[block]).exp_().mul_(factor[block])


def _topk_rows(terms, rows):
    logits, teacher, indices, targets, weights, gradient = rows
    wide, need_grad = accumulate_dtype(logits.dtype), gradient is not None
    support, apart = _Support(teacher, indices, logits, wide), None
    weights = RowWeights(torch.where(support.unknown, torch.nan, weights.soft), weights.hard)
    if terms.hard_apart:
        log_q_target, lse = _cross_entropy(logits, targets)
        if need_grad:
            backward = torch.ops.liger.cross_entropy_stats_backward.default
            apart = backward(logits, *targets.coefficients(lse, weights.hard, weights.hard))
    z_target = targets.of(logits) / terms.temperature
    z = logits.gather(1, support.column).to(wide) / terms.temperature
    z = torch.where(support.known, z, -torch.inf)
    # What is left is the tail: a sum, where 1 - sum(q) would be the small difference of large numbers.
    logits.scatter_(1, support.column, -torch.inf)
    largest, log_sum = _normaliser(logits, terms.temperature, targets)
    # From here on logits are differences from the largest of all: nothing common to them is there to be rounded.
    origin = torch.maximum(largest, z.amax(1))
    tail, z, z_target = (largest - origin) + log_sum, z - origin.unsqueeze(1), z_target - origin
    lse = torch.logaddexp(tail, z.logsumexp(1))
    if terms.hard and not terms.hard_apart:
        log_q_target = z_target - lse
    hard = targets.live(weights.hard * -log_q_target) if terms.hard else None

    log_p, log_mass = support.log_p, support.log_p.logsumexp(1)
    if terms.divergence == "topk_tail":
        # Where all classes were given, what the sum of their probabilities lacks is rounding.
        p_tail = torch.where(tail > -torch.inf, -torch.expm1(log_mass), 0.0).clamp_min_(0.0)
    else:
        log_mass = torch.where(support.some, log_mass, 0.0)
        log_p, p_tail = log_p - log_mass.unsqueeze(1), torch.zeros_like(log_mass)
    p, log_q, log_q_tail = log_p.exp(), z - lse.unsqueeze(1), tail - lse
    soft = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(1)
    soft += torch.where(p_tail > 0, p_tail * (p_tail.log() - log_q_tail), 0.0)
    soft = targets.live(torch.where(support.some, soft * weights.soft, 0.0))
    if not need_grad:
        return soft, hard

    q, q_tail = log_q.exp(), log_q_tail.exp()
    of_soft = torch.where(support.some, weights.soft / terms.temperature, 0.0)
    of_tail, of_support = of_soft * (q_tail - p_tail), of_soft.unsqueeze(1) * (q - p)
    if terms.hard and not terms.hard_apart:
        target_column = targets.column(logits)
        found = (support.column == target_column) & support.known
        inside = torch.where(found, of_support, 0.0).sum(1)
        at_target = torch.where(found.any(1), inside, of_tail * (z_target - tail).exp())
        of_tail, of_support = of_tail + weights.hard * q_tail, of_support + weights.hard.unsqueeze(1) * q
    # A tail without classes has nothing to be relative to.
    reference = torch.where(tail == -torch.inf, 0.0, origin + tail)
    _write_exponentials(logits, terms.temperature, targets, reference, of_tail)
    of_support = support.repeat_first(targets.live(of_support.t()).t())
    logits.scatter_(1, support.column, of_support.to(logits.dtype))
    if apart is not None:
        logits.add_(apart)
    elif terms.hard:
        # Not softmax - onehot in two roundings: where the target is probable, nothing of it would be left.
        at_target = targets.live(torch.addcmul(at_target, weights.hard, torch.expm1(log_q_target)))
        logits.scatter_(1, target_column, at_target.to(logits.dtype).unsqueeze(1))
    return soft, hard


_RULES = {"cosine": _cosine_rows, "topk_tail": _topk_rows, "topk": _topk_rows}


# Those that bring the gradient to its place by themselves; the others leave it in that of the logits.
_DIRECT = (_of_one_softmax, _tempered_rows)


def _rule(terms):
    if not terms.soft:
        return _hard_rows
    return _RULES.get(terms.divergence, _tempered_rows if terms.hard_apart else _of_one_softmax)


def distil_rows(terms, rows):
    """The two terms of the loss of each of :class:`Rows`; the gradient of their sum goes to its place.

    Returns:
        (the distance from the teacher, the cross entropy), (N,) each, times their weights, float32; None for what is
        not computed.
    """
    rule = _rule(terms)
    losses = rule(terms, rows)
    if rows.gradient is not None and rule not in _DIRECT:
        rows.gradient.copy_(rows.logits)
    return losses
