# SPDX-License-Identifier: BSD-3-Clause
"""Kept logits and exponentials with logits_dtype and accumulate_grad_weight."""

import pytest
import torch
from cases import DTYPES
from test_accumulate_grad_weight import with_sum
from test_kept_logits import OnGpu, engine  # noqa: F401  a fixture
from test_logits_dtype import (
    OPTIONS,
    PAIRS,
    ROWS,
    STATED,
    VOCAB,
    difference,
    make,
    names,
    plain,
    relative_error,
)

import liger
from liger._core.head import kept_logits, lm_head

FLOAT32 = {"logits_dtype": torch.float32, "recompute": False}


@pytest.fixture
def logits_rows(monkeypatch):
    """Rows of every float32 GEMM of logits."""
    rows = []
    real = lm_head.write_float32_linear

    def write(x, *rest):
        rows.append(x.shape[0])
        return real(x, *rest)

    monkeypatch.setattr(lm_head, "write_float32_linear", write)
    return rows


def saved_by(function):
    """(result, {dtype} of the saved tensors that have a number for each row and class)"""
    dtypes = set()

    def pack(tensor):
        if tensor.dim() == 2 and tensor.shape[0] == ROWS and tensor.shape[1] >= VOCAB:
            dtypes.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return function(), dtypes


@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("budget", [8 * 520 * 6, None], ids=["chunks", "whole"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtypes", PAIRS, ids=names)
def test_float32_logits_are_kept_in_float32(device, logits_rows, dtypes, options, budget, entropy):
    """Logits with a standard deviation of 15, whose rounding would change probabilities by some percent."""
    x, weight, target, bias = make(device, dtypes, std=15.0, bias=True)
    options, upstream = OPTIONS[options], torch.randn(2, ROWS, device=device)

    def grads(function, x, weight, bias):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        results, dtypes_kept = saved_by(lambda: function(leaves[0], leaves[1], target, leaves[2]))
        chosen = tuple(results[: 1 + entropy])
        return (
            results,
            dtypes_kept,
            torch.autograd.grad(chosen, leaves, [*upstream.to(chosen[0].dtype)][: 1 + entropy]),
        )

    def kept(*tensors):
        return liger.fused_linear_logprobs(
            *tensors, **options, **FLOAT32, memory_budget=budget, metrics=("entropy", "argmax")
        )

    found, dtypes_kept, mine = grads(kept, x, weight, bias)
    assert dtypes_kept == {torch.float32}
    # The backward computes no logits.
    assert logits_rows == [ROWS]
    clean = x.masked_fill((target == -100).unsqueeze(1), 0.0)
    exact, _, best = grads(
        lambda *t: plain(*t, torch.float64, **options), clean.double(), weight.double(), bias.double()
    )
    for result, other in zip(found[:2], exact, strict=True):
        # In proportion to the logits.
        assert difference(result, other) < STATED * 15.0 / 2.5 / options.get("temperature", 1.0)
        assert not result[target == -100].any()
    assert torch.equal(found.argmax == -1, target == -100)
    narrow = dtypes[0] == dtypes[1]
    for name, gradient, other in zip(("hidden", "weight", "bias"), mine, best, strict=True):
        assert gradient.isfinite().all(), name
        roundings = torch.finfo(gradient.dtype).eps / 2 + narrow * torch.finfo(dtypes[0]).eps / 2
        assert relative_error(gradient, other) < roundings + 2e-5, name
    assert not mine[0][target == -100].any()


@pytest.mark.parametrize("recompute", [None, True])
def test_float32_logits_are_not_kept_by_default(logits_rows, recompute):
    x, weight, target, _ = make("cpu", (torch.float32,) * 2)
    leaves = x.nan_to_num().requires_grad_(), weight.requires_grad_()
    logprobs, dtypes = saved_by(
        lambda: liger.fused_linear_logprobs(*leaves, target, recompute=recompute, logits_dtype=torch.float32)
    )
    assert not dtypes
    logprobs.sum().backward()
    assert logits_rows == [ROWS - 3] * 2


@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=["rounded", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulated_weight_gradient(device, dtype, logits_dtype):
    """Kept logits serve the gradients of hidden states and bias; the gradient of the weight is as without
    them."""
    x, weight, target, bias = make(device, (dtype, dtype), bias=True)

    def run(recompute):
        parameter = with_sum(torch.nn.Parameter(weight.detach().clone()))
        leaves = [t.detach().clone().requires_grad_() for t in (x, bias)]
        out, dtypes = saved_by(
            lambda: liger.fused_linear_logprobs(
                leaves[0], parameter, target, leaves[1], temperature=0.7, metrics=("entropy",), recompute=recompute,
                logits_dtype=logits_dtype, accumulate_grad_weight=True,
            )
        )  # fmt: skip
        (out.logprobs.sum() + 0.5 * out.entropy.sum()).backward()
        assert parameter.grad is None
        return dtypes, parameter.main_grad, *(t.grad for t in leaves)

    dtypes, total, *others = run(False)
    none, expected, *recomputed = run(True)
    assert dtypes == {logits_dtype or dtype} and not none
    assert total.any() and torch.equal(total, expected)
    for mine, other in zip(others, recomputed, strict=True):
        torch.testing.assert_close(mine, other)


def test_accumulated_weight_gradient_alone_keeps_nothing():
    x, weight, target, _ = make("cpu", (torch.float32,) * 2)
    parameter = with_sum(torch.nn.Parameter(weight))
    logprobs, dtypes = saved_by(
        lambda: liger.fused_linear_logprobs(
            x.nan_to_num(), parameter, target, recompute=False, accumulate_grad_weight=True
        )
    )
    assert not dtypes
    logprobs.sum().backward()
    assert parameter.main_grad.any()


def test_the_engine_takes_weights_of_the_dtype_of_hidden(engine):  # noqa: F811
    x, narrow, wide = OnGpu(1024, 512), OnGpu(1024, 512), OnGpu(1024, 512, dtype=torch.float32)
    assert kept_logits.choose(x, narrow, None, None, None, None) == "exponentials"
    assert kept_logits.choose(x, wide, None, None, None, None) == "nothing"
    assert kept_logits.choose(x, wide, None, None, None, False) == "logits"


def test_logits_that_were_kept_in_another_dtype():
    x, weight, target, bias = make("cpu", (torch.bfloat16,) * 2, bias=True)
    tensors = x, weight, target, bias, 0.7, -100, None
    forward, backward = (
        getattr(torch.ops.liger, f"fused_linear_logprobs_{name}") for name in ("forward", "backward")
    )
    *_, kept, rows = forward(*tensors, None, False, False, keep="logits", need_grad_weight=True)
    arguments = torch.ones(ROWS), None, *tensors, None, None, True, True, True, "logits"
    assert backward(*arguments, kept, rows)[0].isfinite().all()
    with pytest.raises(
        RuntimeError,
        match="kept has dtype bfloat16, expected float32 for keep='logits' and logits_dtype float32",
    ):
        backward(*arguments, kept, rows, logits_dtype=torch.float32)
