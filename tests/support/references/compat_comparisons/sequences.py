# SPDX-License-Identifier: BSD-3-Clause
"""Preference and policy losses."""

import losses_reference as plain
import torch
from torch.nn import functional as F

from .case import IGNORED, classes, compare, random

X, W, B, T = random(6, 5, 8), random(11, 8, seed=1), random(11, seed=2), classes(6, 5, ignored=6)
REFERENCE = random(6, 5, 7, grad=False), random(11, 7, grad=False)


def scores(x, w, b, t, average=False):
    """(S,) log-probabilities of sequences."""
    logp = F.linear(x, w, b).log_softmax(-1).gather(-1, t.clamp_min(0)[..., None])[..., 0] * (t != IGNORED)
    return logp.sum(-1) / (t != IGNORED).sum(-1) if average else logp.sum(-1)


def likelihood(x, w, b, t):
    half = len(t) // 2
    return F.cross_entropy(F.linear(x[:half], w, b).flatten(0, 1), t[:half].flatten())


def preference(x, w, b, t, pair_loss, beta, average=False, alpha=0.0, reference=None, more=None):
    """(loss, metrics) as liger_kernel returns them."""
    chosen, rejected = scores(x, w, b, t, average).chunk(2)
    ref = scores(*reference[:2], None, t, average).chunk(2) if reference else (0.0, 0.0)
    nll = likelihood(x, w, b, t)
    loss = pair_loss(chosen - ref[0], rejected - ref[1]).mean() + alpha * nll
    logits = F.linear(x, w, b)
    metrics = (
        chosen, rejected, logits[:3].mean(), logits[3:].mean(), nll if alpha else torch.tensor(0.0),
        beta * (chosen - ref[0]), beta * (rejected - ref[1]), *(more(chosen, rejected) if more else ()),
    )  # fmt: skip
    return loss, tuple(m.detach() for m in metrics)


def flat(result):
    return (result[0], *result[1])


def pair_cases(kind, ours_options, formula, apply_options, *more):
    """Cases of a loss as a module, as a function class and as a function."""
    name, lower = f"LigerFusedLinear{kind}", f"liger_fused_linear_{kind.lower()}"
    tensors = (X, W, B, T, *more)

    def expected(x, w, b, t, *rest):
        return flat(formula(x, w, b, t))

    compare(
        "losses.preference", f"{name}Loss", lambda f, x, w, b, t, *rest: flat(f(*ours_options)(w, x, t, b, *rest)),
        expected, *tensors,
    )  # fmt: skip
    compare(
        "losses.preference", f"{name}Function",
        lambda f, x, w, b, t, *rest: flat(f.apply(x, w, t, b, *rest, *apply_options)), expected, *tensors,
    )  # fmt: skip
    compare(
        "losses.preference", lower, lambda f, x, w, b, t, *rest: flat(f(x, w, t, b, *rest, *apply_options)), expected,
        *tensors,
    )  # fmt: skip


pair_cases(
    "DPO", (IGNORED, 0.3, 0.5, True),
    lambda *a: preference(*a, lambda c, r: -F.logsigmoid(0.3 * (c - r)), 0.3, False, 0.5, REFERENCE),
    (None, IGNORED, 0.3, True, True, True, False, 1, "sigmoid", 0.0, 0.05, 0.5), *REFERENCE,
)  # fmt: skip


def odds(chosen, rejected):
    return chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())


pair_cases(
    "ORPO", (IGNORED, 0.3),
    lambda *a: preference(
        *a, lambda c, r: -0.3 * F.logsigmoid(odds(c, r)), 0.3, True, 1.0,
        more=lambda c, r: (F.logsigmoid(odds(c, r)).mean(), odds(c, r).mean()),
    ),
    (IGNORED, 0.3),
)  # fmt: skip
pair_cases(
    "CPO", (IGNORED, 0.3, 0.5, 0.1),
    lambda *a: preference(
        *a, lambda c, r: -0.9 * F.logsigmoid(0.3 * (c - r)) - 0.1 * F.logsigmoid(0.3 * (r - c)), 0.3, False, 0.5
    ),
    (IGNORED, 0.3, 0.5, 0.1),
)  # fmt: skip
pair_cases(
    "SimPO", (IGNORED, 0.3, 0.5, 0.0, True, True, 0.7),
    lambda *a: preference(*a, lambda c, r: -F.logsigmoid(0.3 * (c - r) - 0.7), 0.3, True, 0.5),
    (IGNORED, 0.3, 0.5, 0.0, True, True, 0.7),
)  # fmt: skip

