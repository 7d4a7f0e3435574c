# SPDX-License-Identifier: BSD-3-Clause
"""Float16 log-probabilities on compute capability 9.0: metrics, the exponentials that they keep, memory,
graphs."""

import math

import pytest
import torch
from cases import strided_like
from cuda_graphs import capture
from float16_rule import sampled
from logprobs_sm90 import ENTROPY, KEPT, run, upstream
from sm90_engine import BESIDE, FLOAT16, MIB, SHAPES, SUMS, Shape
from test_logprob_metrics_sm90 import METRICS, assert_exact
from test_logprob_metrics_sm90 import run as run_metrics
from test_logprobs_float16_sm90 import KINDS, layer
from torch.nn.functional import linear

import liger

pytestmark = pytest.mark.gpu

# --- metrics ------------------------------------------------------------------------------------------------


@KEPT
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", SHAPES)
def test_metrics(sm90, calls, name, temperature, recompute):
    shape = SHAPES[name]
    made = layer(shape, sm90)
    made[0][made[2] == -100] = math.nan
    out, _ = run_metrics(shape, *made, temperature, recompute=recompute, metrics=METRICS)
    assert_exact(out, *made, temperature)
    assert calls[0] == ("forward", not recompute)


@KEPT
@pytest.mark.parametrize("gap", [30.0, 60.0, 300.0])
@pytest.mark.parametrize("shape", [BESIDE, SUMS], ids=["one chunk", "sums"])
def test_metrics_of_targets_far_below_the_largest_logit(sm90, shape, gap, recompute):
    x, weight, target = layer(shape, sm90)
    logits = linear(x.float(), weight.float())
    rows = torch.arange(0, shape.rows, 3, device=sm90)
    target[rows] = logits[rows].argmin(-1)
    x[rows] *= gap / (logits.amax(-1) - logits.amin(-1))[rows].min().item()
    out, _ = run_metrics(shape, x, weight, target, recompute=recompute, metrics=METRICS)
    assert_exact(out, x, weight, target, 1.0)
    assert out.log_sum_sq_probs.isfinite().all()


@KEPT
def test_a_sum_of_squares_beyond_float32(sm90, recompute):
    """One exponential of 2^59.5 in each of 600 tiles, of no class that is a sample: no tile is computed
    again, and the sum of squares is 2^128.2."""
    shape = Shape(256, 64, 600 * 256)
    x, weight, target = layer(shape, sm90, ignored=0.0)
    x.zero_()
    x[:, 0] = 41.25
    weight.zero_()
    weight[::256, 0] = 1.0
    weight[sampled(shape.vocab), 0] = 0.0
    target.fill_(1)
    out, _ = run_metrics(shape, x, weight, target, recompute=recompute, metrics=METRICS)
    assert_exact(out, x, weight, target, 1.0)


# --- kept exponentials, memory, graphs ----------------------------------------------------------------------


@ENTROPY
@KINDS
def test_the_backward_can_run_again(sm90, shape, entropy):
    """It does not change what the forward has kept."""
    x, weight, target = layer(shape, sm90, scale=2.0)
    leaves = x.requires_grad_(), weight.requires_grad_()
    found = liger.fused_linear_logprobs(
        *leaves, target, temperature=0.7, memory_budget=shape.budget, metrics=("entropy",), recompute=False
    )
    both = upstream(shape, sm90, True)
    asked = both if entropy else both[:1]

    def gradients(grads):
        return torch.autograd.grad(found[: len(grads)], leaves, grads, retain_graph=True)

    first = gradients(asked)
    gradients(both[:1] if entropy else both)
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(asked), strict=True))


@ENTROPY
def test_memory(sm90, entropy):
    """Exponentials of 500 MiB between forward and backward, and 1.3 MiB of shifts during each."""
    rows, hidden, vocab = 4096, 2048, 64000
    leaves = [torch.randn(n, hidden, device=sm90).to(FLOAT16).requires_grad_() for n in (rows, vocab)]
    with torch.no_grad():
        leaves[1] *= hidden**-0.5
    target = torch.randint(vocab, (rows,), device=sm90)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = liger.fused_linear_logprobs(*leaves, target, metrics=("entropy", "argmax") if entropy else ())
    assert 500 < (torch.cuda.memory_allocated() - before) / MIB <= 501
    assert (torch.cuda.max_memory_allocated() - before) / MIB <= 500 + 16 + 15
    torch.cuda.reset_peak_memory_stats()
    results = found[:2] if entropy else (found,)
    torch.autograd.backward(results, [torch.ones_like(r) for r in results])
    assert (torch.cuda.max_memory_allocated() - before) / MIB <= 500 + 266 + (512 + 34 if entropy else 18)


@KEPT
@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["as they are", "shifted"])
@KINDS
def test_the_same_bits_for_any_memory_and_strides(sm90, shape, scale, recompute):
    x, weight, target = layer(shape, sm90, scale=scale)
    grads = upstream(shape, sm90, True)
    results = []
    for fill in (0.0, torch.nan, None):
        if fill is not None:
            garbage = torch.full((32 << 20,), fill, device=sm90)
            del garbage
        tensors = (x, weight, target) if fill is not None else map(strided_like, (x, weight, target))
        found, actual = run(shape, *tensors, grads, temperature=0.7, recompute=recompute)
        results.append((found.logprobs, found.entropy, found.argmax, *actual))
    for first, *others in zip(*results, strict=True):
        assert all(torch.equal(first, other) for other in others)


@KEPT
@ENTROPY
@KINDS
def test_a_graph_fits_other_inputs(sm90, shape, entropy, recompute):
    static, grads = layer(shape, sm90, ignored=0.5), upstream(shape, sm90, entropy)
    arguments = {"temperature": 0.7, "recompute": recompute}
    graph, (_, captured) = capture(lambda: run(shape, *static, grads, **arguments))
    for ignored, scale in ((0.5, 1.0), (0.0, 4.0), (0.99, 0.5), (0.2, 30.0)):
        for tensor, value in zip(static, layer(shape, sm90, ignored, scale), strict=True):
            tensor.copy_(value)
        graph.replay()
        _, expected = run(shape, *static, grads, **arguments)
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
