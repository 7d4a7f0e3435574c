# SPDX-License-Identifier: BSD-3-Clause
"""fused_linear_logprobs in float16 on the engine of compute capability 9.0, with kept exponentials and
without: range rules and gradients of entropies, against float64; memory and graphs."""

import pytest
import torch
from cases import strided_like
from cuda_graphs import capture
from float16_rule import LARGEST_SUM_EXPONENT, MAX_ROW_SUM, references, row_sums, sampled
from logprobs_sm90 import ENTROPY, KEPT, check, exact, run, tolerance_of, upstream
from sm90_engine import BESIDE, BFLOAT16, FLOAT16, MIB, PARTIAL_SUMS, ROWS, SUMS
from torch.nn.functional import linear

import liger

pytestmark = pytest.mark.gpu

KINDS = pytest.mark.parametrize(
    "shape", [BESIDE, SUMS, PARTIAL_SUMS], ids=["one chunk", "sums", "partial tiles"]
)


def layer(shape, device, ignored=0.25, scale=1.0):
    return shape.layer(device, ignored, scale, dtype=FLOAT16)


def assert_close(actual, expected, entropy, factor=1.0):
    for name, a, b in zip(("hidden", "weight"), actual, expected, strict=True):
        assert a.dtype == FLOAT16 and a.isfinite().all(), name
        error, most = ((a.double() - b).norm() / b.norm()).item(), factor * tolerance_of(b, FLOAT16, entropy)
        assert error <= most, f"gradient of {name}: error {error:.3g}, allowed {most:.3g}"


# --- the range of exponentials ------------------------------------------------------------------------------


@KEPT
@ENTROPY
@pytest.mark.parametrize("scale, least, most", [(1.0, 0.0, 0.0), (2.0, 0.05, 0.5), (4.0, 0.5, 1.0)])
@KINDS
def test_the_smallest_logit_as_target(sm90, shape, scale, least, most, entropy, recompute):
    """In none, some and most rows a tile has a sum that is shifted down."""
    x, weight, _ = layer(shape, sm90, scale=scale)
    logits = linear(x.double(), weight.double())
    target = logits.argmin(-1)
    _, totals = row_sums(logits, references(logits, target))
    shifted = (totals >= 2.0**LARGEST_SUM_EXPONENT).any(1).float().mean()
    assert least <= shifted <= most
    check(shape, x, weight, target, entropy, recompute=recompute)


@KEPT
@ENTROPY
@pytest.mark.parametrize("share", [0.01, 1.0])
@KINDS
def test_sums_beyond_2_to_the_60_are_recomputed(sm90, shape, share, entropy, recompute):
    x, weight, target = layer(shape, sm90, ignored=0.1)
    x[: round(share * shape.rows)] *= 60
    logits = linear(x.double(), weight.double())
    _, totals = row_sums(logits, references(logits, target.clamp_min(0)))
    assert (totals > MAX_ROW_SUM).any() and (share == 1 or (totals < 1e6).all(1).any())
    grads = upstream(shape, sm90, entropy)
    found, actual = run(shape, x, weight, target, grads, recompute=recompute)
    logprobs, expected = exact(x, weight, target, grads)
    assert (found.logprobs - logprobs).abs().max() <= ROWS * logprobs.abs().max()
    # Logits of 60 times the size have 60 times the error, and a softmax that is nearly 0 or 1 a small
    # entropy.
    assert_close(actual, expected, entropy, 4.0 if entropy else 1.0)


@KEPT
@ENTROPY
def test_rows_that_are_shifted_for_their_one_hot_term(sm90, entropy, recompute):
    """No tile has a large sum, but the row has: minus that is the element of the target."""
    shape = BESIDE
    x, weight, target = layer(shape, sm90, scale=0.25)
    target[target >= 0] = 3
    x[:, 0], weight[:, 0] = 4.0, 0.75
    weight[sampled(shape.vocab), 0] = weight[3, 0] = 0.0
    logits = linear(x.double(), weight.double())
    e, totals = row_sums(logits, references(logits, torch.full_like(target, 3)))
    assert (totals < 2.0**LARGEST_SUM_EXPONENT).all()
    assert (e.sum(1) >= 2.0**LARGEST_SUM_EXPONENT).float().mean() > 0.5
    check(shape, x, weight, target, entropy, recompute=recompute)


@KEPT
@pytest.mark.parametrize("which", ["logprobs", "both", "entropies"])
@pytest.mark.parametrize("nats", [2.0, 5.0, 7.0])
@KINDS
def test_confident_rows(sm90, shape, nats, which, recompute):
    """Probabilities up to 0.999: the gradient of the target's logit is a small difference."""
    x, weight, target = layer(shape, sm90, ignored=0.0, scale=0.5)
    rows = weight[target].float()
    logits = linear(x.float(), weight.float())
    away = logits.logsumexp(-1) - logits.gather(1, target[:, None]).squeeze(1)
    x = (x.float() + ((away + nats) / rows.square().sum(1))[:, None] * rows).to(FLOAT16)
    probability = linear(x.double(), weight.double()).softmax(-1).gather(1, target[:, None])
    assert 0.6 < probability.median() < 0.9995
    grads = upstream(shape, sm90, which != "logprobs")
    if which == "entropies":
        grads[0].zero_()
    found, actual = run(shape, x, weight, target, grads, recompute=recompute)
    logprobs, expected = exact(x, weight, target, grads)
    # Logits are sums of products in float32, so log-probabilities near 0 and the gradient have an absolute
    # error.
    assert (found.logprobs.double() - logprobs).abs().max() < 5e-5
    for name, a, b in zip(("hidden", "weight"), actual, expected, strict=True):
        error = ((a.double() - b).norm() / b.norm()).item()
        most = tolerance_of(b, FLOAT16, which != "logprobs") + 4e-5 / (1 - probability.median().item())
        assert error <= most, f"gradient of {name}: error {error:.3g}, allowed {most:.3g}"


