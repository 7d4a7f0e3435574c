# SPDX-License-Identifier: BSD-3-Clause
"""What is ignored leaves no trace, whatever is there: NaN or infinities in its place change no bit of any
result or gradient, and its own gradient is exactly zero."""

import pytest
import torch
from cases import DTYPES
from cuda_graphs import capture
from losses_cases import leaf
from public_callables import CASES, arguments, cases, outputs, weighted_sum

import liger
from liger import losses
from liger._core.runtime.environment import triton_interpreted

# The interpreter of Triton takes its time.
POISONS = [torch.nan] if triton_interpreted() else [torch.nan, torch.inf, -torch.inf]
WITH_IGNORED = cases(ignored=True)


def results_and_gradients(name, given):
    results = outputs(name, given)
    loss = weighted_sum([r for r in results if r.requires_grad])
    return [*results, *torch.autograd.grad(loss, [given[key] for key in CASES[name].differentiable])]


def poisoned(name, given, value):
    """The same arguments with ``value`` in everything that is ignored."""
    found = CASES[name].ignored(given)
    assert any(mask.any() for mask in found.values()), "nothing is ignored"
    changed = dict(given)
    for key, mask in found.items():
        changed[key] = given[key].detach().masked_fill(_over(mask, given[key]), value)
        changed[key].requires_grad_(given[key].requires_grad)
    return changed


def _over(mask, tensor):
    return mask.view(*mask.shape, *(1,) * (tensor.dim() - mask.dim()))


def assert_no_trace(name, given, found, expected):
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"result {i}"
    gradients = dict(zip(CASES[name].differentiable, found[-len(CASES[name].differentiable) :], strict=True))
    for key, mask in CASES[name].ignored(given).items():
        assert key not in gradients or not gradients[key][mask].any(), f"gradient of what is ignored in {key}"


def captured(function):
    """What a CUDA graph of the function gives."""
    graph, found = capture(function)
    graph.replay()
    return [t.detach().clone() for t in found]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WITH_IGNORED)
def test_whatever_is_ignored_leaves_no_trace(device, name, dtype):
    given = arguments(name, device, dtype)
    expected = results_and_gradients(name, given)
    for poison in POISONS:
        print(poison)
        changed = poisoned(name, given, poison)
        assert_no_trace(name, given, results_and_gradients(name, changed), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WITH_IGNORED)
def test_nor_in_a_captured_graph(device, name, dtype):
    given = arguments(name, device, dtype)
    changed = poisoned(name, given, torch.nan)
    found, expected = (captured(lambda t=t: results_and_gradients(name, t)) for t in (changed, given))
    assert_no_trace(name, given, found, expected)


# --- sizes at which other kernels serve ---------------------------------------------------------------------


def _head(device, rows, hidden, vocab, dtype):
    x = torch.randn(rows, hidden, device=device).to(dtype)
    weight = (torch.randn(vocab, hidden, device=device) * 0.05).to(dtype)
    target = torch.randint(vocab, (rows,), device=device)
    ignored = torch.rand(rows, device=device) < 0.3
    ignored[0] = ignored[-1] = True
    return x, weight, target.masked_fill(ignored, -100), ignored


def _policy(x, weight, target, **options):
    x, target = x.view(-1, 8, x.shape[-1]), target.view(-1, 8)
    advantages = torch.ones(len(x), device=x.device)
    return losses.FusedLinearGRPOLoss(beta=0.0, **options)(x, weight, target, advantages=advantages)[0]


def _pairs(x, weight, target):
    x, target = x.view(-1, 8, x.shape[-1]), target.view(-1, 8)
    return losses.FusedLinearDPOLoss(use_ref_model=False)(x, weight, target)[0]


HEADS = {
    "fused_linear_ce": liger.fused_linear_ce,
    "fused_linear_ce chunks": lambda *t: liger.fused_linear_ce(*t, memory_budget=64 * t[1].shape[0] * 2),
    "fused_linear_ce smoothed": lambda *t: liger.fused_linear_ce(*t, label_smoothing=0.1),
    "fused_linear_logprobs": lambda *t: liger.fused_linear_logprobs(*t).sum(),
    "fused_linear_logprobs temperature": lambda *t: liger.fused_linear_logprobs(*t, temperature=0.7).sum(),
    "GRPO": _policy,
    "GRPO entropy": lambda *t: _policy(*t, entropy_coef=0.1),
    "GRPO chunks": lambda *t: _policy(*t, memory_budget=64 * t[1].shape[0] * 2),
    "DPO": _pairs,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [None, "input", "weight"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(64, 256, 1000), (256, 256, 32000), (2048, 256, 32000)], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_heads_on_a_gpu(device, name, sizes, dtype, in_graph, frozen):
    """A NaN hidden state of an ignored token and one with zeros there give the same gradients."""
    x, weight, target, ignored = _head(device, *sizes, dtype)
    results = []
    for value in (0.0, torch.nan):
        leaves = [leaf(x.masked_fill(ignored.unsqueeze(1), value)), leaf(weight)]
        if frozen is not None:
            leaves[frozen == "weight"].requires_grad_(False)
        wanted = [t for t in leaves if t.requires_grad]

        def step(leaves=leaves, wanted=wanted):
            loss = HEADS[name](*leaves, target)
            return [loss, *torch.autograd.grad(loss, wanted)]

        results.append(captured(step) if in_graph else step())
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert torch.isfinite(b).all() and torch.equal(a, b), f"result {i}"
    if frozen != "input":
        assert not results[1][1][ignored].any()


@pytest.mark.parametrize("function", [liger.cross_entropy, liger.kl_div])
def test_a_weight_of_zero_is_no_mask(device, function):
    """Zero times NaN is NaN, as in torch: only the target, or a mask, says that a token is ignored."""
    x = torch.randn(4, 9, device=device)
    x[1] = torch.nan
    other = torch.randint(9, (4,), device=device) if function is liger.cross_entropy else torch.randn_like(x)
    token_weight = torch.tensor([1.0, 0.0, 1.0, 1.0], device=device)
    assert function(x, other, token_weight=token_weight).isnan()
