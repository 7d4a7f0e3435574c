# SPDX-License-Identifier: BSD-3-Clause
"""accumulate_grad_weight=True: the gradient of an lm_head's weight, added to main_grad or grad over
micro-batches."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES

import liger
from liger._core.runtime.environment import triton_interpreted

ROWS, HIDDEN, VOCAB = 60, 32, 211
# Micro-batches of different sizes.
PARTS = slice(0, 43), slice(43, ROWS)
BUDGETS = {"chunks": 7 * 216 * 4, "whole": None}
OPTIONS = {"plain": {}, "options": {"label_smoothing": 0.1, "lse_square_scale": 1e-3, "softcap": 5.0}}


def make(device, dtype=torch.float32, rows=ROWS):
    """(input, weight, target, bias, class weights, token weights) with ignored rows, one of which is not
    finite."""
    x = torch.randn(rows, HIDDEN, device=device).to(dtype)
    weight = torch.nn.Parameter((torch.randn(VOCAB, HIDDEN, device=device) / 3).to(dtype))
    target = torch.randint(VOCAB, (rows,), device=device)
    if rows:
        target[1] = target[5] = target[-1] = -100
        x[5] = torch.nan
    bias = torch.randn(VOCAB, device=device).to(dtype)
    return x, weight, target, bias, torch.rand(VOCAB, device=device), torch.rand(rows, device=device)


def with_sum(weight):
    weight.main_grad = torch.zeros(weight.shape, device=weight.device)
    return weight


def exact(x, weight, target, bias, ce_weight, token_weight, denominator, **options):
    """The gradient of the weight in float64, of the sum of losses divided by the denominator."""
    x, weight, bias, ce_weight, token_weight = (
        t.detach().double() for t in (x, weight, bias, ce_weight, token_weight)
    )
    live = target != -100
    weight.requires_grad_()
    logits = x[live] @ weight.T + bias
    cap, scale = options.get("softcap"), options.get("lse_square_scale", 0.0)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    losses = F.cross_entropy(
        logits, target[live], ce_weight, reduction="none", label_smoothing=options.get("label_smoothing", 0.0)
    )
    losses = losses + scale * ce_weight[target[live]] * logits.logsumexp(-1).square()
    return torch.autograd.grad((losses * token_weight[live]).sum() / denominator, weight)[0]


def relative_error(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(device, dtype, options, budget, reduction):
    """Micro-batches of different sizes with an upstream gradient; other gradients are those without the
    option."""
    x, weight, target, bias, ce_weight, token_weight = make(device, dtype)
    options, factor, count = OPTIONS[options], 0.7, 50.0
    best = factor * exact(x, weight, target, bias, ce_weight, token_weight, count, **options)
    with_sum(weight)

    def run(part, weight, accumulate):
        leaves = [t.detach().clone().requires_grad_() for t in (x[part], bias)]
        how = {**options, "memory_budget": BUDGETS[budget], "accumulate_grad_weight": accumulate}
        if reduction == "sum":
            how["denominator"] = count
        loss = liger.fused_linear_ce(
            leaves[0], weight, target[part], leaves[1], ce_weight=ce_weight, token_weight=token_weight[part],
            reduction=reduction, **how,
        )  # fmt: skip
        total = loss * factor if reduction == "sum" else (loss / count).sum() * factor
        total.backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves)]

    for part in PARTS:
        mine = run(part, weight, True)
        assert weight.grad is None
        for a, b in zip(mine, run(part, weight.detach(), False), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    # Rounded logits, and in the gradient of the logits one rounding.
    assert relative_error(weight.main_grad, best) < 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_large_batch_within_one_rounding(device, dtype):
    x, weight, target, *_ = make(device, dtype)
    count = (target != -100).sum()
    with_sum(weight)
    for part in PARTS:
        liger.fused_linear_ce(
            x[part], weight, target[part], denominator=count, reduction="sum", accumulate_grad_weight=True
        ).backward()
    large = with_sum(torch.nn.Parameter(weight.detach().clone()))
    loss = liger.fused_linear_ce(x, large, target, accumulate_grad_weight=True)
    loss.backward()
    # The same products, added in another order. On a GPU a GEMM of another size may also round a logit or its
    # gradient to the other neighbour, and probabilities by as much.
    size = large.main_grad.abs().max().item()
    rounded = x.is_cuda and dtype in (torch.float16, torch.bfloat16)
    tolerance = torch.finfo(dtype).eps if rounded else 2e-6
    torch.testing.assert_close(weight.main_grad, large.main_grad, rtol=0, atol=tolerance * size)
    # In float16 the loss of a whole call is a multiple, over its factor.
    torch.testing.assert_close(
        loss, liger.fused_linear_ce(x, weight, target), rtol=2e-7 if dtype == torch.float16 else 0, atol=0
    )
    if dtype == torch.float16:
        return  # the gradient of a whole call is rounded in float16 before and after, where it underflows
    plain = torch.nn.Parameter(weight.detach().clone())
    liger.fused_linear_ce(x, plain, target).backward()
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(
        weight.main_grad, plain.grad.float(), rtol=rounding, atol=max(tolerance, 4e-6) * size
    )


@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=["", "float32 logits"])
@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probabilities(device, dtype, budget, entropy, logits_dtype):
    x, weight, target, bias, *_ = make(device, dtype)
    with_sum(weight)
    upstream = torch.randn(2, ROWS, device=device)
    how = {"temperature": 0.8, "softcap": 6.0, "logits_dtype": logits_dtype, "memory_budget": BUDGETS[budget]}
    for part in PARTS:
        out = liger.fused_linear_logprobs(
            x[part], weight, target[part], bias, **how, metrics=("entropy", "argmax"),
            accumulate_grad_weight=True,
        )  # fmt: skip
        total = (out.logprobs * upstream[0, part]).sum()
        if entropy:
            total = total + (out.entropy * upstream[1, part]).sum()
        total.backward()
        assert out.argmax.dtype == torch.int64
    live = target != -100
    wide = weight.detach().double().requires_grad_()
    logits = x[live].double() @ wide.T + bias.double()
    logp = (6.0 * torch.tanh(logits / 6.0) / 0.8).log_softmax(-1)
    total = (logp.gather(1, target[live].unsqueeze(1))[:, 0] * upstream[0, live]).sum()
    if entropy:
        total = total - ((logp.exp() * logp).sum(-1) * upstream[1, live]).sum()
    best = torch.autograd.grad(total, wide)[0]
    assert weight.grad is None
    rounding = torch.finfo(dtype).eps
    assert relative_error(weight.main_grad, best) < (3 if logits_dtype is None else 1) * rounding + 1e-6


# --- where the gradient is added ----------------------------------------------------------------------------


def step(x, weight, target, **how):
    loss = liger.fused_linear_ce(x, weight, target, **how, accumulate_grad_weight=True)
    loss.backward()
    return loss


def test_main_grad_comes_before_grad(device):
    x, weight, target, *_ = make(device)
    with_sum(weight).grad = torch.ones_like(weight)
    weight.grad_added_to_main_grad = False
    step(x, weight, target)
    assert weight.main_grad.any() and (weight.grad == 1).all() and weight.grad_added_to_main_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grad(device, dtype):
    """A grad is created, then added to in place; a weight of 16 bits says that it is float32."""
    x, weight, target, *_ = make(device, dtype)
    if dtype != torch.float32:
        weight.grad_dtype = torch.float32
    expected = with_sum(torch.nn.Parameter(weight.detach().clone()))
    step(x, weight, target)
    first = weight.grad
    step(x, weight, target)
    for _ in range(2):
        step(x, expected, target)
    assert weight.grad is first and weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, expected.main_grad)


def test_grad_after_zero_grad(device):
    x, weight, target, *_ = make(device)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    found = []
    for to_none in (True, False, True):
        optimizer.zero_grad(set_to_none=to_none)
        step(x, weight, target)
        found.append(weight.grad.clone())
    assert all(torch.equal(f, found[0]) for f in found)


def test_float64():
    x, weight, target, *_ = make("cpu", torch.float64)
    with liger.use_backend("torch"):
        step(x, weight, target)
        other = torch.nn.Parameter(weight.detach().clone())
        liger.fused_linear_ce(x, other, target).backward()
    torch.testing.assert_close(weight.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_autocast_adds_to_the_gradient_of_the_float32_weight(device):
    x, weight, target, *_ = make(device)
    dtype = torch.float16 if triton_interpreted() else torch.bfloat16
    with torch.autocast(device.type, dtype):
        loss = liger.fused_linear_ce(x, weight, target, accumulate_grad_weight=True)
    loss.backward()
    expected = with_sum(torch.nn.Parameter(weight.detach().to(dtype)))
    step(x.to(dtype), expected, target)
    assert torch.equal(weight.grad, expected.main_grad)


def test_rows_without_a_class(device):
    """Only ignored rows, and no rows: nothing is added."""
    x, weight, target, *_ = make(device)
    with_sum(weight).main_grad.fill_(2.0)
    for reduction in ("mean", "sum"):
        step(x, weight, torch.full_like(target, -100), reduction=reduction)
        step(x[:0], weight, target[:0], reduction=reduction)
    out = liger.fused_linear_logprobs(x[:0], weight, target[:0], accumulate_grad_weight=True)
    out.sum().backward()
    assert (weight.main_grad == 2.0).all()
