# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy: of logits, of an lm_head, of a sharded vocabulary; the loss of a causal language model."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from .case import IGNORED, classes, compare, random

X, W, B, T = random(9, 8), random(11, 8, seed=1), random(11, seed=2), classes(9)
LOGITS, CE_WEIGHT = random(9, 11), random(11, seed=5, grad=False).abs()


def loss_and_metrics(logits, target, z=0.0, smoothing=0.0, softcap=None, weight=None, reduction="mean"):
    """(loss, z-loss, token accuracy, predicted tokens) of torch; the accuracy is per row where the loss
    is."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    valid = target != IGNORED
    loss = F.cross_entropy(logits, target, weight, label_smoothing=smoothing, reduction=reduction)
    terms = z * torch.logsumexp(logits, -1).square() * valid
    z_loss = {"mean": terms.sum() / valid.sum(), "sum": terms.sum(), "none": terms}[reduction]
    predicted = torch.where(valid, logits.argmax(-1), -1)
    correct = (predicted == target).float()
    return (
        loss + z_loss,
        z_loss.detach(),
        correct if reduction == "none" else correct.sum() / valid.sum(),
        predicted,
    )


compare(
    "losses.cross_entropy", "LigerCrossEntropyFunction",
    lambda f, x, t, w: f.apply(x, t, None, IGNORED, 1e-2, 0.1, "sum", 5.0, True, True, True),
    lambda x, t, w: loss_and_metrics(x, t, 1e-2, 0.1, 5.0, None, "sum"),
    LOGITS, T, CE_WEIGHT,
)  # fmt: skip
compare(
    "losses.cross_entropy", "liger_cross_entropy",
    lambda f, x, t, w: f(x, t, w, None, IGNORED, None, "mean", 0.1),
    lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1),
    LOGITS, T, CE_WEIGHT,
)  # fmt: skip
compare(
    "losses.cross_entropy", "LigerCrossEntropyLoss",
    lambda f, x, t: f(None, IGNORED, 1e-2, 0.1, "none", 5.0, True, True, True)(x, t),
    lambda x, t: loss_and_metrics(x, t, 1e-2, 0.1, 5.0, None, "none"),
    LOGITS, T,
)  # fmt: skip
compare(
    "functional", "cross_entropy",
    lambda f, x, t, w: f(x, t, w, IGNORED, 0.0, 0.1, "none"),
    lambda x, t, w: (F.cross_entropy(x, t, w, label_smoothing=0.1, reduction="none"), None, None, None),
    LOGITS, T, CE_WEIGHT,
)  # fmt: skip


def lm_head(x, w, b, t, **options):
    return loss_and_metrics(F.linear(x, w, b), t, **options)


compare(
    "losses.cross_entropy", "LigerFusedLinearCrossEntropyFunction",
    lambda f, x, w, b, t: f.apply(x, w, t, b, None, IGNORED, 1e-2, 0.1, "mean", 5.0, True, None, False, True, True),
    lambda x, w, b, t: lm_head(x, w, b, t, z=1e-2, smoothing=0.1, softcap=5.0),
    X, W, B, T,
)  # fmt: skip
compare(
    "functional", "fused_linear_cross_entropy",
    lambda f, x, w, b, t: f(x, w, t, b, None, IGNORED, 0.0, 0.0, "none"),
    lambda x, w, b, t: (F.cross_entropy(F.linear(x, w, b), t, reduction="none"), None, None, None),
    X, W, B, T,
)  # fmt: skip


def token_scaled(x, w, b, t):
    logits = F.linear(x, w, b)
    valid = t != IGNORED
    p = logits.softmax(-1).gather(-1, t.clamp_min(0)[:, None])[:, 0].detach()
    return (F.cross_entropy(logits, t, reduction="none") * p).sum() / valid.sum()


compare(
    "losses.cross_entropy", "liger_fused_linear_cross_entropy",
    lambda f, x, w, b, t: f(x, w, t, b, use_token_scaling=True), token_scaled, X, W, B, T,
)  # fmt: skip
compare(
    "losses.cross_entropy", "LigerFusedLinearCrossEntropyLoss",
    lambda f, x, w, b, t: f(None, IGNORED, 1e-2, 0.1, "sum", 5.0, True, None, False, True, True)(w, x, t, b),
    lambda x, w, b, t: lm_head(x, w, b, t, z=1e-2, smoothing=0.1, softcap=5.0, reduction="sum"),
    X, W, B, T,
)  # fmt: skip


def with_gradients(x, w, b, t):
    loss = F.cross_entropy(F.linear(x, w, b), t)
    return (loss.detach(), None, None, None, *torch.autograd.grad(loss, (x, w, b)))


compare(
    "losses.cross_entropy", "fused_linear_cross_entropy_forward",
    lambda f, x, w, b, t: f(x, w, t, None, b), with_gradients, X, W, B, T,
)  # fmt: skip
compare(
    "losses.cross_entropy", "fused_linear_cross_entropy_backward",
    lambda f, x, w, b: f(torch.tensor(3.0), x, w, None),
    lambda x, w, b: (3 * x, 3 * w, None),
    X, W, B,
)  # fmt: skip

SELECTED = torch.tensor([3, 0, 3, 10])


def scaled(x, w, t):
    valid = t != IGNORED
    logp = (x @ w.T / 1.7).log_softmax(-1)
    nll = -logp.gather(-1, t.clamp_min(0)[:, None])[:, 0] * valid
    return nll, -(logp.exp() * logp).sum(-1) * valid, logp[:, SELECTED] * valid[:, None]


compare(
    "losses.cross_entropy", "LigerFusedLinearScaledCrossEntropyFunction",
    lambda f, x, w, t: f.apply(x, w, t, 1.7, IGNORED, 1, True, SELECTED), scaled, X, W, T,
)  # fmt: skip


def of_one_process(f, x, w, t):
    """What a function of a sharded head returns, without and with entropies, in a group of this process
    alone."""
    call = getattr(f, "apply", f)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = call(x, w, t, None, 1.7)
        both = call(x, w, t, dist.group.WORLD, 1.7, IGNORED, 1, True)
        grads = torch.autograd.grad(both[0].sum() + both[1].square().sum(), (x, w))
    finally:
        dist.destroy_process_group()
    return [result.detach() for result in (alone, *both, *grads)]


def scaled_with_gradients(x, w, t):
    nll, entropy, _ = scaled(x, w, t)
    grads = torch.autograd.grad(nll.sum() + entropy.square().sum(), (x, w))
    return [result.detach() for result in (nll, nll, entropy, *grads)]


for _name in ("LigerFusedLinearScaledCrossEntropyTPFunction", "liger_fused_linear_scaled_cross_entropy_tp"):
    compare("losses.cross_entropy", _name, of_one_process, scaled_with_gradients, X, W, T)
compare(
    "losses.cross_entropy", "LigerVocabParallelCEFunction",
    lambda f, x, t: f.apply(x, t, None, IGNORED, 0.1, "pytorch", "global"),
    lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), label_smoothing=0.1, reduction="none").view_as(t),
    random(3, 2, 11), classes(3, 2),
)  # fmt: skip
compare(
    "losses.cross_entropy", "LigerVocabParallelCrossEntropy",
    lambda f, x, t: f(IGNORED, 0.1)(x, t),
    lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), label_smoothing=0.1, reduction="none").view_as(t),
    random(3, 2, 11), classes(3, 2),
)  # fmt: skip
compare(
    "losses.cross_entropy", "fused_selective_log_softmax",
    lambda f, x, ids, mask: f(x, ids, 0.7, mask),
    lambda x, ids, mask: (
        (x[:, :-1].detach() / 0.7).log_softmax(-1).gather(-1, ids[:, -4:, None])[..., 0] * mask[:, -4:]
    ),
    random(3, 5, 11), classes(3, 6, ignored=0), (classes(3, 6, seed=3, ignored=0) > 3).long(),
)  # fmt: skip
compare(
    "losses.cross_entropy", "CrossEntropyOutput",
    lambda f, x: f(loss=x), lambda x: (x, None, None, None), random(1),
)  # fmt: skip

HIDDEN, LABELS = random(2, 6, 8), classes(2, 6)


def causal(x, w, labels):
    return F.cross_entropy((x @ w.T)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / 5


compare(
    "losses.causal", "LigerForCausalLMLoss",
    lambda f, x, w, labels: f(x, w, labels, 8, 5, cu_seq_lens_q=None), causal, HIDDEN, W, LABELS,
)  # fmt: skip
compare(
    "losses.causal", "fixed_fused_linear_cross_entropy",
    lambda f, x, w, t: f(x, w, t, torch.tensor(4), IGNORED, 5.0, return_token_accuracy=True),
    lambda x, w, t: (
        loss_and_metrics(x @ w.T, t, softcap=5.0, reduction="sum")[0] / 4, None, loss_and_metrics(x @ w.T, t)[2], None,
    ),
    X, W, T,
)  # fmt: skip
compare(
    "losses.causal", "unpack_cross_entropy_result",
    lambda f, x: f((x, 2 * x)), lambda x: (x, 2 * x, None, None), random(1),
)  # fmt: skip
