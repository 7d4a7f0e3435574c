# SPDX-License-Identifier: BSD-3-Clause
"""Divergences and distillation losses."""

import torch
from torch.nn import functional as F

from .case import IGNORED, classes, compare, random
from .cross_entropy import LOGITS, T, W, X

TEACHER, TEACHER_X, TEACHER_W = (
    random(9, 11, seed=7, grad=False),
    random(9, 6, grad=False),
    random(11, 6, grad=False),
)
LOG_Q = LOGITS.detach().log_softmax(-1).requires_grad_()
LOG_P, P = TEACHER.log_softmax(-1), TEACHER.softmax(-1)
Q = LOGITS.detach().softmax(-1).requires_grad_()


def kl_rows(p, q):
    """KL(p || q) of log-probabilities."""
    return (p.exp() * (p - q)).sum(-1)


def jsd_rows(q, p, beta):
    mixed = torch.logsumexp(torch.stack((p + torch.tensor(beta).log(), q + torch.tensor(1 - beta).log())), 0)
    return beta * kl_rows(p, mixed) + (1 - beta) * kl_rows(q, mixed)


def mean(rows, t):
    return rows[t != IGNORED].sum() / (t != IGNORED).sum()


def tvd_rows(q, p):
    return 0.5 * (p - q).abs().sum(-1)


def heads(formula, temperature=1.0):
    """The formula of the log-probabilities of student and teacher."""

    def of_heads(x, w, tx, tw, t):
        student, teacher = ((a @ b.T / temperature).log_softmax(-1) for a, b in ((x, w), (tx, tw)))
        return formula(student, teacher, t)

    return of_heads


compare(
    "losses.divergence", "LigerJSDFunction", lambda f, q, p, t: f.apply(q, p, t, 0.3, IGNORED),
    lambda q, p, t: mean(jsd_rows(q, p, 0.3), t), LOG_Q, LOG_P, T,
)  # fmt: skip
compare(
    "losses.divergence", "liger_jsd", lambda f, q, p, t: f(q, p, t, 0.3, IGNORED),
    lambda q, p, t: mean(jsd_rows(q, p, 0.3), t), LOG_Q, LOG_P, T,
)  # fmt: skip
compare(
    "functional",
    "jsd",
    lambda f, q, p: f(q, p, None, 0.3),
    lambda q, p: jsd_rows(q, p, 0.3).mean(),
    LOG_Q,
    LOG_P,
)
compare(
    "losses.divergence", "LigerJSD", lambda f, q, p, t: f(0.3)(q, p, t),
    lambda q, p, t: mean(jsd_rows(q, p, 0.3), t), LOG_Q, LOG_P, T,
)  # fmt: skip
HEADS = X, W, TEACHER_X, TEACHER_W, T
JSD_OF_HEADS = heads(lambda q, p, t: mean(jsd_rows(q, p, 0.3), t), 1.5)
compare(
    "losses.divergence", "LigerFusedLinearJSDFunction",
    lambda f, x, w, tx, tw, t: f.apply(x, w, tx, tw, t, 0.3, IGNORED, 1.5), JSD_OF_HEADS, *HEADS,
)  # fmt: skip
compare(
    "losses.divergence", "liger_fused_linear_jsd", lambda f, x, w, tx, tw, t: f(x, w, tx, tw, t, 0.3, IGNORED, 1.5),
    JSD_OF_HEADS, *HEADS,
)  # fmt: skip
compare(
    "functional", "fused_linear_jsd", lambda f, x, w, tx, tw, t: f(x, w, tx, tw, t, 0.3, IGNORED, 1.5),
    JSD_OF_HEADS, *HEADS,
)  # fmt: skip
compare(
    "losses.divergence", "LigerFusedLinearJSD", lambda f, x, w, tx, tw, t: f(0.3, IGNORED, 1.5)(x, w, tx, tw, t),
    JSD_OF_HEADS, *HEADS,
)  # fmt: skip
compare(
    "losses.divergence", "LigerKLDivLossFunction", lambda f, q, p: (f.apply(q, p), f.apply(q, p.log(), "mean", True)),
    lambda q, p: (F.kl_div(q, p, reduction="batchmean"), F.kl_div(q, p, reduction="none").mean()), LOG_Q, P,
)  # fmt: skip
compare(
    "losses.divergence", "liger_kl_div", lambda f, q, p: (f(q, p), f(q, p, reduction="none")),
    lambda q, p: (F.kl_div(q, p, reduction="none").mean(), F.kl_div(q, p, reduction="none")), LOG_Q, P,
)  # fmt: skip
compare(
    "functional",
    "kl_div",
    lambda f, q, p: f(q, p, "sum"),
    lambda q, p: F.kl_div(q, p, reduction="sum"),
    LOG_Q,
    P,
)
compare(
    "losses.divergence", "LigerKLDIVLoss", lambda f, q, p: f(1e-10, reduction="batchmean", log_target=True)(q, p),
    lambda q, p: F.kl_div(q, p, reduction="batchmean", log_target=True), LOG_Q, LOG_P,
)  # fmt: skip


def kl_of_head(x, w, p, t):
    q = (x @ w.T / 1.5).log_softmax(-1)
    return mean(F.kl_div(q, p, reduction="none").sum(-1), t)


