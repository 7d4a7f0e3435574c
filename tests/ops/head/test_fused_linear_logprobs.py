# SPDX-License-Identifier: BSD-3-Clause
"""Log-probabilities and entropies of a linear layer, and their gradients, against plain torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_as_exact_as_torch, strided_like

import liger

ROWS, HIDDEN, VOCAB = 23, 16, 37
# Three rows of logits to a chunk; all rows in one.
BUDGETS = {"chunks": 3 * 40 * 4, "whole": None}
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 3.0},
    "softcap and temperature": {"softcap": 3.0, "temperature": 1.7},
}


def make(device, dtype=torch.float32, bias=True):
    hidden = torch.randn(ROWS, HIDDEN, device=device).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, device=device) / 2).to(dtype)
    targets = torch.randint(VOCAB, (ROWS,), device=device)
    targets[3] = targets[-1] = -100
    return hidden, weight, targets, torch.randn(VOCAB, device=device).to(dtype) if bias else None


def plain(hidden, weight, targets, bias=None, temperature=1.0, softcap=None):
    """(log-probabilities, entropies, most probable classes)"""
    logits = F.linear(hidden, weight, bias)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    logp = (wide / temperature).log_softmax(-1)
    live = targets != -100
    chosen = logp.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    return chosen.where(live, 0.0), entropy.where(live, 0.0), logp.argmax(-1).where(live, -1)


def leaves(tensors, dtype=None):
    return [
        t.detach().to(dtype or t.dtype).clone().requires_grad_() if t is not None and t.is_floating_point() else t
        for t in tensors
    ]  # fmt: skip


def results(function, tensors, entropy):
    """[log-probabilities, entropies, gradients] of a sum with a different weight for every row."""
    logprobs, entropies = function(*tensors)[:2]
    ramp = torch.linspace(-1, 2, ROWS, device=logprobs.device, dtype=logprobs.dtype)
    total = (logprobs * ramp).sum() + ((entropies * ramp.flip(0)).sum() if entropy else 0.0)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    return [logprobs.detach(), entropies.detach(), *torch.autograd.grad(total, wanted)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(device, dtype, options, budget, entropy):
    options = OPTIONS[options]
    tensors = make(device, dtype)
    how = {**options, "memory_budget": BUDGETS[budget], "metrics": ("entropy", "argmax")}
    mine = results(lambda *t: liger.fused_linear_logprobs(*t, **how), leaves(tensors), entropy)
    torchs = results(lambda *t: plain(*t, **options), leaves(tensors), entropy)
    exact = results(lambda *t: plain(*t, **options), leaves(tensors, torch.float64), entropy)
    names = ("logprobs", "entropy", "hidden", "weight", "bias")
    # Logits are rounded to the dtype before the softmax, in which the largest of about 4 counts.
    for name, a, b, c in zip(names, mine, torchs, exact, strict=True):
        assert a.dtype == (torch.float32 if name in ("logprobs", "entropy") else dtype)
        assert_as_exact_as_torch(a, b, c, name, intermediate=8.0)


def test_argmax_and_shapes(device):
    hidden, weight, targets, bias = make(device)
    hidden, targets = hidden[:20].view(4, 5, HIDDEN), targets[:20].view(4, 5)
    for temperature in (1.0, 2.0):
        out = liger.fused_linear_logprobs(
            strided_like(hidden), weight, targets.int(), bias, temperature=temperature, metrics=("argmax",)
        )
        expected = plain(hidden.view(20, -1), weight, targets.reshape(-1), bias, temperature)
        assert out.entropy is None and out.argmax.dtype == torch.int64
        assert torch.equal(out.argmax, expected[2].view(4, 5))
        torch.testing.assert_close(out.logprobs, expected[0].view(4, 5), rtol=1e-5, atol=1e-5)


def test_classes_that_cannot_be_drawn(device):
    """A bias of -inf, as for padding of the vocabulary: p log p is 0 there, not NaN."""
    hidden, weight, targets, bias = make(device)
    bias[-5:] = -torch.inf
    targets = targets.clamp(max=VOCAB - 6)
    x, w = leaves((hidden, weight))
    out = liger.fused_linear_logprobs(x, w, targets, bias, metrics=("entropy",))
    grads = torch.autograd.grad(out.logprobs.sum() + 2.0 * out.entropy.sum(), (x, w))
    y, v = leaves((hidden, weight[:-5]))
    expected = plain(y, v, targets, bias[:-5])
    others = torch.autograd.grad(expected[0].sum() + 2.0 * expected[1].sum(), (y, v))
    torch.testing.assert_close(grads[0], others[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads[1][:-5], others[1], rtol=1e-4, atol=1e-4)
    assert not grads[1][-5:].any()
