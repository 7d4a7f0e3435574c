# SPDX-License-Identifier: BSD-3-Clause
"""Batches for the tests of the distillation losses, and their formulas over all logits in plain PyTorch."""

import torch
import torch.nn.functional as F
from losses_cases import leaf

from liger import losses

SEQUENCES, LENGTH, HIDDEN, TEACHER, VOCAB, K = 3, 6, 24, 40, 57, 5
# All rows in one chunk; some rows to a chunk, and fewer still of the teacher.
BUDGETS = {"whole": None, "chunks": 9 * VOCAB * 4}
TENSORS = ("x", "weight", "bias")


def make(device, dtype=torch.float32):
    """What a call needs; some labels are ignored, one sequence has none, one student is as good as sure."""

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(shape, device=device)).to(dtype)

    made = {
        "x": normal(SEQUENCES, LENGTH, HIDDEN),
        "weight": normal(VOCAB, HIDDEN, scale=HIDDEN**-0.5),
        "bias": normal(VOCAB),
        "teacher_x": normal(SEQUENCES, LENGTH, TEACHER),
        "teacher_weight": normal(VOCAB, TEACHER, scale=TEACHER**-0.5),
        "teacher_bias": normal(VOCAB),
        "labels": torch.randint(VOCAB, (SEQUENCES, LENGTH), device=device),
    }
    made["labels"][0, 4:] = made["labels"][1, 2] = made["labels"][2] = -100
    sure = made["labels"][0, 0]
    made["x"][0, 0] = 12 * made["weight"][sure] / made["weight"][sure].norm()
    return made


# --- the formulas, in plain PyTorch -------------------------------------------------------------------------


def kl(log_p, log_q):
    return torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0).sum(-1)


def jsd(log_q, log_p, beta):
    log_m = torch.log(beta * log_p.exp() + (1 - beta) * log_q.exp())
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def with_tail(log_probs, indices):
    """Log-probabilities of the classes ``indices`` and of all others together."""
    inside = torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, indices, True)
    rest = torch.where(inside, -torch.inf, log_probs).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, indices), rest], -1)


def softened(f):
    """A distance of log-probabilities as one of logits and a temperature."""
    return lambda student, teacher, temperature: f(
        (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    )


def topk(f):
    def distance(student, teacher, temperature):
        log_q, log_p = ((z / temperature).log_softmax(-1) for z in (student, teacher))
        # Which classes a teacher gives is no question of precision.
        return f(log_q, log_p, teacher.float().topk(K, -1).indices)

    return distance


def renormalised(log_q, log_p, indices):
    return kl(log_p.gather(-1, indices).log_softmax(-1), log_q.gather(-1, indices))


DISTANCES = {
    "jsd": (losses.FusedLinearJSDLoss, {"beta": 0.3}, softened(lambda q, p: jsd(q, p, 0.3))),
    "jsd 0": (losses.FusedLinearJSDLoss, {"beta": 0}, softened(lambda q, p: kl(p, q))),
    "jsd 1": (losses.FusedLinearJSDLoss, {"beta": 1}, softened(kl)),
    "kl": (losses.FusedLinearKLDivLoss, {}, softened(lambda q, p: kl(p, q))),
    "reverse kl": (losses.FusedLinearKLDivLoss, {"reverse": True}, softened(kl)),
    "cosine": (
        losses.FusedLinearCosineSimilarityLoss,
        {"beta": 0.8},
        lambda student, teacher, _: 0.8 * (1 - F.cosine_similarity(student, teacher, -1)),
    ),
    "top k": (losses.FusedLinearTopKLoss, {}, topk(lambda q, p, i: kl(with_tail(p, i), with_tail(q, i)))),
    "top k renormalised": (losses.FusedLinearTopKLoss, {"rest": "renormalize"}, topk(renormalised)),
}


def teacher_logits(t):
    """In float64: what is given of a teacher has no error of its own."""
    return F.linear(*(t[name].double() for name in ("teacher_x", "teacher_weight", "teacher_bias")))


def logits_of(t):
    return F.linear(t["x"], t["weight"], t["bias"]), F.linear(
        t["teacher_x"], t["teacher_weight"], t["teacher_bias"]
    )


def plain(name, t, hard=0.5, soft=0.5, temperature=1.0, divisor=None):
    # As careful as plain PyTorch is: logits in the dtype of the model, what follows in float32.
    wide = torch.promote_types(t["x"].dtype, torch.float32)
    student, teacher = (z.to(wide).flatten(0, -2) for z in logits_of(t))
    labels = t["labels"].flatten()
    live = labels != -100
    distances = DISTANCES[name][2](student, teacher, temperature)[live].sum()
    cross_entropy = F.cross_entropy(student, labels, ignore_index=-100, reduction="sum")
    count = live.sum().clamp_min(1) if divisor is None else divisor
    return (hard * cross_entropy + soft * distances) / count


def teacher_arguments(name, t, temperature=1.0):
    if not name.startswith("top k"):
        names = {
            "teacher_input": "teacher_x",
            "teacher_weight": "teacher_weight",
            "teacher_bias": "teacher_bias",
        }
        return {argument: t[key] for argument, key in names.items() if key in t}
    logits = teacher_logits(t)
    log_p = (logits / temperature).log_softmax(-1).float()
    indices = logits.float().topk(K, -1).indices
    return {"teacher_logprobs": log_p.gather(-1, indices), "teacher_indices": indices}


def results(name, module, t, **how):
    """(loss, metrics)"""
    of_teacher = teacher_arguments(name, t, module.temperature)
    return module(t["x"], t["weight"], t["labels"], t["bias"], **of_teacher, **how)


def call(name, module, t, **how):
    return results(name, module, t, **how)[0]


def parts(name, module, t, **how):
    """[loss, distance, cross entropy], the last two None where they are not computed."""
    loss, metrics = results(name, module, t, **how)
    return [loss, metrics.soft_loss, metrics.hard_loss]


def with_gradients(function, tensors, dtype=None):
    tensors = {k: t.to(dtype) if dtype and t.is_floating_point() else t for k, t in tensors.items()}
    tensors |= {name: leaf(tensors[name]) for name in TENSORS}
    loss = function(tensors)
    return [loss.detach(), *torch.autograd.grad(loss * 0.5, [tensors[name] for name in TENSORS])]