compare(
    "losses.divergence", "LigerFusedLinearKLDivFunction",
    lambda f, x, w, p, t: f.apply(x, w, p, t, "batchmean", IGNORED, 1.5), kl_of_head, X, W, P, T,
)  # fmt: skip
compare(
    "losses.divergence", "liger_fused_linear_kl_div",
    lambda f, x, w, p, t: f(x, w, p, t, "mean", IGNORED, 1.5) * 11, kl_of_head, X, W, P, T,
)  # fmt: skip
compare(
    "losses.divergence", "LigerFusedLinearKLDivLoss",
    lambda f, x, w, p, t: f("batchmean", IGNORED, 1.5)(x, w, p, t), kl_of_head, X, W, P, T,
)  # fmt: skip
compare(
    "losses.divergence", "LigerTVDLossFunction",
    lambda f, q, p, t: (f.apply(q, p, t), f.apply(q, p, None, "sum"), f.apply(q, p, None, "none")),
    lambda q, p, t: (mean(tvd_rows(q, p), t), tvd_rows(q, p).sum(), 0.5 * (q - p).abs()), Q, P, T,
)  # fmt: skip
compare(
    "losses.divergence",
    "liger_tvd",
    lambda f, q, p, t: f(q, p, t),
    lambda q, p, t: mean(tvd_rows(q, p), t) / 11,
    Q,
    P,
    T,
)
compare(
    "losses.divergence",
    "LigerTVDLoss",
    lambda f, q, p, t: f()(q, p, t),
    lambda q, p, t: mean(tvd_rows(q, p), t),
    Q,
    P,
    T,
)


def ce_tvd(student, teacher, t):
    valid = t != IGNORED
    return F.cross_entropy(student, t, reduction="none"), tvd_rows(
        student.softmax(-1), teacher.softmax(-1)
    ) * valid


compare(
    "losses.divergence",
    "LigerFusedCETVDFunction",
    lambda f, s, p, t: f.apply(s, p, t),
    ce_tvd,
    LOGITS,
    TEACHER,
    T,
)
compare(
    "losses.divergence", "LigerFusedCETVDLoss", lambda f, s, p, t: f()(s, p, t), ce_tvd, LOGITS, TEACHER, T
)


# --- losses with labels -------------------------------------------------------------------------------------


def with_labels(distance):
    def loss(x, w, tx, tw, t):
        student, teacher = x @ w.T, tx @ tw.T
        hard, soft = F.cross_entropy(student, t), mean(distance(student, teacher), t)
        return 0.3 * hard + 0.7 * soft, soft.detach(), hard.detach()

    return loss


JSD_WITH_LABELS = with_labels(
    lambda s, p: jsd_rows((s / 1.5).log_softmax(-1), (p / 1.5).log_softmax(-1), 0.4)
)
COSINE_WITH_LABELS = with_labels(lambda s, p: 0.4 * (1 - F.cosine_similarity(s, p, -1)))
ARGUMENTS = 0.3, 0.7, 0.4, IGNORED, 1.5, True, 4, True
for _name, _formula in (("JSD", JSD_WITH_LABELS), ("CosineSimilarity", COSINE_WITH_LABELS)):
    compare(
        "losses.distillation", f"LigerFusedLinear{_name}Function",
        lambda f, x, w, tx, tw, t: f.apply(x, w, tx, tw, t, None, None, *ARGUMENTS), _formula, *HEADS,
    )  # fmt: skip
    compare(
        "losses.distillation", f"LigerFusedLinear{_name}Loss",
        lambda f, x, w, tx, tw, t: f(*ARGUMENTS)(x, w, tx, tw, t), _formula, *HEADS,
    )  # fmt: skip
    compare(
        "losses.distillation", f"liger_fused_linear_{'jsd' if _name == 'JSD' else 'cosine'}",
        lambda f, x, w, tx, tw, t: f(x, w, tx, tw, t, None, None, *ARGUMENTS), _formula, *HEADS,
    )  # fmt: skip


def own_loss(base):
    """A distillation loss as another project defines one: the mean squared difference of the
    probabilities."""

    class Loss(base):
        @staticmethod
        def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, beta=1.0):
            rows = (student_logits.softmax(-1) - teacher_logits.softmax(-1)).square().sum(-1)
            return beta * rows[target != ignore_index].sum()

        @classmethod
        def forward(cls, ctx, x, w, tx, tw, t, bias):
            return super().forward(
                cls=cls, ctx=ctx, student_input=x, student_weight=w, teacher_input=tx, teacher_weight=tw, target=t,
                student_bias=bias, chunk_size=4, weight_hard_loss=0.3, weight_soft_loss=0.7, beta=0.4,
                temperature=1.5,
            )  # fmt: skip

    return Loss


def own_loss_formula(x, w, tx, tw, t, bias):
    student, teacher = x @ w.T + bias, tx @ tw.T
    rows = ((student / 1.5).softmax(-1) - (teacher / 1.5).softmax(-1)).square().sum(-1)
    return 0.3 * F.cross_entropy(student, t) + 0.7 * 0.4 * mean(rows, t)


compare(
    "losses.distillation_base", "LigerFusedLinearDistillationBase",
    lambda f, *tensors: own_loss(f).apply(*tensors), own_loss_formula, *HEADS, random(11, seed=9),
)  # fmt: skip
assert classes(9).equal(T)
