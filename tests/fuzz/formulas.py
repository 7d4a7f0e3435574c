# SPDX-License-Identifier: BSD-3-Clause
"""What the ops compute, as the papers or torch's documentation write it, in plain PyTorch.

Written for the fuzzer alone, from the sources that the docstrings name. 16-bit tensors become float32 first,
but for products of matrices: as careful as plain PyTorch code is.
"""

import math

import torch
import torch.nn.functional as F


def up(tensor):
    """Float32 for 16-bit tensors."""
    half = tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if half else tensor


# --- norms --------------------------------------------------------------------------------------------------


def rms_norm(x, weight, eps, offset):
    wide = up(x)
    y = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return (y if weight is None else y * (up(weight) + offset)).to(x.dtype)


def rms_norm_gated(x, activation, weight, group_size, norm_before_gate, eps, offset):
    """x and the activation of the gate, float32 or float64."""
    h = x if norm_before_gate else x * activation
    rows = h.unflatten(-1, (h.shape[-1] // group_size, group_size))
    y = (rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    y = y if weight is None else y * (up(weight) + offset)
    return y * activation if norm_before_gate else y


def normalised(rows, eps):
    variance, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
    return (rows - mean) / (variance + eps).sqrt()


def layer_norm(x, weight, bias, eps):
    y = normalised(up(x), eps)
    y = y if weight is None else y * up(weight)
    return (y if bias is None else y + up(bias)).to(x.dtype)


def group_norm(x, groups, weight, bias, eps):
    y = normalised(up(x).reshape(x.shape[0], groups, -1), eps) if x.numel() else up(x)
    y = y.reshape(x.shape)
    per_channel = (-1, *(1,) * (x.dim() - 2))
    y = y if weight is None else y * up(weight).reshape(per_channel)
    return (y if bias is None else y + up(bias).reshape(per_channel)).to(x.dtype)


# --- experts ------------------------------------------------------------------------------------------------


def experts(x, index, weights, gate_up, down, gate_up_bias, down_bias, activate):
    """One expert after the other, over all tokens; weights of the layout (experts, outputs, inputs).

    ``activate(gate_up)``: the activation times up, (..., 2I) -> (..., I), in float32 or float64.
    """
    rows = x.reshape(-1, x.shape[-1])
    weights = up(weights).reshape(-1, index.shape[-1])
    index = index.reshape(-1, index.shape[-1])
    result = torch.zeros_like(up(rows))
    for e in range(gate_up.shape[0]):
        first = F.linear(rows, gate_up[e], None if gate_up_bias is None else gate_up_bias[e])
        second = F.linear(
            activate(up(first)).to(x.dtype), down[e], None if down_bias is None else down_bias[e]
        )
        share = torch.where(index == e, weights, 0.0).sum(-1, keepdim=True)
        result = result + share * up(second)
    return result.view(x.shape).to(x.dtype)


# --- elementwise and rows -----------------------------------------------------------------------------------


def softmax(x):
    # Not by float32: what torch keeps for the backward is the result, as it was rounded.
    return x.softmax(-1)


def silu(x):
    return x * torch.sigmoid(x)


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gated(activation, gate, up_):
    return (activation(up(gate)) * up(up_)).to(gate.dtype)


def relu_squared(x):
    return (up(x).clamp_min(0) ** 2).to(x.dtype)


def gated_mlp(activation, x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias):
    if up_weight is None:
        gate, upper = F.linear(x, gate_weight, gate_bias).chunk(2, -1)
    else:
        gate, upper = F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias)
    return F.linear(gated(activation, gate, upper), down_weight, down_bias)


# --- rotary embeddings --------------------------------------------------------------------------------------


def rotated(x, cos, sin, pairs):
    """x (B, H, T, D), tables (B or 1, T, R); ``pairs`` are the indices of the two entries of each pair."""
    wide, cos, sin = up(x), up(cos).unsqueeze(1), up(sin).unsqueeze(1)
    entries = list(wide.unbind(-1))
    for i, j in pairs:
        a, b = wide[..., i], wide[..., j]
        entries[i] = a * cos[..., i] - b * sin[..., i]
        entries[j] = b * cos[..., j] + a * sin[..., j]
    return torch.stack(entries, -1).to(x.dtype)


def times_complex(x, factors, pairs):
    """The same with a complex factor for every pair, (B or 1, T, pairs)."""
    entries = list(up(x).unbind(-1))
    for p, (i, j) in enumerate(pairs):
        factor = factors[..., p].unsqueeze(1)
        z = torch.complex(entries[i], entries[j]) * factor
        entries[i], entries[j] = z.real, z.imag
    return torch.stack(entries, -1).to(x.dtype)


# --- cross entropy ------------------------------------------------------------------------------------------


def capped(z, softcap):
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def cross_entropy(
    logits, target, ce_weight=None, token_weight=None, denominator=None, ignore_index=-100, label_smoothing=0.0,
    lse_square_scale=0.0, softcap=None, reduction="mean",
):  # fmt: skip
    """Logits (N, V): a dict of the loss and the metrics."""
    z, target = capped(up(logits), softcap), target.long()
    weight = None if ce_weight is None else ce_weight.to(z.dtype)
    live = target != ignore_index
    loss = F.cross_entropy(
        z, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    # z with zeros where a row does not count: nothing of it may reach a gradient.
    z = torch.where(live[:, None], z, 0.0)
    index = torch.where(live, target, 0)
    of_target = torch.where(live, 1.0 if weight is None else weight[index], 0.0).to(z.dtype)
    z_loss = lse_square_scale * of_target * torch.logsumexp(z, -1) ** 2
    if token_weight is not None:
        loss, z_loss = loss * token_weight.to(z.dtype), z_loss * token_weight.to(z.dtype)
    total = loss + z_loss
    if reduction != "none":
        divisor = denominator if denominator is not None else of_target.sum() if reduction == "mean" else 1.0
        total, z_loss = total.sum() / divisor, z_loss.sum() / divisor
    log_p = z.log_softmax(-1)
    raw = up(logits).detach()
    first = (raw == raw.amax(-1, keepdim=True)).int().argmax(-1)
    return {
        "loss": total,
        "z_loss": z_loss.detach(),
        "token_accuracy": ((first == target) & live).sum().to(z.dtype) / live.sum(),
        "argmax": torch.where(live, first, -1),
        "logprobs": torch.where(live, log_p.gather(1, index[:, None])[:, 0], 0.0).detach(),
        "entropy": torch.where(live, z.logsumexp(-1) - (log_p.exp() * z).sum(-1), 0.0).detach(),
    }


# --- divergences --------------------------------------------------------------------------------------------


def kl(log_p, log_q):
    """KL(p || q) of rows; classes without probability add nothing."""
    there = log_p > -torch.inf
    log_p, log_q = torch.where(there, log_p, 0.0), torch.where(there, log_q, 0.0)
    return torch.where(there, log_p.exp() * (log_p - log_q), 0.0).sum(-1)


def divergence(kind, log_p, log_q, beta=0.5):
    """Of the teacher p and the student q."""
    if kind == "forward_kl" or (kind == "jsd" and beta == 0):
        return kl(log_p, log_q)
    if kind == "reverse_kl" or (kind == "jsd" and beta == 1):
        return kl(log_q, log_p)
    if kind == "tvd":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    return jsd(log_p, log_q, beta)


def jsd(log_p, log_q, beta):
    """``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q``.

    The logarithm of m comes from the larger one's logarithm: by ``logaddexp`` rows whose p and q are alike
    would keep few digits, in float64 too.
    """
    ratio = torch.where((log_p == -torch.inf) & (log_q == -torch.inf), 0.0, log_p - log_q)
    larger = ratio > 0
    # Not by abs(), whose gradient is 0 where p = q; the gradient of the sum is not.
    # Not by where() of two numbers, which are rounded to the default dtype.
    share = torch.full_like(ratio, beta).masked_fill(larger, 1 - beta)
    log_m_over_larger = torch.log1p(share * torch.expm1(torch.where(larger, -ratio, ratio)))
    log_p_over_m = torch.where(larger, 0.0, ratio) - log_m_over_larger
    log_q_over_m = torch.where(larger, -ratio, 0.0) - log_m_over_larger
    return beta * expectation(log_p, log_p_over_m) + (1 - beta) * expectation(log_q, log_q_over_m)


def expectation(log_p, values):
    """The sum of p * values; classes without probability add nothing."""
    present = log_p > -torch.inf
    return torch.where(present, log_p.exp() * torch.where(present, values, 0.0), 0.0).sum(-1)


def reduced(losses, live, token_weight, denominator, reduction, batch):
    losses = torch.where(live, losses, 0.0)
    if token_weight is not None:
        losses = losses * token_weight.to(losses.dtype)
    if reduction == "none":
        return losses
    divisor = {"sum": 1.0, "mean": live.sum(), "batchmean": batch}[reduction]
    return losses.sum() / (divisor if denominator is None else denominator)


def distance(
    kind, student, teacher, target, token_weight, denominator, beta, temperature, log_probs, ignore_index, reduction
):  # fmt: skip
    """Of logits (..., V)."""
    log_q, log_p = up(student), up(teacher)
    live = torch.ones(log_q.shape[:-1], dtype=torch.bool, device=log_q.device)
    if target is not None:
        live = target != ignore_index
        log_q, log_p = (torch.where(live[..., None], z, 0.0) for z in (log_q, log_p))
    if not log_probs:
        log_q, log_p = ((z / temperature).log_softmax(-1) for z in (log_q, log_p))
    losses = divergence(kind, log_p, log_q, beta)
    batch = student.shape[0] if student.dim() > 1 else 1
    return reduced(losses, live, token_weight, denominator, reduction, batch)


# --- losses over sequences ----------------------------------------------------------------------------------


def token_scores(hidden, weight, bias, target, temperature, softcap):
    """(log-probabilities of the targets, entropies) of tokens (N, H); targets below 0 have any."""
    log_p = (capped(up(F.linear(hidden, weight, bias)), softcap) / temperature).log_softmax(-1)
    return log_p.gather(1, target.clamp_min(0).long()[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def sequence_scores(tokens, sequences, average):
    """Sums, or means, over the tokens of each sequence; ``sequences`` are lists of rows."""
    return [
        tokens[rows].sum() / (max(len(rows), 1) if average else 1) if len(rows) else tokens.new_zeros(())
        for rows in sequences
    ]


def log_sigmoid(x):
    # Beyond its default threshold of 20 softplus drops the exponential, which float64 still sees.
    return -F.softplus(-x, threshold=700)


def dpo(kind, chosen, rejected, beta, smoothing, tau):
    """Of the log-ratios of policy and reference; the names are TRL's."""
    margin = beta * (chosen - rejected)
    won, lost = log_sigmoid(margin), log_sigmoid(-margin)
    if kind == "sigmoid":
        return -won * (1 - smoothing) - lost * smoothing
    if kind == "robust":
        return (-won * (1 - smoothing) + lost * smoothing) / (1 - 2 * smoothing)
    if kind == "exo_pair":
        smoothing = smoothing or 1e-3
        return won.exp() * (won - math.log(1 - smoothing)) + lost.exp() * (lost - math.log(smoothing))
    if kind == "hinge":
        return F.relu(1 - margin)
    if kind == "ipo":
        return (chosen - rejected - 1 / (2 * beta)) ** 2
    if kind == "bco_pair":
        return -log_sigmoid(beta * chosen) - log_sigmoid(-beta * rejected)
    if kind == "sppo_hard":
        return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
    if kind == "nca_pair":
        chosen, rejected = beta * chosen, beta * rejected
        return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)
    if kind == "apo_zero":
        return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
    if kind == "apo_down":
        return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(margin)
    mix = torch.sigmoid(margin / tau)
    return -won * (1 - mix) + torch.exp(-margin) * mix


def log_odds(log_p):
    return log_p - torch.log(-torch.expm1(log_p))


def policy_token(kind, ratio, advantage, logprob, low, high, delta, taus):
    """The loss of one token by its importance weight."""
    if kind == "cispo":
        return -ratio.detach().clamp(max=high) * advantage * logprob
    if kind == "sapo":
        tau = taus[0] if advantage > 0 else taus[1]
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
    free = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(free * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def vespo(logp, before, advantage, factors):
    """The losses of the tokens of one sequence; ``factors`` are the weights of the sampler, of tokens or of
    all."""
    smallest = math.log(1e-8)
    log_w = (logp.detach() - before).clamp(-20, 20).sum() + factors.log().clamp(smallest, 20).sum()
    log_w = log_w.clamp(smallest, 20)
    k = torch.where(advantage >= 0, 2.0, 3.0).to(logp.dtype)
    rate = 5 - k
    return -torch.exp(rate + k * log_w - rate * log_w.exp()) * advantage * logp
