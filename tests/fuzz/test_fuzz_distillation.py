# SPDX-License-Identifier: BSD-3-Clause
"""Distillation losses on random rows, with teachers, masks and divisors of any kind."""

import formulas
import torch
import torch.nn.functional as F
from engine import Numbers, compare, dtypes, fuzz, one_of
from hypothesis import assume
from hypothesis import strategies as st
from lm_head import HIDDEN, VOCAB, budget, differentiable, items

from liger import losses


def with_tail(log_p, indices):
    named = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, indices, True)
    rest = torch.where(named, -torch.inf, log_p).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, indices), rest], -1)


def soft_loss(kind, student, teacher, beta, temperature, indices=None):
    """Of rows of logits; for a top k ``teacher`` are log-probabilities."""
    if kind == "cosine":
        return beta * (1 - F.cosine_similarity(student, teacher, -1))
    log_q = (student / temperature).log_softmax(-1)
    if kind == "tail":
        inside = teacher.exp().sum(-1, keepdim=True)
        log_p = torch.cat([teacher, torch.log1p(-inside)], -1)
        return formulas.kl(log_p, with_tail(log_q, indices))
    if kind == "renormalize":
        return formulas.kl(teacher.log_softmax(-1), log_q.gather(-1, indices))
    return formulas.divergence(kind, (teacher / temperature).log_softmax(-1), log_q, beta)


@fuzz(8)
def test_distillation(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    front = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=2))
    vocab, width = draw(VOCAB), draw(HIDDEN)
    kind = one_of(draw, "jsd", "forward_kl", "reverse_kl", "cosine", "tail", "renormalize")
    hard, soft = one_of(draw, (0.5, 0.5), (0.0, 1.0), (0.3, 0.9), (1.0, 0.0))
    beta, temperature = (
        one_of(draw, 0.1, 0.5, 1.0) if kind in ("jsd", "cosine") else 0.5,
        one_of(draw, 1.0, 0.6, 2.0),
    )
    ignore_index, count = one_of(draw, -100, 0), items(draw)
    options = {
        "weight_hard_loss": hard, "weight_soft_loss": soft, "ignore_index": ignore_index, "temperature": temperature,
        "memory_budget": budget(draw, vocab, numbers.dtype),
    }  # fmt: skip
    given = {
        "input": numbers.normal(*front, width),
        "weight": numbers.normal(vocab, width, scale=one_of(draw, 0.5, 2.0) * width**-0.5, alike=False),
    }
    if draw(st.booleans()):
        given["bias"] = numbers.normal(vocab)
    names = list(given)
    labels = numbers.classes(vocab, *front, ignored=(ignore_index,)) if hard or draw(st.booleans()) else None
    mask = numbers.flags(*front) if draw(st.booleans()) else None
    live = torch.ones(front, dtype=torch.bool, device=device)
    live = live if labels is None else live & (labels != ignore_index)
    live = live if mask is None else live & mask
    indices = None
    if kind in ("tail", "renormalize"):
        top = draw(st.integers(1, vocab - 1))
        best = numbers.normal(*front, vocab, dtype=torch.float32).log_softmax(-1).topk(top, -1)
        given["teacher_logprobs"], indices = best.values, best.indices
        module = losses.FusedLinearTopKLoss(rest=kind, **options)
    else:
        if draw(st.booleans()):
            theirs = draw(HIDDEN)
            given["teacher_input"] = numbers.normal(*front, theirs)
            given["teacher_weight"] = numbers.normal(vocab, theirs, scale=theirs**-0.5, alike=False)
            if draw(st.booleans()):
                given["teacher_bias"] = numbers.normal(vocab)
        else:
            given["teacher_logits"] = numbers.normal(*front, vocab, scale=2.0)
        cls, more = {
            "jsd": (losses.FusedLinearJSDLoss, {"beta": beta}),
            "cosine": (losses.FusedLinearCosineSimilarityLoss, {"beta": beta}),
            "forward_kl": (losses.FusedLinearKLDivLoss, {}),
            "reverse_kl": (losses.FusedLinearKLDivLoss, {"reverse": True}),
        }[kind]
        module = cls(**more, **options)
    more = {} if indices is None else {"teacher_indices": indices}

    def ours(**given):
        loss, metrics = module(**given, **more, target=labels, mask=mask, denominator=count)
        found = {"loss": loss, "soft": metrics.soft_loss, "hard": metrics.hard_loss}
        return {n: v for n, v in found.items() if v is not None}

    def formula(input, weight, bias=None, teacher_logprobs=None, teacher_logits=None, teacher_input=None,
                teacher_weight=None, teacher_bias=None):  # fmt: skip
        student = formulas.up(F.linear(input, weight, bias))[live]
        if teacher_logprobs is not None:
            teacher = teacher_logprobs.to(student.dtype)
        elif teacher_weight is not None:
            teacher = formulas.up(F.linear(teacher_input, teacher_weight, teacher_bias))
        else:
            teacher = formulas.up(teacher_logits)
        if kind == "cosine" and numbers.dtype == torch.float16 and live.any():
            # Below that the scaled gradient of the logits overflows: docs/guides/losses.md.
            assume(student.detach().norm(dim=-1).min() > 2**-7)
        divisor = max(int(live.sum()), 1) if count is None else float(count)
        loss, parts = student.sum() * 0.0, {}
        if soft:
            of_classes = None if indices is None else indices[live]
            value = soft_loss(kind, student, teacher[live], beta, temperature, of_classes).sum() / divisor
            loss, parts["soft"] = loss + soft * value, value.detach()
        if hard:
            value = F.cross_entropy(student, labels[live].long(), reduction="sum") / divisor
            loss, parts["hard"] = loss + hard * value, value.detach()
        return {"loss": loss, **parts}

    compare(ours, formula, given, differentiable(draw, *names), vary=names)
