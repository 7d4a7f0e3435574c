# SPDX-License-Identifier: BSD-3-Clause
"""fused_linear_ce against float64, in every backend that runs here."""

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch, check_op, error
from cross_entropy_reference import (
    ALL_METRICS,
    LARGEST_LSE,
    METRICS,
    OPTIONS,
    check_layer,
    leaves,
    options,
    random_layer,
    reference,
    rows_per_chunk,
    shared_denominator,
)
from torch.nn.functional import linear

import liger
from liger._core.runtime.environment import triton_interpreted

REDUCTIONS = ["mean", "sum", "none"]
# rows, hidden, vocab. Odd sizes have rows that are not aligned to 16 bytes; 300 rows are more than there are
# SMs; 32003 classes are more than one block of the cross entropy holds in float32.
SHAPES = [(1, 8, 7), (5, 33, 129), (17, 64, 1000)]
# Triton's interpreter takes a minute for one of the large ones.
SHAPES += [(40, 16, 64), (3, 40, 4099)] if triton_interpreted() else [(300, 16, 64), (3, 40, 32003)]


# --- values and gradients -----------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("chunk", [4, 13])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(device, name, reduction, chunk):
    chosen = options(name, 13, 129, device, reduction)
    *tensors, target = random_layer(13, 24, 129, device, ignore_index=chosen.get("ignore_index", -100))
    check_layer(tensors, target, memory_budget=rows_per_chunk(chunk, tensors[1]), **chosen)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(device, shape, dtype, name):
    rows, hidden, vocab = shape
    chosen = options(name, rows, vocab, device)
    x, weight, bias, target = random_layer(
        rows, hidden, vocab, device, dtype, chosen.get("ignore_index", -100)
    )
    # The products keep the shapes of plain torch where their sums are long: another order of summing is no
    # error.
    chunk = rows // 2 if rows > 3 else rows
    check_layer([x, weight], target, memory_budget=rows_per_chunk(chunk, weight), **chosen)
    check_layer([x, weight, bias], target, **chosen)


