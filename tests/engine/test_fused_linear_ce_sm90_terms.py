# SPDX-License-Identifier: BSD-3-Clause
"""Bias, softcap and label smoothing on the wgmma engine: against float64, and against the generic engine."""

import pytest
import torch
from cases import strided_like
from cross_entropy_reference import options, reference
from sm90_engine import (
    BESIDE,
    BFLOAT16,
    OBSERVED,
    PARTIAL_SUMS,
    PARTS_OF_CHUNKS,
    ROWS,
    SHAPES,
    SUMS,
    SUMS_BF16,
    TERMS,
    assert_close_to_exact,
    assert_same_bits,
    check,
    chosen_terms,
    engine,
    exact,
    run,
    uses_the_engine,
)
from torch.nn.functional import linear

import liger

pytestmark = pytest.mark.gpu

ALL_SHAPES = {
    "one chunk": BESIDE,
    "sums": SUMS,
    "bf16 allowed": SUMS_BF16,
    "parts of chunks": PARTS_OF_CHUNKS,
    "partial": PARTIAL_SUMS,
    "sums, 192 columns": SHAPES["sums, 192 columns"],
    "sums, 320 columns": SHAPES["sums, 320 columns"],
    **{name: SHAPES[name] for name in SHAPES if name.startswith(("in the weight", "partial, ", "hidden "))},
}


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_values_and_gradients(sm90, shape, name):
    shape = ALL_SHAPES[shape]
    check(shape, *shape.layer(sm90), **chosen_terms(name, shape, sm90))


@pytest.mark.parametrize("name", TERMS)
def test_losses_per_row(sm90, name):
    check(BESIDE, *BESIDE.layer(sm90), reduction="none", **chosen_terms(name, BESIDE, sm90))


@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("name", TERMS)
def test_gradients_that_are_not_needed(sm90, name, trained):
    check(SUMS, *SUMS.layer(sm90), trained=trained, **chosen_terms(name, SUMS, sm90))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [BESIDE, SUMS, PARTIAL_SUMS], ids=["one chunk", "sums", "partial"])
def test_the_bias_alone_is_trained(sm90, shape, smoothing):
    x, weight, target = shape.layer(sm90)
    bias = torch.randn(shape.vocab, device=sm90).to(BFLOAT16)
    results = {}
    for dtype, function in ((BFLOAT16, liger.fused_linear_ce), (torch.float64, None)):
        leaf = bias.to(dtype).requires_grad_()
        if function is None:
            logits = linear(x.double(), weight.double(), leaf)
            loss = reference(logits, target, label_smoothing=smoothing)["loss"]
        else:
            loss = function(x, weight, target, leaf, label_smoothing=smoothing, memory_budget=shape.budget)
        results[dtype] = torch.autograd.grad(loss, leaf)[0].double()
    error = (results[BFLOAT16] - results[torch.float64]).norm() / results[torch.float64].norm()
    assert error < 3e-3


@pytest.mark.parametrize("ignored", [0.25, 0.0])
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["no softcap", "softcap"])
@pytest.mark.parametrize("shape", [SUMS, PARTIAL_SUMS], ids=["sums", "partial"])
def test_large_logits(sm90, shape, softcap, ignored):
    """Tiles whose sums overflow are recomputed: hidden states times 30, biases of 200 and -300."""
    x, weight, target = shape.layer(sm90, ignored, scale=30.0)
    bias = torch.randn(shape.vocab, device=sm90).to(BFLOAT16)
    bias[7], bias[11] = 200.0, -300.0
    chosen = {} if softcap is None else {"softcap": softcap}
    # The one-hot terms of further rows of a class are rounded with their exponentials, and most of the
    # gradient of this bias is one-hot terms.
    check(shape, x, weight, target, bias=bias, loss_tolerance=1e-5, tolerance=4e-3, **chosen)


def test_a_class_is_excluded_by_its_bias(sm90):
    x, weight, target = BESIDE.layer(sm90)
    excluded = torch.tensor([5, BESIDE.vocab - 1], device=sm90)
    target[torch.isin(target, excluded)] = 0
    bias = torch.randn(BESIDE.vocab, device=sm90).to(BFLOAT16)
    bias[excluded] = -torch.inf
    output, grads = run(BESIDE, x, weight, target, bias=bias, **OBSERVED)
    values, exact_grads = exact(x, weight, target, bias=bias)
    assert_close_to_exact(output.loss, values["loss"].detach(), 2e-6, "loss")
    assert output.entropy.isfinite().all() and not torch.isin(output.argmax, excluded).any()
    for actual, expected in zip(grads, exact_grads, strict=True):
        assert (actual.double() - expected).norm() / expected.norm() < 3e-3
    assert not grads[1][excluded].any() and not grads[2][excluded].any()


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("shape", [BESIDE, PARTIAL_SUMS], ids=["one chunk", "partial"])
def test_metrics(sm90, shape, name):
    x, weight, target = shape.layer(sm90)
    chosen = chosen_terms(name, shape, sm90)
    output, _ = run(shape, x, weight, target, **chosen, **OBSERVED)
    values, _ = exact(x, weight, target, **chosen)
    live = target != -100
    largest = linear(x.double(), weight.double()).abs().max()
    assert (output.entropy.double() - values["entropy"]).abs().max() <= ROWS * largest
    logits = linear(x.double(), weight.double(), chosen["bias"].double() if "bias" in chosen else None)
    predicted = output.argmax
    assert (predicted[~live] == -1).all()
    below = logits.max(-1).values - logits.gather(1, predicted.clamp_min(0).unsqueeze(1)).squeeze(1)
    assert (below[live] <= ROWS * largest).all()


@pytest.mark.parametrize("name", TERMS)
def test_equal_bits_at_each_call_of_the_engine(sm90, name):
    x, weight, target = SUMS.layer(sm90)
    chosen = chosen_terms(name, SUMS, sm90)
    assert_same_bits([run(SUMS, x, weight, target, **chosen) for _ in range(2)])
    assert uses_the_engine(lambda: run(SUMS, x, weight, target, **chosen))


def test_strided_bias_and_no_valid_row(sm90):
    x, weight, target = SUMS.layer(sm90)
    bias = torch.randn(SUMS.vocab, device=sm90).to(BFLOAT16)
    assert_same_bits([run(SUMS, x, weight, target, bias=b) for b in (bias, strided_like(bias))])
    _, grads = run(SUMS, x, weight, torch.full_like(target, -100), bias=bias, reduction="sum")
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("name", ["all", "full smoothing"])
def test_what_is_of_the_generic_engine(sm90, name):
    chosen = options(name, BESIDE.rows, BESIDE.vocab, sm90)
    x, weight, target = BESIDE.layer(sm90)
    target[target == -100] = chosen.get("ignore_index", -100)
    runs = [run(BESIDE, x, weight, target, generic=generic, **chosen) for generic in (False, True)]
    assert_same_bits(runs)


def test_bad_value_of_the_variable(sm90, monkeypatch):
    x, weight, target = BESIDE.layer(sm90)
    with engine(generic=True):
        assert liger.fused_linear_ce(x, weight, target).isfinite()
    monkeypatch.setenv("LIGER_WGMMA", "yes")
    with pytest.raises(RuntimeError, match="LIGER_WGMMA: expected 0 or 1, got 'yes'"):
        liger.fused_linear_ce(x, weight, target)
