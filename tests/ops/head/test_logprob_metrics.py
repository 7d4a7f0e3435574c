# SPDX-License-Identifier: BSD-3-Clause
"""The metrics of fused_linear_logprobs that TRL's default head returns, too, against plain torch in
float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_as_exact_as_torch, strided_like
from cross_entropy_reference import LARGEST_LSE
from test_fused_linear_logprobs import BUDGETS, HIDDEN, OPTIONS, VOCAB, leaves, make, plain

import liger

METRICS = "log_sum_sq_probs", "mean_logits"
RECOMPUTE = {"recomputed": True, "kept": False}


def plain_metrics(hidden, weight, targets, bias=None, temperature=1.0, softcap=None):
    """(log of the sum of squared probabilities, mean of the logits)"""
    logits = F.linear(hidden, weight, bias)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    wide = wide / temperature
    squares = (2 * wide).logsumexp(-1) - 2 * wide.logsumexp(-1)
    live = targets != -100
    return squares.where(live, 0.0), wide.mean(-1).where(live, 0.0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(device, dtype, options, budget, recompute):
    how, tensors = OPTIONS[options], make(device, dtype)
    out = liger.fused_linear_logprobs(
        *leaves(tensors),
        **how,
        metrics=METRICS,
        memory_budget=BUDGETS[budget],
        recompute=RECOMPUTE[recompute],
    )
    expected, exact = plain_metrics(*tensors, **how), plain_metrics(*leaves(tensors, torch.float64), **how)
    for name, mine, a, b in zip(("log_sum_sq_probs", "mean_logits"), out[3:], expected, exact, strict=True):
        assert mine.dtype == torch.float32 and not mine.requires_grad
        # Logits are rounded to the dtype before the softmax, in which the largest of about 4 counts. In a
        # mean over classes roundings of plain torch may cancel by chance.
        mean = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps / 2 if name == "mean_logits" else 0.0
        assert_as_exact_as_torch(mine, a, b.detach(), name, intermediate=8.0 + mean)
        assert not mine[tensors[2] == -100].any()
    assert out.entropy is None and out.argmax is None


def test_logits_in_float32(device):
    hidden, weight, targets, bias = make(device, torch.bfloat16)
    out = liger.fused_linear_logprobs(
        hidden,
        weight.float(),
        targets,
        bias.float(),
        temperature=0.7,
        softcap=3.0,
        logits_dtype=torch.float32,
        metrics=METRICS,
    )
    exact = plain_metrics(hidden.double(), weight.double(), targets, bias.double(), 0.7, 3.0)
    for mine, wanted in zip(out[3:], exact, strict=True):
        assert (mine - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_rest_is_that_of_a_call_without_metrics(device, temperature, recompute):
    def results(metrics=()):
        tensors = leaves(make(device))
        out = liger.fused_linear_logprobs(
            *tensors,
            temperature=temperature,
            metrics=("entropy", "argmax", *metrics),
            recompute=RECOMPUTE[recompute],
        )
        grads = torch.autograd.grad(
            (out.logprobs - 0.3 * out.entropy).sum(), [t for t in tensors if t.requires_grad]
        )
        return [*out[:3], *grads]

    torch.manual_seed(3)
    before = results()
    torch.manual_seed(3)
    for mine, other in zip(results(metrics=METRICS), before, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=4)), ids=str)
def test_what_is_requested(device, flags):
    names = ("entropy", "argmax", *METRICS)
    hidden, weight, targets, bias = make(device)
    hidden, targets = hidden[:20].view(4, 5, HIDDEN), targets[:20].view(4, 5)
    out = liger.fused_linear_logprobs(
        strided_like(hidden), weight, targets.int(), bias, metrics=list(itertools.compress(names, flags))
    )
    if not any(flags):
        assert isinstance(out, torch.Tensor)
        return
    assert isinstance(out, liger.LogProbs)
    assert [t is not None for t in out[1:]] == list(flags)
    assert all(t is None or t.shape == (4, 5) for t in out)
    wanted = plain_metrics(hidden, weight, targets, bias)
    for mine, expected in zip(out[3:], wanted, strict=False):
        if mine is not None:
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_peaked_and_uniform_rows(device):
    """p = 1 has log(sum(p^2)) = 0, equal probabilities -log(classes); and logits whose exponentials would
    overflow."""
    weight = torch.zeros(VOCAB, HIDDEN, device=device)
    weight[5, 0] = 1.0
    hidden = torch.zeros(3, HIDDEN, device=device)
    hidden[1, 0], hidden[2, 0] = 3000.0, -3000.0
    targets = torch.tensor([0, 5, 5], device=device)
    out = liger.fused_linear_logprobs(hidden, weight, targets, metrics=METRICS)
    uniform = [-torch.tensor(n).log().item() for n in (VOCAB, VOCAB - 1)]
    expected = torch.tensor([uniform[0], 0.0, uniform[1]], device=device)
    torch.testing.assert_close(out.log_sum_sq_probs, expected, rtol=1e-6, atol=1e-6)
    means = torch.tensor([0.0, 3000.0, -3000.0], device=device) / VOCAB
    torch.testing.assert_close(out.mean_logits, means, rtol=1e-6, atol=0)


def test_with_an_accumulated_weight_gradient(device):
    hidden, weight, targets, _ = make(device)
    parameter = torch.nn.Parameter(weight)
    parameter.main_grad = torch.zeros_like(weight)
    out = liger.fused_linear_logprobs(
        hidden, parameter, targets, accumulate_grad_weight=True, metrics=("entropy", *METRICS)
    )
    (out.logprobs - out.entropy).sum().backward()
    (other,) = leaves((weight,))
    logprobs, entropy, _ = plain(hidden, other, targets)
    (logprobs - entropy).sum().backward()
    torch.testing.assert_close(parameter.main_grad, other.grad, rtol=1e-4, atol=1e-5)
    for mine, expected in zip(out[3:], plain_metrics(hidden, weight, targets), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


# --- the statistics that they follow from -------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("class_sum", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 129), (3, 9001)], ids=str)
def test_sums_of_squares(device, shape, dtype, class_sum, softcap):
    op = torch.ops.liger.cross_entropy_stats.default
    logits = (torch.randn(shape, device=device) * 3).to(dtype)
    target = torch.zeros(shape[0], dtype=torch.int64, device=device)
    target[1:2] = -100

    def squares(logits):
        z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        total = (z - z.amax(-1, keepdim=True)).exp().square().sum(-1)
        return torch.where(target == -100, 1.0, total)

    for given in (logits, strided_like(logits), torch.cat([logits, logits], 1)[:, : shape[1]]):
        stats = op(given, target, None, 0, -100, softcap, class_sum, True)
        # Another kernel, which may round differently.
        others = op(given, target, None, 0, -100, softcap, class_sum)
        torch.testing.assert_close(stats[:-1], others, rtol=1e-6, atol=1e-6)
        assert_as_exact_as_torch(
            stats[-1],
            squares(logits.float()),
            squares(logits.double()),
            "squares",
            intermediate=2 * LARGEST_LSE,
        )
    leaf = logits.clone().requires_grad_()
    assert not op(leaf, target, None, 0, -100, softcap, class_sum, True).requires_grad


def test_sums_of_squares_of_impossible_classes(device):
    logits = torch.full((2, 300), -torch.inf, device=device)
    logits[1, 5] = 2.0
    target = torch.tensor([0, 5], device=device)
    stats = torch.ops.liger.cross_entropy_stats(logits, target, None, 0, -100, None, False, True)
    assert torch.equal(stats[-1], torch.tensor([0.0, 1.0], device=device))
