"""Rows of logits of a student: what they lose, and how they become their own gradient where they lie.

The loss of a row is ``soft`` times its distance from the teacher plus ``hard`` times the cross entropy of its target.
Both see one set of logits. At temperature 1 the divergences' own op adds cross entropy to the gradient, and no pass is
added; at others it is made first, in memory of its own, and added.
"""

from typing import NamedTuple

import torch

from ._rows import row_blocks
from .cross_entropy_stats import cross_entropy_stats_backward_
from .divergence import divergence_ce_forward_, divergence_forward_
from .rms_norm import accumulate_dtype

# The norm that a row of logits has at least, for the cosine.
_LEAST_NORM = 1e-8


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
        """Whether cross entropy has a softmax of its own, whose gradient takes memory of its own."""
        tempered = self.temperature != 1.0 and self.divergence != "cosine"
        return bool(self.soft and self.hard) and tempered


class Targets(NamedTuple):
    """The targets of rows: their columns (rows, 1), and whether they count. Rows without any all count."""

    target: torch.Tensor
    ignored: torch.Tensor
    column: torch.Tensor
    ignore_index: int

    @classmethod
    def of_rows(cls, input, target, ignore_index):
        if target is None:
            # No class is -1.
            target, ignore_index = input.new_zeros(input.shape[0], dtype=torch.int64), -1
        ignored = target == ignore_index
        return cls(target, ignored, torch.where(ignored, 0, target.long()).unsqueeze(1), ignore_index)

    def at(self, rows):
        return Targets(self.target[rows], self.ignored[rows], self.column[rows], self.ignore_index)

    def of(self, x):
        """(rows,) the element of each row at the target, in the dtype of the statistics."""
        return x.gather(1, self.column).squeeze(1).to(accumulate_dtype(x.dtype))

    def live(self, per_row):
        return torch.where(self.ignored, 0.0, per_row)

    def statistics(self, logits):
        """(largest logit, log of the sum of exponentials past it) of each row."""
        largest, total, _ = torch.ops.liger.cross_entropy_stats.default(
            logits, self.target, None, 0, self.ignore_index, None, False
        )
        return largest, total.log()

    def coefficients(self, reference, of_exp, of_target):
        """What follows the logits in the arguments of the gradient ops of cross entropy."""
        return self.target, reference, of_exp, of_target, None, None, 0, self.ignore_index, None, None


class Part(NamedTuple):
    """Rows of a chunk, and what the teacher says of them.

    Attributes:
        rows: which of the chunk.
        teacher: logits (N, V), log-probabilities (N, k), or anything where ``soft`` is 0.
        indices: (N, k) classes of the log-probabilities of the teacher, else None.
    """

    rows: slice
    teacher: torch.Tensor
    indices: torch.Tensor | None


class RowWeights(NamedTuple):
    """What the two losses of each row are multiplied by, float32: ``soft`` and ``hard`` are among the factors."""

    soft: torch.Tensor
    hard: torch.Tensor

    def at(self, rows):
        return RowWeights(self.soft[rows], self.hard[rows])


def _cross_entropy(logits, targets):
    """(log-probabilities of the targets, log-sum-exp) of rows."""
    largest, log_sum = targets.statistics(logits)
    return (targets.of(logits) - largest) - log_sum, largest + log_sum


def _gradient_apart(logits, targets, lse, weights):
    """The gradient of cross entropy in memory of its own."""
    backward = torch.ops.liger.cross_entropy_stats_backward.default
    return backward(logits, *targets.coefficients(lse, weights.hard, weights.hard))


def _hard_rows(terms, logits, _part, targets, weights, need_grad):
    log_q, lse = _cross_entropy(logits, targets)
    if need_grad:
        cross_entropy_stats_backward_(logits, *targets.coefficients(lse, weights.hard, weights.hard))
    return None, targets.live(weights.hard * -log_q)


def _divergence_rows(terms, logits, part, targets, weights, need_grad, hard=0.0):
    """(losses, stats or None where nothing needs them); ``hard`` is the share of cross entropy in the gradient."""
    teacher, target, ignore_index = part.teacher, targets.target, targets.ignore_index
    if need_grad and hard:
        return divergence_ce_forward_(
            logits, teacher, target, weights.soft, terms.divergence, terms.beta, hard, ignore_index
        )
    arguments = (
        logits, teacher, target, weights.soft, terms.divergence, terms.beta, terms.temperature, False, ignore_index,
        True,
    )  # fmt: skip
    if need_grad:
        return divergence_forward_(*arguments), None
    return torch.ops.liger.divergence_forward.default(*arguments, False)[:2]


