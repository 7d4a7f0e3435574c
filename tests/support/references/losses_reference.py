# SPDX-License-Identifier: BSD-3-Clause
"""The post-training losses as their papers write them: a loop over sequences, all logits at once, any
dtype."""

import torch
import torch.nn.functional as F


def token_logprobs(hidden, weight, target, bias=None, temperature=1.0, softcap=None):
    """(log-probabilities, entropies) of one sequence; targets of -100 have any."""
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = F.log_softmax(logits / temperature, -1)
    return logp[torch.arange(len(target)), target.clamp_min(0)], -(logp.exp() * logp).sum(-1)


def sequence_logps(hidden, weight, target, average, bias=None):
    """[the log-probability of each sequence, or its mean over tokens], [tokens that count]"""
    values, counts = [], []
    for x, y in zip(hidden, target, strict=True):
        kept = y != -100
        total = token_logprobs(x, weight, y, bias)[0][kept].sum()
        values.append(total / max(int(kept.sum()), 1) if average else total)
        counts.append(int(kept.sum()))
    return values, counts


def log_sigmoid(x):
    return -torch.log1p(torch.exp(-x))


def dpo_pair(kind, c, r, rc, rr, beta, eps, tau):
    """The loss of one pair; c and r are log-probabilities of the policy, rc and rr of the reference."""
    h = beta * ((c - r) - (rc - rr))
    wins = torch.sigmoid(h)
    if kind == "sigmoid":
        return -(1 - eps) * torch.log(wins) - eps * torch.log(1 - wins)
    if kind == "hinge":
        return torch.maximum(1 - h, torch.zeros_like(h))
    if kind == "ipo":
        return (h / beta - 0.5 / beta) ** 2
    if kind == "exo_pair":
        eps = eps or 1e-3
        p = [wins, 1 - wins]
        q = [1 - eps, eps]
        return sum(
            a * (torch.log(a) - torch.log(torch.tensor(b, dtype=a.dtype))) for a, b in zip(p, q, strict=True)
        )
    if kind == "nca_pair":
        a, b = beta * (c - rc), beta * (r - rr)
        return -log_sigmoid(a) - 0.5 * log_sigmoid(-a) - 0.5 * log_sigmoid(-b)
    if kind == "robust":
        return (-(1 - eps) * torch.log(wins) + eps * torch.log(1 - wins)) / (1 - 2 * eps)
    if kind == "bco_pair":
        return -log_sigmoid(beta * (c - rc)) - log_sigmoid(-beta * (r - rr))
    if kind == "sppo_hard":
        return (c - rc - 0.5 / beta) ** 2 + (r - rr + 0.5 / beta) ** 2
    if kind == "apo_zero":
        return 1 - torch.sigmoid(beta * (c - rc)) + torch.sigmoid(beta * (r - rr))
    if kind == "apo_down":
        return torch.sigmoid(beta * (c - rc)) + 1 - wins
    if kind == "discopop":
        mix = torch.sigmoid(h / tau)
        return log_sigmoid(h) * (mix - 1) + mix / torch.exp(h)
    raise AssertionError(kind)


def orpo_pair(c, r, beta):
    def log_odds(x):
        return x - torch.log(1 - torch.exp(x))

    return -beta * log_sigmoid(log_odds(c) - log_odds(r))


def pairs(
    pair_loss, hidden, weight, target, bias=None, reference=None, average=False, alpha=None, nll_target=None
):
    """A loss of pairs: the chosen sequences come first. ``reference`` is (hidden, weight)."""
    half = len(target) // 2
    logps, counts = sequence_logps(hidden, weight, target, average, bias)
    refs = [torch.zeros((), dtype=weight.dtype, device=weight.device)] * len(target)
    if reference is not None:
        refs = [v.detach() for v in sequence_logps(*reference, target, average)[0]]
    total = 0.0
    for i in range(half):
        j = half + i
        if counts[i] + counts[j]:
            total = total + pair_loss(logps[i], logps[j], refs[i], refs[j])
    total = total / half
    if alpha is None:
        return total
    nll_target = target if nll_target is None else nll_target
    sums, counts = sequence_logps(hidden[:half], weight, nll_target[:half], False, bias)
    return total - alpha * sum(sums) / max(sum(counts), 1)


def kto(hidden, weight, target, labels, reference, beta, kl, bias=None, weights=(1.0, 1.0)):
    logps, counts = sequence_logps(hidden, weight, target, False, bias)
    refs = sequence_logps(*reference, target, False)[0]
    total = 0.0
    for logp, ref, label, count in zip(logps, refs, labels.tolist(), counts, strict=True):
        if count:
            gain = beta * ((logp - ref.detach()) - kl)
            total = total + (
                weights[0] * (1 - torch.sigmoid(gain)) if label else weights[1] * (1 - torch.sigmoid(-gain))
            )
    return total / len(labels)


def policy(
    hidden, weight, target, advantages, *, kind, old=None, ref=None, sampler=None, beta=0.0, low=0.2, high=0.2,
    level="token", delta=None, corrected=False, temperature=1.0, softcap=None, entropy_coef=0.0, bias=None,
    tau=(1.0, 1.05), longest=None, items=None,
):  # fmt: skip
    """The GRPO family; advantages, old, ref and sampler are (S, L)."""
    per_sequence, entropies, counts = [], [], []
    for i in range(len(target)):
        kept = target[i] != -100
        logp, entropy = (
            v[kept] for v in token_logprobs(hidden[i], weight, target[i], bias, temperature, softcap)
        )
        before = logp.detach() if old is None else old[i][kept]
        advantage, count = advantages[i][kept], int(kept.sum())
        ratio = torch.exp(logp - before)
        if level == "sequence":
            ratio = torch.exp((logp - before).sum() / max(count, 1)).expand(count)
        if kind == "cispo":
            loss = -torch.minimum(ratio, torch.full_like(ratio, high)).detach() * advantage * logp
        elif kind == "sapo":
            t = torch.where(advantage > 0, torch.full_like(logp, tau[0]), tau[1])
            loss = -4 / t * torch.sigmoid(t * (ratio - 1)) * advantage
        elif kind == "vespo":
            whole = torch.exp((logp - before).sum()).detach()
            if sampler is not None:
                whole = whole * sampler[i][kept].prod()
            k, rate = (torch.where(advantage >= 0, torch.full_like(logp, p), n) for p, n in ((2, 3), (3, 2)))
            loss = -(whole**k) * torch.exp(rate * (1 - whole)) * advantage * logp
        else:
            upper = ratio if delta is None else torch.minimum(ratio, torch.full_like(ratio, delta))
            loss = -torch.minimum(upper * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
        if sampler is not None and kind != "vespo":
            loss = loss * sampler[i][kept]
        if beta:
            gap = ref[i][kept] - logp
            kl = torch.exp(gap) - gap - 1
            loss = loss + beta * (kl * ratio if corrected else kl)
        per_sequence.append(loss.sum())
        entropies.append(entropy.sum())
        counts.append(count)
    if kind in ("grpo", "sapo"):
        total = sum(s / max(c, 1) for s, c in zip(per_sequence, counts, strict=True)) / len(counts)
    elif kind == "luspo":
        total = sum(per_sequence) / len(counts)
    elif kind == "dr_grpo":
        total = sum(per_sequence) / (len(counts) * (longest or target.shape[1]))
    else:
        total = sum(per_sequence) / (items or max(sum(counts), 1))
    return total - entropy_coef * sum(entropies) / max(sum(counts), 1)
