# SPDX-License-Identifier: BSD-3-Clause
"""Offsets that all logits of a row have. No probability depends on them, so no loss and no gradient may lose
digits.

The logits are exact in float32. By the rule of :func:`cases.assert_as_exact_as_torch`: plain torch takes the
maximum of each row away before anything is rounded.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_as_exact_as_torch, check_op
from cross_entropy_reference import LARGEST_LSE

import liger

ROWS = 6
# Small, around the first integers that float32 lacks, and where all differences are 0 or huge.
OFFSETS = [0.0, -1e4, 1e8, 1e30]
# (of the student, of the teacher)
PAIRS = [(0.0, 200.0), (-2e4, 0.0), (1e6, -1e6), (1e30, -1e30)]


def shifted(vocab, device, offset, dtype=torch.float32):
    """Logits that ``dtype`` has exactly, with several at the maximum."""
    step = max(0.125, torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(abs(offset) or 1.0)))
    return (offset + step * torch.randint(-40, 3, (ROWS, vocab), device=device).double()).to(dtype)


def targets(vocab, device):
    y = torch.randint(vocab, (ROWS,), device=device)
    y[2] = -100
    return y


def selected(z, y):
    """(log-probabilities of the targets, entropies) of rows; 0 in ignored rows."""
    log_p = z.log_softmax(-1)
    entropy = -torch.where(log_p.exp() == 0, 0.0, log_p.exp() * log_p).sum(-1)
    chosen = log_p.gather(1, y.clamp(min=0).unsqueeze(1)).squeeze(1)
    return tuple(torch.where(y == -100, 0.0, values) for values in (chosen, entropy))


def of_logits(**options):
    return lambda z, y: liger.cross_entropy(z, y, **options)


def of_head(function, **options):
    """A head whose logits are z: hidden states of the unit matrix, and the transposed logits as the
    weight."""

    def ours(z, y):
        found = function(torch.eye(ROWS, dtype=z.dtype, device=z.device), z.t(), y, **options)
        return (found.logprobs, found.entropy) if isinstance(found, liger.LogProbs) else found

    return ours


def plain_ce(**options):
    return lambda z, y: F.cross_entropy(z, y, **options)


FORMS = {
    "mean": (of_logits(), plain_ce()),
    "rows": (of_logits(reduction="none"), plain_ce(reduction="none")),
    "smoothed": (of_logits(label_smoothing=0.1), plain_ce(label_smoothing=0.1)),
    "smoothed rows": (
        of_logits(label_smoothing=1.0, reduction="none"),
        plain_ce(label_smoothing=1.0, reduction="none"),
    ),
    "head": (of_head(liger.fused_linear_ce), plain_ce()),
    "smoothed head": (of_head(liger.fused_linear_ce, label_smoothing=0.3), plain_ce(label_smoothing=0.3)),
    "rows of a head": (of_head(liger.fused_linear_ce, reduction="none"), plain_ce(reduction="none")),
    "logprobs": (of_head(liger.fused_linear_logprobs, metrics=("entropy",)), selected),
    "kept logprobs": (of_head(liger.fused_linear_logprobs, metrics=("entropy",), recompute=False), selected),
    "float32 logprobs": (
        of_head(liger.fused_linear_logprobs, metrics=("entropy",), logits_dtype=torch.float32),
        selected,
    ),
}


# The longer rows have more tiles than one in every kernel.
@pytest.mark.parametrize("vocab", [300, 9001])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("form", FORMS)
def test_classes(device, form, offset, vocab):
    ours, plain = FORMS[form]
    y = targets(vocab, device)
    check_op(lambda z: ours(z, y), lambda z: plain(z, y), (shifted(vocab, device, offset),), LARGEST_LSE)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("offset", OFFSETS)
def test_class_weights(device, offset, reduction):
    y, weight = targets(300, device), torch.rand(300, device=device)
    options = {"label_smoothing": 0.2, "reduction": reduction}
    check_op(
        lambda z: liger.cross_entropy(z, y, ce_weight=weight, **options),
        lambda z: F.cross_entropy(z, y, weight=weight.to(z.dtype), **options),
        (shifted(300, device, offset),),
        LARGEST_LSE,
    )


@pytest.mark.parametrize("offset", OFFSETS)
def test_metrics(device, offset):
    z, y = shifted(300, device, offset), targets(300, device)
    found = liger.cross_entropy(z, y, metrics=("logprobs", "entropy"))
    for name, plain, exact in zip(
        ("logprobs", "entropy"), selected(z, y), selected(z.double(), y), strict=True
    ):
        assert_as_exact_as_torch(getattr(found, name), plain, exact, name, LARGEST_LSE)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"label_smoothing": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_logits(device, dtype, options):
    """Of any size: their number alone matters."""
    largest = torch.finfo(dtype).max / 2
    y = torch.tensor([3, 0, 7], device=device)
    for size in (0.0, 1e4, -1e4, largest, -largest):
        z = torch.full((3, 8), size, dtype=dtype, device=device, requires_grad=True)
        loss = liger.cross_entropy(z, y, **options)
        torch.testing.assert_close(loss, torch.full_like(loss, math.log(8.0)))
        loss.mean().backward()
        kept = 1.0 - options.get("label_smoothing", 0.0)
        expected = (kept / 8 - kept * F.one_hot(y, 8)) / 3
        torch.testing.assert_close(z.grad, expected.to(dtype), rtol=1e-6, atol=1e-7)


def forward_kl(s, t):
    log_q, log_p = s.log_softmax(-1), t.log_softmax(-1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def jsd(s, t):
    log_q, log_p = s.log_softmax(-1), t.log_softmax(-1)
    log_m = torch.logaddexp(log_q, log_p) - math.log(2.0)
    return (F.kl_div(log_m, log_p, reduction="none", log_target=True)).sum(-1) / 2 + (
        F.kl_div(log_m, log_q, reduction="none", log_target=True)
    ).sum(-1) / 2


DIVERGENCES = {
    "kl": (liger.kl_div, {}, forward_kl),
    "reverse kl": (liger.kl_div, {"reverse": True}, lambda s, t: forward_kl(t, s)),
    "jsd": (liger.jsd, {}, jsd),
    "tvd": (liger.tvd, {}, lambda s, t: (s.softmax(-1) - t.softmax(-1)).abs().sum(-1) / 2),
}


@pytest.mark.parametrize("vocab", [300, 9001])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences(device, name, pair, vocab):
    function, options, plain = DIVERGENCES[name]
    student, teacher = (shifted(vocab, device, offset) for offset in pair)
    # The most probable class of both: signs of p - q differ among the classes, so no gradient of tvd is
    # exactly 0.
    student[:, 0], teacher[:, 0] = student.amax(1), teacher.amax(1)
    teacher[:, 1:] = torch.where(teacher[:, 1:] == teacher[:, :1], teacher.amin(), teacher[:, 1:])
    check_op(
        lambda s: function(s, teacher, reduction="none", **options),
        lambda s: plain(s, teacher.to(s.dtype)),
        (student,),
        LARGEST_LSE,
    )
