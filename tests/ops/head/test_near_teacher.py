# SPDX-License-Identifier: BSD-3-Clause
"""A student near its teacher: its gradient is a small difference of logits, and no less exact than one of far
ones.

Against float64, by the norm of errors: at most twice the error of the exact gradient rounded once to its
dtype, or twice the error of the same formula with operands, logits and what follows in float32, where that is
more.
"""

import pytest
import torch
from cases import DTYPES

import liger
from liger import losses

ROWS, HIDDEN, VOCAB = 64, 96, 1501
SIZES = [1e-1, 1e-2, 1e-3, 1e-4]
HALF = [dtype for dtype in DTYPES if dtype != torch.float32]


def jsd(beta):
    def rows(log_q, log_p):
        p, q = log_p.exp(), log_q.exp()
        # Exact for p near q, as log(beta * p + (1 - beta) * q) is not.
        over = torch.log1p(beta * torch.expm1(log_p - log_q))
        return (beta * p * (log_p - log_q - over) - (1 - beta) * q * over).sum(-1)

    return rows


def forward_kl(log_q, log_p):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_q, log_p):
    return forward_kl(log_p, log_q)


def tvd(log_q, log_p):
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def of_op(form, **options):
    options["reduction"] = "sum"
    return lambda x, w, t, v: form(x, w, teacher_input=t, teacher_weight=v, **options)


def of_loss(cls, temperature=1.0, **options):
    module = cls(weight_hard_loss=0.0, weight_soft_loss=1.0, temperature=temperature, **options)
    return lambda x, w, t, v: module(x, w, teacher_input=t, teacher_weight=v, denominator=1)[0]


def of_divergence(divergence):
    """One that has no public form."""

    def loss(x, w, t, v):
        return torch.ops.liger.fused_linear_divergence_forward(
            x, w, t, v, None, None, None, None, None, divergence, 0.5, 1.0, 1.0, 0.0, -100, False, None, None,
            True, True, False,
        )[0]  # fmt: skip

    return loss


# name: (ours, the loss of rows by log-probabilities, the temperature)
FORMS = {
    "fused jsd 0.1": (of_op(liger.fused_linear_jsd, beta=0.1), jsd(0.1), 1.0),
    "fused jsd 0.5": (of_op(liger.fused_linear_jsd, beta=0.5), jsd(0.5), 1.0),
    "fused jsd 0.9, chunks": (of_op(liger.fused_linear_jsd, beta=0.9, memory_budget=60 * VOCAB), jsd(0.9), 1.0),
    "fused kl": (of_op(liger.fused_linear_kl_div), forward_kl, 1.0),
    "fused kl, tempered": (of_op(liger.fused_linear_kl_div, temperature=2.0), forward_kl, 2.0),
    "fused reverse kl": (of_op(liger.fused_linear_kl_div, reverse=True), reverse_kl, 1.0),
    "tvd": (of_divergence("tvd"), tvd, 1.0),
    "JSD": (of_loss(losses.FusedLinearJSDLoss, beta=0.5), jsd(0.5), 1.0),
    "JSD, tempered": (of_loss(losses.FusedLinearJSDLoss, 0.7, beta=0.3), jsd(0.3), 0.7),
    "KL": (of_loss(losses.FusedLinearKLDivLoss), forward_kl, 1.0),
    "reverse KL": (of_loss(losses.FusedLinearKLDivLoss, reverse=True), reverse_kl, 1.0),
}  # fmt: skip


def make(device, dtype, size):
    """Hidden states and weights of a student and of a teacher, which differ by noise of this size."""
    x = torch.randn(ROWS, HIDDEN, dtype=torch.float64)
    weight = 3 * torch.randn(VOCAB, HIDDEN, dtype=torch.float64) / HIDDEN**0.5
    teacher = [t * (1 + size * torch.randn_like(t)) for t in (x, weight)]
    return [t.to(device, dtype) for t in (x, weight, *teacher)]


def plain(rows, temperature, tensors, dtype):
    x, weight, teacher, teacher_weight = (t.to(dtype) for t in tensors)
    leaves = [t.requires_grad_() for t in (x.clone(), weight.clone())]
    log_q = (leaves[0] @ leaves[1].T / temperature).log_softmax(-1)
    log_p = (teacher @ teacher_weight.T / temperature).log_softmax(-1)
    return torch.autograd.grad(rows(log_q, log_p).sum(), leaves)


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_gradients(device, name, dtype, size):
    ours, rows, temperature = FORMS[name]
    tensors = make(device, dtype, size)
    leaves = [t.clone().requires_grad_() for t in tensors[:2]]
    found = torch.autograd.grad(ours(*leaves, *tensors[2:]), leaves)
    exact = plain(rows, temperature, tensors, torch.float64)
    wide = plain(rows, temperature, tensors, torch.float32)
    for what, grad, wanted, in_float32 in zip(("input", "weight"), found, exact, wide, strict=True):
        assert grad.dtype == dtype
        room = 2 * max(error(wanted.to(dtype), wanted), error(in_float32, wanted))
        assert error(grad, wanted) <= room, f"{what}: {error(grad, wanted):.2e}, expected {room:.2e} at most"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_logits_of_a_teacher_in_float32(device, dtype, size):
    """They are not rounded to the dtype of the student."""
    tensors = make(device, dtype, size)
    logits = tensors[2].float() @ tensors[3].float().T
    leaves = [t.clone().requires_grad_() for t in tensors[:2]]
    loss = liger.fused_linear_jsd(*leaves, teacher_logits=logits, reduction="sum")
    again = [t.clone().requires_grad_() for t in tensors[:2]]
    teacher = {"teacher_input": tensors[2], "teacher_weight": tensors[3]}
    other = liger.fused_linear_jsd(*again, **teacher, reduction="sum")
    torch.testing.assert_close(loss, other, rtol=1e-3, atol=1e-5)
    for a, b in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(other, again), strict=True):
        assert error(a, b.double()) < 2 * torch.finfo(dtype).eps
