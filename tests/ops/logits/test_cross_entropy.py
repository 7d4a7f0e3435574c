# SPDX-License-Identifier: BSD-3-Clause
"""cross_entropy against float64, in every backend that runs here."""

import math

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch, check_op, of_cuda, padded, strided_like
from cross_entropy_reference import (
    ALL_METRICS,
    LARGEST_LSE,
    METRICS,
    OPTIONS,
    options,
    random_logits,
    reference,
    shared_denominator,
)

import liger

REDUCTIONS = ["mean", "sum", "none"]
# Less than a warp; odd rows, whose ends are no 16-byte vector; more rows than SMs; whole vectors; rows of 64
# to 128 KB, for one block or a small cluster by dtype, and of 140 to 280 KB, for the persistent kernel.
SHAPES = [(1, 7), (5, 129), *of_cuda((300, 64)), (17, 1000), (3, 32003), (3, 70001)]


def check(logits, target, **chosen):
    check_op(
        lambda x: liger.cross_entropy(x, target, **chosen),
        lambda x: reference(x, target, **chosen)["loss"],
        [logits],
        LARGEST_LSE,
    )


# --- values and gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(device, name, reduction):
    chosen = options(name, 13, 129, device, reduction)
    check(*random_logits(13, 129, device, ignore_index=chosen.get("ignore_index", -100)), **chosen)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(device, shape, dtype, name):
    chosen = options(name, *shape, device)
    check(*random_logits(*shape, device, dtype, chosen.get("ignore_index", -100)), **chosen)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_weighted_mean_equals_torch_cross_entropy_loss(device, reduction):
    logits, target = random_logits(48, 97, device)
    ce_weight = torch.rand(97, device=device) + 0.1
    denominator = shared_denominator(target, ce_weight) if reduction == "mean" else None

    def whole(x):
        return liger.cross_entropy(x, target, ce_weight=ce_weight, reduction=reduction)

    def micro_batches(x):
        losses = [
            liger.cross_entropy(part, y, ce_weight=ce_weight, denominator=denominator, reduction=reduction)
            for part, y in zip(x.split([7, 1, 40]), target.split([7, 1, 40]), strict=True)
        ]
        return torch.cat(losses) if reduction == "none" else sum(losses)

    def theirs(x):
        if x.dtype == torch.float64:
            return torch.nn.CrossEntropyLoss(weight=ce_weight.double(), reduction=reduction)(x, target)
        return reference(x, target, ce_weight=ce_weight, reduction=reduction)["loss"]

    check_op(whole, theirs, [logits], LARGEST_LSE)
    check_op(micro_batches, theirs, [logits], LARGEST_LSE)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(
    "make", [strided_like, padded, lambda t: t.t().contiguous().t(), lambda t: t[:, :1].expand(t.shape)]
)
def test_strided_logits_and_gradient(device, make, reduction):
    logits, target = random_logits(9, 65, device)
    upstream = torch.randn(9 if reduction == "none" else (), device=device)
    results = []
    for transform, spread in ((lambda t: make(t).contiguous(), lambda g: g), (make, strided_like)):
        leaf = transform(logits).detach().requires_grad_()
        loss = liger.cross_entropy(leaf, target, softcap=3.0, reduction=reduction)
        grad = torch.autograd.grad(loss, leaf, spread(upstream) if upstream.dim() else upstream)[0]
        assert grad.stride() == torch.empty_like(leaf).stride()
        results.append([loss, grad])
    for contiguous, strided in zip(*results, strict=True):
        torch.testing.assert_close(strided, contiguous, rtol=1e-6, atol=1e-7)


def test_expanded_upstream_gradient(device):
    logits, target = random_logits(6, 40, device)
    leaf = logits.requires_grad_()
    losses = [liger.cross_entropy(leaf, target, reduction=reduction).sum() for reduction in ("none", "sum")]
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaf)[0] for loss in losses), rtol=1e-5, atol=1e-7)


def test_weights_of_other_dtypes(device):
    logits, target = random_logits(12, 50, device)
    weights = torch.randint(1, 9, (50,), device=device) / 4
    tokens = torch.randint(1, 9, (12,), device=device) / 4
    expected = liger.cross_entropy(logits, target, ce_weight=weights, token_weight=tokens)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        got = liger.cross_entropy(logits, target, ce_weight=weights.to(dtype), token_weight=tokens.to(dtype))
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "denominator", [7, 7.0, torch.tensor(7), torch.tensor([7.0]), torch.tensor(7.0).double()]
)
def test_denominators(device, denominator):
    logits, target = random_logits(12, 50, device)
    if isinstance(denominator, torch.Tensor):
        denominator = denominator.to(device)
    plain = liger.cross_entropy(logits, target, reduction="sum")
    for reduction in ("mean", "sum"):
        loss = liger.cross_entropy(logits, target, reduction=reduction, denominator=denominator)
        torch.testing.assert_close(loss, plain / 7, rtol=1e-6, atol=0)


