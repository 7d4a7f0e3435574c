# SPDX-License-Identifier: BSD-3-Clause
"""fused_linear_logprobs at the sizes of the engine of compute capability 9.0, with logits_dtype and
accumulate_grad_weight: which calls it takes, and the exponentials that it keeps."""

import pytest
import torch
from logprobs_sm90 import ENTROPY, KEPT, WITH_ENTROPY, assert_gradients, check, exact, run, upstream
from sm90_engine import BESIDE, GRADIENT, KINDS, ROWS, SUMS

import liger

pytestmark = pytest.mark.gpu

FLOAT32 = torch.float32


@KEPT
@ENTROPY
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@KINDS
def test_float32_logits(sm90, calls, shape, temperature, entropy, recompute):
    """The engine does not take the call: its sums have a larger error than the option allows."""
    check(
        shape, *shape.layer(sm90), entropy, temperature=temperature, recompute=recompute, logits_dtype=FLOAT32
    )
    assert calls == []


@KEPT
@ENTROPY
def test_float32_weight(sm90, calls, entropy, recompute):
    """The engine does not take it: float32 logits are kept or computed again."""
    x, weight, target = BESIDE.layer(sm90)
    grads = upstream(BESIDE, sm90, entropy)
    found, (grad_x, grad_weight) = run(
        BESIDE, x, weight.float(), target, grads, temperature=0.7, recompute=recompute, logits_dtype=FLOAT32
    )
    logprobs, (best_x, best_weight) = exact(x, weight.float(), target, grads, temperature=0.7)
    assert (found.logprobs - logprobs).abs().max() <= ROWS * logprobs.abs().max()
    assert grad_weight.dtype == torch.float32
    assert ((grad_weight - best_weight).norm() / best_weight.norm()).item() < 2e-5
    assert ((grad_x - best_x).norm() / best_x.norm()).item() < 2**-8
    assert calls == []


@KEPT
@ENTROPY
@pytest.mark.parametrize("logits_dtype", [None, FLOAT32], ids=["", "float32"])
@pytest.mark.parametrize("shape", [BESIDE, SUMS], ids=["one chunk", "sums"])
def test_accumulated_weight_gradient(sm90, calls, shape, logits_dtype, entropy, recompute):
    """Kept exponentials serve the gradient of the hidden states; the gradient of the weight computes the
    logits again. With float32 logits there are no exponentials."""
    x, weight, target = shape.layer(sm90)
    grads = upstream(shape, sm90, entropy)
    _, (best_x, best_weight) = exact(x, weight, target, grads, temperature=0.7)
    x, parameter = x.requires_grad_(), torch.nn.Parameter(weight)
    parameter.main_grad = torch.zeros(weight.shape, device=sm90)
    found = liger.fused_linear_logprobs(
        x, parameter, target, temperature=0.7, memory_budget=shape.budget, metrics=("entropy", "argmax"),
        recompute=recompute, logits_dtype=logits_dtype, accumulate_grad_weight=True,
    )  # fmt: skip
    torch.autograd.backward(found[: len(grads)], grads)
    assert parameter.grad is None
    assert calls == ([] if logits_dtype else [("forward", not recompute), ("backward", not recompute)])
    tolerance = WITH_ENTROPY if entropy else GRADIENT
    assert_gradients([x.grad], [best_x], target == -100, (True, False), tolerance)
    error = ((parameter.main_grad - best_weight).norm() / best_weight.norm()).item()
    # Rounded logits of a standard deviation of 3 change probabilities by 1 %.
    assert error < (WITH_ENTROPY if logits_dtype else 3e-2)
