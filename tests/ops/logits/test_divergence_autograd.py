# SPDX-License-Identifier: BSD-3-Clause
"""When the gradient of a divergence is made, what is kept for it, and what is written."""

import gc
import weakref

import pytest
import torch
from cases import DTYPES, made_in_forward

import liger

REDUCTIONS = ["none", "sum", "mean", "batchmean"]
FORMS = {
    "kl": liger.kl_div,
    "reverse kl": lambda *a, **k: liger.kl_div(*a, reverse=True, **k),
    "jsd": lambda *a, **k: liger.jsd(*a, beta=0.3, **k),
    "tvd": liger.tvd,
}
KINDS = ["forward_kl", "reverse_kl", "jsd", "tvd"]


def make(device, rows=8, classes=33, dtype=torch.float32):
    student, teacher = ((torch.randn(rows, classes, device=device) * 2).to(dtype) for _ in range(2))
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    target[1] = -100
    return student, teacher, target


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_probs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_forward_with_gradient_is_forward_and_backward(device, dtype, log_probs, kind):
    student, teacher, target = make(device, dtype=dtype)
    if log_probs:
        student, teacher = (t.float().log_softmax(-1).to(dtype) for t in (student, teacher))
    before = student.clone()
    options = (kind, 0.3, 1.0 if log_probs else 1.5, log_probs, -100)
    rows, stats, nothing = torch.ops.liger.divergence_forward(
        student, teacher, target, None, *options, True, False
    )
    assert nothing.numel() == 0
    quarter = torch.tensor(0.25, device=device)
    for weight in (None, torch.rand(8, device=device), quarter, quarter.expand(8)):
        used = torch.ones(8, device=device) if weight is None else weight.expand(8)
        expected = torch.ops.liger.divergence_backward(
            used.contiguous(), student, teacher, target, stats, *options
        )
        arguments = (student, teacher, target, weight, *options)
        losses, _, gradient = torch.ops.liger.divergence_forward(*arguments, True, True)
        loss, _, again = torch.ops.liger.divergence_forward(*arguments, False, True)
        epsilon = torch.finfo(dtype).eps
        torch.testing.assert_close(losses, rows * used, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss, (rows * used).sum(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, expected, rtol=2 * epsilon + 1e-5, atol=1e-6)
        assert torch.equal(gradient, again) and not gradient[1].any()
        assert torch.equal(student, before)
        written = student.clone()
        in_place = torch.ops.liger.divergence_forward_(written, *arguments[1:], False)
        assert torch.equal(written, gradient) and torch.equal(in_place, loss)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_kept_for_the_backward(device, dtype, reduction):
    """The gradient or the logits, never both."""
    student, teacher, target = make(device, dtype=dtype)
    student = student.requires_grad_() * 1
    alive = [weakref.ref(student), weakref.ref(teacher)]
    loss = liger.jsd(student, teacher, target, reduction=reduction)
    del student, teacher
    gc.collect()
    assert [a() is None for a in alive] == [made_in_forward(dtype, reduction)] * 2
    assert loss.sum().requires_grad


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("reduction", ["sum", "mean", "batchmean"])
def test_made_in_either_pass_it_is_the_same(device, reduction, name):
    """Per-row losses go back to the logits; reduced ones multiply what the forward has made."""
    student, teacher, target = make(device)
    weight = torch.rand(8, device=device)
    divisor = {"sum": 1, "mean": 7, "batchmean": 8}[reduction]
    gradients = []
    for reduce in (
        lambda leaf: FORMS[name](leaf, teacher, target, token_weight=weight, reduction=reduction),
        lambda leaf: (
            FORMS[name](leaf, teacher, target, token_weight=weight, reduction="none").sum() / divisor
        ),
    ):
        leaf = student.clone().requires_grad_()
        gradients.append(torch.autograd.grad(-2.5 * reduce(leaf), leaf)[0])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_float16_gradients_are_scaled_before_they_are_rounded(device):
    """A loss scale is there to lift gradients that float16 cannot hold."""
    student, teacher, _ = make(device, 4, 500, torch.float16)
    leaf, exact = student.clone().requires_grad_(), student.double().cpu().requires_grad_()
    (liger.kl_div(leaf, teacher, denominator=1e6) * 65536).backward()
    with liger.use_backend("torch"):
        (liger.kl_div(exact, teacher.double().cpu(), denominator=1e6) * 65536).backward()
    assert (exact.grad.abs() / 65536 < 6e-8).double().mean() > 0.9
    torch.testing.assert_close(leaf.grad.double().cpu(), exact.grad, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("grad_mode", [False, True])
def test_no_gradient_is_made_that_nobody_wants(device, grad_mode, monkeypatch):
    student, teacher, _ = make(device)
    asked = []
    original = liger.ops.divergence.op._forward_op
    monkeypatch.setattr(
        liger.ops.divergence.op, "_forward_op", lambda *a: (asked.append(a[-1]), original(*a))[1]
    )
    with torch.set_grad_enabled(grad_mode):
        liger.jsd(student.requires_grad_(not grad_mode), teacher)
    assert asked == [False]