DESIRABLE = torch.tensor([1, 0, 1, 1, 0, 0])


def kto(x, w, b, t, kl):
    loss = plain.kto(x, w, t, DESIRABLE, REFERENCE, 0.3, kl, b)
    policy = scores(x, w, b, t)
    gains = 0.3 * (policy - scores(*REFERENCE, None, t))
    logits = F.linear(x, w, b).sum((1, 2))
    sums = [v[k == DESIRABLE].sum().detach() for v in (policy, logits, gains) for k in (1, 0)]
    return loss, *sums


KL = torch.tensor(0.2)
REST = (*REFERENCE, None)
compare(
    "losses.preference", "LigerFusedLinearKTOLoss",
    lambda f, x, w, b, t, kl: flat(f(IGNORED, 0.3, True, True)(x, w, t, b, DESIRABLE, *REST, kl)), kto, X, W, B, T, KL,
)  # fmt: skip
compare(
    "losses.preference", "LigerFusedLinearKTOFunction",
    lambda f, x, w, b, t, kl: flat(f.apply(x, w, t, DESIRABLE, b, *REST, kl, IGNORED, 0.3)), kto, X, W, B, T, KL,
)  # fmt: skip
compare(
    "losses.preference", "liger_fused_linear_kto",
    lambda f, x, w, b, t, kl: flat(f(x, w, t, DESIRABLE, b, *REST, kl, IGNORED, 0.3)), kto, X, W, B, T, KL,
)  # fmt: skip

ADVANTAGES = random(6, seed=4, grad=False)
MASK = (T != IGNORED).long()
IDS = T.clamp_min(0)
with torch.no_grad():
    OWN = F.linear(X, W, B).log_softmax(-1).gather(-1, IDS[..., None])[..., 0]
OLD, REF = (OWN + 0.3 * random(6, 5, seed=s, grad=False) for s in (1, 2))


def grpo(x, w, b):
    loss = plain.policy(
        x,
        w,
        T,
        ADVANTAGES[:, None].expand(T.shape),
        kind="dapo",
        old=OLD,
        ref=REF,
        beta=0.3,
        low=0.1,
        high=0.2,
        bias=b,
    )
    live = MASK.bool()
    gap, ratio = (REF - OWN)[live], (OWN - OLD).exp()
    sign = ADVANTAGES[:, None] > 0
    clipped = torch.where(sign, ratio > 1.2, ratio < 0.9)[live]
    return loss, (gap.exp() - gap - 1).mean(), clipped.float().mean()


GIVEN = REF, OLD, None, None, None
compare(
    "losses.policy", "LigerFusedLinearGRPOLoss",
    lambda f, x, w, b: flat(f(0.3, True, True, 1, 0.1, 0.2)(x, w, IDS, MASK, ADVANTAGES, b, *GIVEN)), grpo, X, W, B,
)  # fmt: skip
compare(
    "losses.policy", "LigerFusedLinearGRPOFunction",
    lambda f, x, w, b: flat(f.apply(x, w, IDS, MASK, ADVANTAGES, b, *GIVEN, 0.3, 0.1, 0.2)), grpo, X, W, B,
)  # fmt: skip
compare(
    "losses.policy", "liger_fused_linear_grpo",
    lambda f, x, w, b: flat(f(x, w, IDS, MASK, ADVANTAGES, b, *GIVEN, 0.3, 0.1, 0.2)), grpo, X, W, B,
)  # fmt: skip