@pytest.mark.parametrize("accum_dtype", [None, torch.float32, "input"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunk_plans_agree(device, dtype, accum_dtype):
    """One row per chunk, a ragged last chunk, and one chunk for all, against the same exact result."""
    x, weight, bias, target = random_layer(13, 8, 200, device, dtype)
    accum_dtype = dtype if accum_dtype == "input" else accum_dtype
    for rows in (1, 5, 12, 13):
        budget = rows_per_chunk(rows, weight)
        if accum_dtype == dtype and dtype != torch.float32:
            # A sum in the dtype of the input loses digits with every chunk: only its first digits are
            # compared.
            grads = []
            for b in (budget, None):
                copies = leaves(x, weight, bias)
                loss = liger.fused_linear_ce(
                    copies[0], copies[1], target, copies[2], accum_dtype=accum_dtype, memory_budget=b
                )
                grads.append(torch.autograd.grad(loss, copies))
            for chunked, whole in zip(*grads, strict=True):
                assert error(chunked, whole) < 13 * torch.finfo(dtype).eps
        else:
            check_layer([x, weight, bias], target, accum_dtype, budget)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_float32_accumulation_is_as_exact_as_one_product(device, dtype):
    """Many chunks summed in float32 lose nothing against one chunk; summed in the dtype of the input they
    do."""
    rows, hidden, vocab = 256, 4, 96
    x, weight, _, target = random_layer(rows, hidden, vocab, device, dtype)
    x = x.abs()  # without cancellation a low-precision sum loses more with every chunk
    exact_leaves = leaves(x.double(), weight.double())
    exact = torch.autograd.grad(reference(linear(*exact_leaves), target)["loss"], exact_leaves)[1]

    def weight_error(accum_dtype, chunk):
        copies = leaves(x, weight)
        loss = liger.fused_linear_ce(
            *copies, target, accum_dtype=accum_dtype, memory_budget=rows_per_chunk(chunk, weight)
        )
        return error(torch.autograd.grad(loss, copies)[1], exact)

    one_chunk = weight_error(None, rows)
    for accum_dtype in (None, torch.float32):
        assert weight_error(accum_dtype, 1) <= 1.25 * one_chunk
    assert weight_error(dtype, 1) > 2 * one_chunk


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_weighted_mean_equals_torch_cross_entropy_loss(device, reduction):
    x, weight, bias, target = random_layer(48, 20, 97, device)
    ce_weight = torch.rand(97, device=device) + 0.1
    denominator = shared_denominator(target, ce_weight) if reduction == "mean" else None

    def whole(x, w, b):
        return liger.fused_linear_ce(x, w, target, b, ce_weight=ce_weight, reduction=reduction)

    def micro_batches(x, w, b):
        losses = [
            liger.fused_linear_ce(
                part, w, y, b, ce_weight=ce_weight, denominator=denominator, reduction=reduction
            )
            for part, y in zip(x.split([7, 1, 40]), target.split([7, 1, 40]), strict=True)
        ]
        return torch.cat(losses) if reduction == "none" else sum(losses)

    def theirs(x, w, b):
        logits = linear(x, w, b)
        if x.dtype == torch.float64:
            return torch.nn.CrossEntropyLoss(weight=ce_weight.double(), reduction=reduction)(logits, target)
        return reference(logits, target, ce_weight=ce_weight, reduction=reduction)["loss"]

    check_op(whole, theirs, [x, weight, bias], LARGEST_LSE)
    check_op(micro_batches, theirs, [x, weight, bias], LARGEST_LSE)


def test_accumulated_gradients_equal_the_whole_batch(device):
    x, weight, bias, target = random_layer(24, 16, 65, device)
    count = (target != -100).sum()
    whole, parts = leaves(weight, bias), leaves(weight, bias)
    liger.fused_linear_ce(x, whole[0], target, whole[1]).backward()
    for rows, y in zip(x.split(6), target.split(6), strict=True):
        liger.fused_linear_ce(rows, parts[0], y, parts[1], denominator=count).backward()
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


# --- metrics ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "all", "all and denominator"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chunk", [4, 23])
def test_metrics(device, name, reduction, chunk):
    chosen = options(name, 23, 300, device, reduction)
    x, weight, bias, target = random_layer(23, 16, 300, device, ignore_index=chosen.get("ignore_index", -100))
    exact_logits = linear(*(t.double() for t in (x, weight, bias)))
    target[::5] = exact_logits[::5].argmax(-1)
    output = liger.fused_linear_ce(
        x, weight, target, bias, memory_budget=rows_per_chunk(chunk, weight), **chosen, **ALL_METRICS
    )
    plain, exact = (
        reference(linear(x, weight, bias), target, **chosen),
        reference(exact_logits, target, **chosen),
    )
    assert torch.equal(output.argmax, exact["argmax"])
    for metric in ("loss", "z_loss", "token_accuracy", "logprobs", "entropy"):
        assert_as_exact_as_torch(getattr(output, metric), plain[metric], exact[metric], metric, LARGEST_LSE)


@pytest.mark.parametrize("metric", METRICS)
def test_one_metric_alone(device, metric):
    x, weight, bias, target = random_layer(11, 16, 77, device)
    everything = liger.fused_linear_ce(x, weight, target, bias, lse_square_scale=0.01, **ALL_METRICS)
    alone = liger.fused_linear_ce(x, weight, target, bias, lse_square_scale=0.01, metrics=(metric,))
    for field in liger.CrossEntropyOutput._fields:
        if field in ("loss", metric):
            assert torch.equal(getattr(alone, field), getattr(everything, field))
        else:
            assert getattr(alone, field) is None


def test_dtypes_of_results(device):
    for dtype in DTYPES:
        x, weight, bias, target = random_layer(4, 8, 9, device, dtype)
        for field, value in liger.fused_linear_ce(x, weight, target, bias, **ALL_METRICS)._asdict().items():
            assert value.dtype == (torch.int64 if field == "argmax" else torch.float32), field


# --- size ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_more_than_two_to_the_31_logits_in_one_chunk(device, reduction):
    rows, hidden, vocab, last = 17000, 64, 128256, 5
    budget = 2 * rows * vocab
    assert rows * vocab > 1 << 31
    if torch.cuda.mem_get_info()[0] < 4 * budget:
        pytest.skip("needs 18 GB of free GPU memory")
    x, weight, _, target = random_layer(rows, hidden, vocab, device, torch.bfloat16)
    target[-last:] = torch.arange(last, device=device)
    whole, tail = leaves(x, weight), leaves(x[-last:], weight)
    denominator = torch.tensor(float(last), device=device) if reduction == "mean" else None
    outputs = [
        liger.fused_linear_ce(
            *tensors,
            y,
            memory_budget=budget,
            reduction=reduction,
            denominator=denominator,
            metrics=("logprobs",),
        )
        for tensors, y in ((whole, target), (tail, target[-last:]))
    ]
    for output in outputs:
        output.loss.sum().backward()
    torch.testing.assert_close(outputs[0].logprobs[-last:], outputs[1].logprobs, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(whole[0].grad[-last:], tail[0].grad, rtol=5e-2, atol=1e-3)


@pytest.mark.parametrize("divisor", ["mean", "denominator", "denominator of a sum"])
def test_a_loss_scale_keeps_the_bits_of_float16(device, divisor):
    """A mean over many rows has gradients below 2^-14; a loss scale makes them normal numbers with 11 bits
    again."""
    rows, hidden, vocab, loss_scale = 2048, 16, 24, 4096.0
    x, weight = torch.randn(rows, hidden, device=device), 2e-3 * torch.randn(vocab, hidden, device=device)
    target = torch.randint(vocab, (rows,), device=device)
    target[::3] = -100
    options = {"mean": {}, "denominator": {"denominator": 1500}}.get(
        divisor, {"denominator": torch.tensor(1500.0, device=device), "reduction": "sum"}
    )
    leaves = [t.half().requires_grad_() for t in (x, weight)]
    loss = liger.fused_linear_ce(*leaves, target, **options, metrics=("z_loss",), lse_square_scale=1e-3)
    grads = torch.autograd.grad(loss.loss * loss_scale, leaves)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    logits = linear(*wide)
    live = target != -100
    count = live.sum() if divisor == "mean" else 1500
    z_loss = 1e-3 * logits.logsumexp(-1)[live].square().sum() / count
    exact = torch.nn.functional.cross_entropy(logits, target, reduction="sum") / count + z_loss
    torch.testing.assert_close(loss.loss.double(), exact.detach(), rtol=1e-3, atol=0)
    torch.testing.assert_close(loss.z_loss.double(), z_loss.detach(), rtol=1e-3, atol=0)
    for grad, wanted in zip(grads, torch.autograd.grad(exact * loss_scale, wide), strict=True):
        assert (grad.double() - wanted).norm() < 2e-3 * wanted.norm()