# --- the edges ----------------------------------------------------------------------------------------------


def test_minus_infinity_where_it_plays_no_role(device):
    logits, target = random_logits(4, 21, device)
    target[:] = 3
    logits[:, 10:] = -torch.inf
    ours = logits.clone().requires_grad_()
    output = liger.cross_entropy(ours, target, **ALL_METRICS)
    output.loss.backward()
    expected = reference(logits[:, :10].double(), target)
    torch.testing.assert_close(output.loss.double(), expected["loss"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.entropy.double(), expected["entropy"], rtol=1e-5, atol=1e-6)
    assert ours.grad.isfinite().all() and not ours.grad[:, 10:].any()


@pytest.mark.parametrize("mask", [-1e38, torch.finfo(torch.float32).min])
def test_classes_masked_by_huge_negative_numbers(device, mask):
    """More of them than a thread reads at first, and a row of nothing else."""
    logits, target = random_logits(3, 20000, device)
    target[:] = 3
    logits[:, 4:9000] = mask
    logits[2] = mask
    ours = logits.clone().requires_grad_()
    output = liger.cross_entropy(ours, target, reduction="none", metrics=("entropy",))
    output.loss.sum().backward()
    expected = reference(logits.double(), target, reduction="none")
    torch.testing.assert_close(output.loss[:2].double(), expected["loss"][:2], rtol=1e-5, atol=1e-6)
    # Of equal logits; float64 has no digits left for it beside such logits.
    expected["entropy"][2] = math.log(20000)
    torch.testing.assert_close(output.entropy.double(), expected["entropy"], rtol=1e-5, atol=1e-6)
    # The loss of the last row is small beside the rounding of its logits.
    assert output.loss.isfinite().all() and ours.grad.isfinite().all()


@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_an_offset_of_all_logits(float64_device, offset):
    logits, target = random_logits(4, 1000, float64_device)
    logits = (logits * 8).round() / 8 + offset
    loss = liger.cross_entropy(logits, target, reduction="none")
    expected = reference(logits.double(), target, reduction="none")["loss"]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


def test_loss_is_infinite_where_the_target_is_impossible(device):
    logits, target = random_logits(3, 21, device)
    target[:] = 3
    logits[0, 3] = -torch.inf
    loss = liger.cross_entropy(logits, target, reduction="none")
    assert loss[0] == torch.inf and loss[1:].isfinite().all()


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_logits(device, dtype, reduction):
    """Nothing overflows, and the loss is right to the float32 rounding of numbers as large as the logits."""
    size = 6e4 if dtype == torch.float16 else 1e30
    rows = [[size, 0.0, -size], [-size, -size, -size], [size, size, -size]]
    logits = torch.tensor(rows, device=device).to(dtype)
    target = torch.tensor([0, 1, 1], device=device)
    leaf = logits.requires_grad_()
    loss = liger.cross_entropy(leaf, target, reduction=reduction)
    expected = torch.tensor([1.0, 3.0, 2.0], device=device).log()
    expected = expected if reduction == "none" else expected.sum()
    torch.testing.assert_close(loss, expected, rtol=0, atol=3 * size * torch.finfo(torch.float32).eps)
    loss.sum().backward()
    assert leaf.grad.isfinite().all() and not leaf.grad[0].any()


def test_one_class(device):
    logits = torch.randn(3, 1, device=device, requires_grad=True)
    target = torch.zeros(3, dtype=torch.int64, device=device)
    output = liger.cross_entropy(logits, target, label_smoothing=0.1, **ALL_METRICS)
    output.loss.backward()
    for zero in (output.loss, output.logprobs, output.entropy, output.argmax, logits.grad):
        assert not zero.any()
    assert output.token_accuracy == 1


def test_ties_give_the_lowest_index(device):
    logits = torch.zeros(3, 5000, device=device)
    logits[0, 4000:] = 1.0
    logits[1, [1023, 1024, 4999]] = 2.0
    target = torch.tensor([4000, 1024, 0], device=device)
    output = liger.cross_entropy(logits, target, **ALL_METRICS)
    assert output.argmax.tolist() == [4000, 1023, 0]
    torch.testing.assert_close(output.token_accuracy.item(), 2 / 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [1e4, 1e30, 3e38])
def test_a_large_softcap_changes_nothing(device, dtype, softcap):
    logits = torch.randn(5, 64, device=device).to(dtype).requires_grad_()
    weight = torch.randn(64, 16, device=device).to(dtype).requires_grad_()
    x = torch.randn(5, 16, device=device).to(dtype).requires_grad_()
    target = torch.randint(64, (5,), device=device)
    for function, leaves in ((liger.cross_entropy, (logits,)), (liger.fused_linear_ce, (x, weight))):
        plain, capped = (function(*leaves, target, softcap=c) for c in (None, softcap))
        torch.testing.assert_close(capped, plain, rtol=2e-6, atol=2e-6)
        tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
        for a, b in zip(*(torch.autograd.grad(loss, leaves) for loss in (capped, plain)), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_saturated_softcap_keeps_the_prediction(device):
    logits = torch.tensor([[50.0, 60.0, 55.0]], device=device)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    output = liger.cross_entropy(logits, target, softcap=1.0, metrics=("argmax",))
    assert output.argmax.item() == 1


# --- metrics ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "all", "all and denominator"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_metrics(device, name, reduction):
    chosen = options(name, 23, 300, device, reduction)
    logits, target = random_logits(23, 300, device, ignore_index=chosen.get("ignore_index", -100))
    target[::5] = logits[::5].argmax(-1)
    output = liger.cross_entropy(logits, target, **chosen, **ALL_METRICS)
    plain, exact = reference(logits, target, **chosen), reference(logits.double(), target, **chosen)
    assert torch.equal(output.argmax, exact["argmax"])
    for metric in ("loss", "z_loss", "token_accuracy", "logprobs", "entropy"):
        assert_as_exact_as_torch(getattr(output, metric), plain[metric], exact[metric], metric, LARGEST_LSE)


@pytest.mark.parametrize("metric", METRICS)
def test_one_metric_alone(device, metric):
    logits, target = random_logits(11, 77, device)
    both = {"lse_square_scale": 0.01, "token_weight": torch.rand(11, device=device)}
    everything = liger.cross_entropy(logits, target, **both, **ALL_METRICS)
    alone = liger.cross_entropy(logits, target, **both, metrics=(metric,))
    assert isinstance(alone, liger.CrossEntropyOutput)
    for field in liger.CrossEntropyOutput._fields:
        if field in ("loss", metric):
            assert torch.equal(getattr(alone, field), getattr(everything, field))
        else:
            assert getattr(alone, field) is None


def test_dtypes_of_results(device):
    for dtype in DTYPES:
        logits, target = random_logits(4, 9, device, dtype)
        for field, value in liger.cross_entropy(logits, target, **ALL_METRICS)._asdict().items():
            assert value.dtype == (torch.int64 if field == "argmax" else torch.float32), field
            assert not value.requires_grad


def test_results_not_asked_for_are_empty(device):
    logits, target = random_logits(4, 9, device)
    no = [False] * 6
    loss, *others, stats, used, grad_logits = torch.ops.liger.cross_entropy_forward(
        logits, target, None, None, None, -100, 0.0, 0.0, None, "mean", *no
    )
    assert loss.shape == used.shape == () and stats.shape == (2, 4)
    assert [t.shape for t in (*others, grad_logits)] == [(0,)] * 6
    assert used == (target != -100).sum()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_forward_op_makes_the_gradient_of_the_summed_loss(device, reduction):
    logits, target = random_logits(6, 33, device)
    grad = torch.ops.liger.cross_entropy_forward(
        logits, target, None, None, None, -100, 0.1, 1e-3, None, reduction, *(False,) * 5, True
    )[-1]
    leaf = logits.clone().requires_grad_()
    reference(leaf, target, label_smoothing=0.1, lse_square_scale=1e-3, reduction=reduction)[
        "loss"
    ].sum().backward()
    torch.testing.assert_close(grad, leaf.grad, rtol=1e-5, atol=1e-6)


def test_mean_z_loss_is_a_class_weighted_mean(device):
    logits, target = random_logits(30, 12, device)
    w = torch.rand(12, device=device) + 0.1
    got = liger.cross_entropy(logits, target, ce_weight=w, lse_square_scale=0.5, metrics=("z_loss",)).z_loss
    live = target != -100
    rows = 0.5 * logits.double().logsumexp(-1).square()
    weights = w.double()[target.clamp_min(0)] * live
    torch.testing.assert_close(got.double(), (rows * weights).sum() / weights.sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_low_precision_loss_keeps_float32_digits(device, dtype):
    logits, target = random_logits(64, 500, device, dtype)
    output = liger.cross_entropy(logits, target, lse_square_scale=1e-3, metrics=("z_loss",))
    exact = reference(logits.double(), target, lse_square_scale=1e-3)
    torch.testing.assert_close(output.loss.double(), exact["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(output.z_loss.double(), exact["z_loss"], rtol=1e-6, atol=0)