def _divergence_chunk(terms, logits, parts, targets, weights, need_grad):
    """A chunk at a time, since what is not the op itself takes a launch for each step."""
    # Their gradient will take the place of the logits.
    z = targets.of(logits) if terms.hard else None
    hard = terms.hard / terms.soft
    found = [
        _divergence_rows(
            terms, logits[part.rows], part, targets.at(part.rows), weights.at(part.rows), need_grad, hard
        )
        for part in parts
    ]
    soft = torch.cat([losses for losses, _ in found])
    if not terms.hard:
        return soft, None
    stats = torch.cat([stats[:2] for _, stats in found], 1)
    return soft, targets.live(weights.hard * -((z - stats[0]) - stats[1]))


def _tempered_rows(terms, logits, part, targets, weights, need_grad):
    log_q, lse = _cross_entropy(logits, targets)
    apart = _gradient_apart(logits, targets, lse, weights) if need_grad else None
    soft, _ = _divergence_rows(terms, logits, part, targets, weights, need_grad)
    if need_grad:
        logits.add_(apart)
    return soft, targets.live(weights.hard * -log_q)


def _cosine_rows(terms, logits, part, targets, weights, need_grad):
    teacher, wide = part.teacher, accumulate_dtype(logits.dtype)
    soft, hard = (logits.new_empty(logits.shape[0], dtype=wide) for _ in range(2))
    for block in row_blocks(logits):
        z, t = logits[block].to(wide), teacher[block].to(wide)
        norm, norm_t = (x.norm(dim=1, keepdim=True).clamp_min_(_LEAST_NORM) for x in (z, t))
        t /= norm_t
        cosine = (z * t).sum(1, keepdim=True) / norm
        soft[block] = 1.0 - cosine.squeeze(1)
        column, log_q = targets.column[block], None
        if terms.hard:
            log_q = z.log_softmax(1)
            hard[block] = -log_q.gather(1, column).squeeze(1)
        if not need_grad:
            continue
        of_soft, of_hard = (w[block].unsqueeze(1) for w in weights)
        grad = z.mul_(cosine / norm).sub_(t).mul_(of_soft / norm)
        if terms.hard:
            grad += log_q.exp_().mul_(of_hard).scatter_add_(1, column, -of_hard)
        logits[block] = grad.masked_fill_(targets.ignored[block].unsqueeze(1), 0.0)
    return targets.live(soft * weights.soft), targets.live(hard * weights.hard) if terms.hard else None


class _Support:
    """The classes whose log-probabilities a teacher gave: log p, and where they are, without the entries of -inf.

    Such entries fill up rows, so their class means nothing: they repeat the first one that is known. A row of nothing
    else keeps its first class, so that it has one, and is told by ``some``.
    """

    def __init__(self, log_p, indices, wide):
        known = log_p > -torch.inf
        self.some = known.any(1)
        known[:, 0] |= ~self.some
        self.first = known.int().argmax(1, keepdim=True)
        self.known, self.log_p = known, log_p.to(wide)
        self.column = self.repeat_first(indices.long())

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


def _topk_rows(terms, logits, part, targets, weights, need_grad):
    wide = accumulate_dtype(logits.dtype)
    support, apart = _Support(part.teacher, part.indices, wide), None
    if terms.hard_apart:
        log_q_target, lse = _cross_entropy(logits, targets)
        apart = _gradient_apart(logits, targets, lse, weights) if need_grad else None
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
        found = (support.column == targets.column) & support.known
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
        logits.scatter_(1, targets.column, at_target.to(logits.dtype).unsqueeze(1))
    return soft, hard


_RULES = {"cosine": _cosine_rows, "topk_tail": _topk_rows, "topk": _topk_rows}


def distil_rows(terms, logits, parts, targets, weights, need_grad):
    """The two terms of the loss of each row; with need_grad the gradient of their sum takes the place of the logits.

    Args:
        terms: :class:`Terms`.
        logits: (N, V) of the student. They may be overwritten in any case.
        parts: iterable of :class:`Part`, of all rows in their order. What one holds need not outlive it.
        targets: :class:`Targets`, real ones where ``hard`` is not 0; ignored rows lose nothing.
        weights: :class:`RowWeights`.

    Returns:
        (the distance from the teacher, the cross entropy), (N,) each, times their weights, float32; None for what is
        not computed.
    """
    if terms.soft and terms.divergence not in _RULES and not terms.hard_apart:
        return _divergence_chunk(terms, logits, parts, targets, weights, need_grad)
    rule = _RULES.get(terms.divergence, _tempered_rows) if terms.soft else _hard_rows
    found = [
        rule(terms, logits[part.rows], part, targets.at(part.rows), weights.at(part.rows), need_grad)
        for part in parts
    ]
    return tuple(None if losses[0] is None else torch.cat(losses) for losses in zip(*found, strict=True))