# --- the range of scales and gradients ----------------------------------------------------------------------


@KEPT
@ENTROPY
@pytest.mark.parametrize("factor", [1.0, 65536.0, 0.03])
@KINDS
def test_loss_scales(sm90, shape, factor, entropy, recompute):
    """An upstream gradient as a loss scale makes it, divided by the number of rows."""
    x, weight, target = layer(shape, sm90)
    grads = [g * factor / shape.rows for g in upstream(shape, sm90, entropy)]
    _, actual = run(shape, x, weight, target, grads, temperature=0.7, recompute=recompute)
    _, expected = exact(x, weight, target, grads, temperature=0.7)
    assert_close(actual, expected, entropy)


@KEPT
@pytest.mark.parametrize("name", ["logprobs", "entropies"])
@KINDS
def test_entropies_of_another_size(sm90, shape, name, recompute):
    """One of the two gradients is 10^-3 of the other, so the power of two of a row follows from the larger
    one."""
    x, weight, target = layer(shape, sm90)
    grads = upstream(shape, sm90, True)
    grads[name == "entropies"] *= 1e-3
    _, actual = run(shape, x, weight, target, grads, temperature=0.7, recompute=recompute)
    _, expected = exact(x, weight, target, grads, temperature=0.7)
    assert_close(actual, expected, True)


@KEPT
@ENTROPY
@KINDS
def test_rows_of_very_different_weights(sm90, shape, entropy, recompute):
    """Gradients of rows are as exact as others where their scales differ by 10^9; ignored rows may be
    infinite."""
    x, weight, target = layer(shape, sm90)
    of_rows = 10 ** (9 * torch.rand(shape.rows, device=sm90) - 6)
    grads = [g.sign() * of_rows for g in upstream(shape, sm90, entropy)]
    dirty = x.clone()
    dirty[target == -100] = torch.inf
    _, actual = run(shape, dirty, weight, target, grads, temperature=0.7, recompute=recompute)
    _, expected = exact(x, weight, target, grads, temperature=0.7)
    live = target != -100
    mine, wanted = actual[0].double()[live], expected[0][live]
    rounded = (wanted.to(FLOAT16).double() - wanted).norm(dim=1)
    most = (2e-3 if entropy else 8e-4) * wanted.norm(dim=1)
    assert ((mine - wanted).norm(dim=1) <= rounded + most).all()
    assert not actual[0][~live].any()
    error = (actual[1].double() - expected[1]).norm() / expected[1].norm()
    assert error <= tolerance_of(expected[1], FLOAT16, entropy)


@KEPT
@ENTROPY
@KINDS
def test_gradients_beyond_float16_are_infinite(sm90, shape, entropy, recompute):
    """A loss scale that is too large: infinities where the exact gradient is beyond 65504, and no NaN."""
    x, weight, target = layer(shape, sm90, ignored=0.5)
    grads = [torch.full((shape.rows,), 1e6, device=sm90) for _ in range(1 + entropy)]
    _, actual = run(shape, x, weight, target, grads, recompute=recompute)
    _, expected = exact(x, weight, target, grads)
    for a, b in zip(actual, expected, strict=True):
        assert not a.isnan().any() and a.isinf().any() and a.isfinite().any()
        margin = 3e-3 * b.abs().max().item()
        assert a[b.abs() > 65520 + margin].isinf().all()
        assert a[b.abs() < 65504 - margin].isfinite().all()
        assert (a.sign() == b.sign())[a.isinf()].all()
    assert not actual[0][target == -100].any()


@KEPT
@ENTROPY
@KINDS
def test_no_upstream_gradient(sm90, shape, entropy, recompute):
    x, weight, target = layer(shape, sm90)
    grads = [g.zero_() for g in upstream(shape, sm90, entropy)]
    _, actual = run(shape, x, weight, target, grads, temperature=0.7, recompute=recompute)
    assert not any(a.any() for a in actual)


# --- memory, graphs -----------------------------------------------------------------------------------------


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


# --- the engine ---------------------------------------------------------------------------------------------


@KEPT
@ENTROPY
@KINDS
def test_an_error_several_times_smaller_than_with_bfloat16(sm90, shape, entropy, recompute):
    x, weight, target = layer(shape, sm90)
    grads = upstream(shape, sm90, entropy)
    errors = []
    for dtype in (FLOAT16, BFLOAT16):
        tensors = x.to(dtype), weight.to(dtype), target
        _, actual = run(shape, *tensors, grads, temperature=0.7, recompute=recompute)
        _, expected = exact(*tensors, grads, temperature=0.7)
        errors.append(
            [((a.double() - b).norm() / b.norm()).item() for a, b in zip(actual, expected, strict=True)]
        )
    assert all(ours < theirs / 3 for ours, theirs in zip(*errors, strict=True))


def test_dtypes_must_agree(sm90):
    """The engine does not take a weight of another dtype: the op reports it."""
    x, weight, target = layer(BESIDE, sm90)
    with pytest.raises(RuntimeError, match="dtype"):
        liger.fused_linear_logprobs(x, weight.to(BFLOAT16), target)
