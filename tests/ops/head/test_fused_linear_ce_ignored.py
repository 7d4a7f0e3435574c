# SPDX-License-Identifier: BSD-3-Clause
"""Ignored rows in fused_linear_ce: left out of the work, with every result where it belongs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch
from cross_entropy_reference import (
    ALL_METRICS,
    LARGEST_LSE,
    check_layer,
    leaves,
    options,
    random_layer,
    reference,
    rows_per_chunk,
)
from cuda_graphs import capture
from torch.nn.functional import linear

import liger

REDUCTIONS = ["mean", "sum", "none"]
# Enough classes that leaving out a few rows pays, and several chunks with the budgets below.
ROWS, VOCAB = 83, 2053


def ignored_rows(name, rows=ROWS):
    """A mask of what is ignored."""
    row = torch.arange(rows)
    return {
        "none": row < 0,
        "half": torch.rand(rows) < 0.5,
        "prompts": row % 29 < 20,
        "padding": row >= rows // 4,
        "last of a sequence": row % 20 == 19,
        "all but the first": row != 0,
        "all but one": row != rows - 7,
        "all": row >= 0,
    }[name]


MASKS = ["none", "half", "prompts", "padding", "last of a sequence", "all but the first", "all but one"]


def layer(mask, device, hidden=24, vocab=VOCAB, dtype=torch.float32, ignore_index=-100):
    """[input, weight, bias], target with exactly the rows of the mask ignored."""
    *tensors, target = random_layer(len(mask), hidden, vocab, device, dtype, ignore_index)
    target = torch.randint(3, vocab, target.shape, device=device)
    target[mask.to(device)] = ignore_index
    return tensors, target


# --- values, gradients, metrics -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "all and denominator"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_reduction_and_option(device, mask, reduction, name):
    chosen = options(name, ROWS, VOCAB, device, reduction)
    tensors, target = layer(ignored_rows(mask), device, ignore_index=chosen.get("ignore_index", -100))
    check_layer(tensors, target, memory_budget=rows_per_chunk(16, tensors[1]), **chosen)


@pytest.mark.parametrize("hidden", [16, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("accum_dtype", [None, "input"], ids=str)
@pytest.mark.parametrize("chunk", [5, 16, 40, ROWS])
def test_every_place_of_the_logits(device, chunk, accum_dtype, dtype, hidden):
    """In memory of their own, of the weight's gradient and of the input's."""
    mask = ignored_rows("half")
    tensors, target = layer(mask, device, hidden, dtype=dtype)
    accum_dtype = dtype if accum_dtype == "input" else None
    if accum_dtype == torch.float32 or accum_dtype is None:
        check_layer(tensors, target, accum_dtype, rows_per_chunk(chunk, tensors[1]))
        return
    # A sum in a half type loses digits with every chunk.
    grads = []
    for rows, budget in ((slice(None), rows_per_chunk(chunk, tensors[1])), (~mask.to(device), None)):
        copies = leaves(*tensors)
        loss = liger.fused_linear_ce(
            copies[0][rows], copies[1], target[rows], copies[2], accum_dtype=accum_dtype, memory_budget=budget
        )
        grads.append(torch.autograd.grad(loss, copies))
    for actual, expected in zip(*grads, strict=True):
        largest = expected.abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=0, atol=ROWS * torch.finfo(dtype).eps * largest)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_metrics_at_their_rows(device, mask, reduction):
    chosen = options("all", ROWS, VOCAB, device, reduction)
    tensors, target = layer(ignored_rows(mask), device, ignore_index=chosen["ignore_index"])
    exact_logits = linear(*(t.double() for t in tensors))
    live = target != chosen["ignore_index"]
    target[live & (torch.arange(ROWS, device=device) % 3 == 0)] = VOCAB - 1
    output = liger.fused_linear_ce(
        *tensors[:2],
        target,
        tensors[2],
        memory_budget=rows_per_chunk(16, tensors[1]),
        **chosen,
        **ALL_METRICS,
    )
    plain, exact = (reference(z, target, **chosen) for z in (linear(*tensors), exact_logits))
    assert torch.equal(output.argmax, exact["argmax"])
    for metric in ("loss", "z_loss", "token_accuracy", "logprobs", "entropy"):
        assert_as_exact_as_torch(getattr(output, metric), plain[metric], exact[metric], metric, LARGEST_LSE)


@pytest.mark.parametrize("trained", [(True, False), (False, True), (True, True), (False, False)], ids=str)
@pytest.mark.parametrize("mask", ["half", "padding", "all but one"])
def test_only_what_is_trained(device, mask, trained):
    """Without a gradient of the input the rows side by side have memory of their own."""
    tensors, target = layer(ignored_rows(mask), device)
    budget = rows_per_chunk(16, tensors[1])
    ours, theirs = (
        [t.clone().requires_grad_(want) for t, want in zip(tensors[:2], trained, strict=True)] for _ in "ab"
    )
    loss = liger.fused_linear_ce(*ours, target, memory_budget=budget, metrics=("logprobs",))
    expected = reference(linear(*theirs), target)
    torch.testing.assert_close(loss.loss, expected["loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.logprobs, expected["logprobs"], rtol=1e-5, atol=1e-5)
    if any(trained):
        loss.loss.backward()
        expected["loss"].backward()
    for a, b, want in zip(ours, theirs, trained, strict=True):
        assert (a.grad is not None) == want
        if want:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


# --- the saving ---------------------------------------------------------------------------------------------


def flops_of_products(function):
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as recorded:
        function()
    flops = 0
    for event in recorded.events():
        if event.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            (m, k), (_, n) = event.input_shapes[:2] if event.name == "aten::mm" else event.input_shapes[1:3]
            flops += 2 * m * k * n
    return flops


def milliseconds(function):
    """Median on the device."""
    times = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[3]


@pytest.mark.parametrize("mask", ["half", "prompts", "padding"])
def test_products_of_valid_rows_only(device, mask, backend):
    if device.type == "cuda" and backend != "triton":
        pytest.skip("the cuda backend's products are not torch's, and torch on a GPU computes all rows")
    tensors, target = layer(ignored_rows(mask), device)
    budget = rows_per_chunk(16, tensors[1])

    def flops(target):
        copies = leaves(*tensors[:2])
        return flops_of_products(
            lambda: liger.fused_linear_ce(*copies, target, memory_budget=budget).backward()
        )

    every = flops(target.clamp_min(0))
    assert every == 6 * ROWS * VOCAB * 24
    assert flops(target) * ROWS == every * (target != -100).sum().item()


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [False, True])
def test_half_the_rows_in_little_more_than_half_the_time(device, backend, chunks):
    if backend == "torch":
        pytest.skip("torch on a GPU computes all rows")
    rows = 4096
    (x, weight, _), target = layer(torch.rand(rows) < 0.5, device, 4096, 32000, torch.bfloat16)
    x.requires_grad_()
    weight.requires_grad_()

    def time(target):
        # A float32 sum would make it one chunk.
        options = {"accum_dtype": torch.bfloat16, "memory_budget": 64 << 20} if chunks else {}
        return milliseconds(lambda: liger.fused_linear_ce(x, weight, target, **options))

    assert time(target) < 0.75 * time(target.clamp_min(0))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [m for m in MASKS if m != "all but the first"] + ["all"])
def test_one_chunk_with_a_head(device, mask):
    """A batch of one chunk whose first rows are multiplied while the others are counted."""
    rows, hidden, vocab = 2048, 4096, 16384
    head, chunks = torch.ops.liger.lay_out_chunks(rows, hidden, vocab, 2, True, True, True)[-3:-1]
    assert 0 < head < rows and chunks == [rows]
    mask = ignored_rows(mask, rows)
    (x, weight, bias), target = layer(mask, device, hidden, vocab, torch.bfloat16)
    valid = ~mask.to(device)
    ours, theirs = leaves(x, weight, bias), leaves(x, weight, bias)
    output = liger.fused_linear_ce(*ours[:2], target, ours[2], reduction="sum", **ALL_METRICS)
    expected = reference(linear(*theirs), target, reduction="sum")
    torch.testing.assert_close(output.loss, expected["loss"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(output.logprobs, expected["logprobs"], rtol=1e-2, atol=2e-2)
    assert not output.logprobs[~valid].any() and (output.argmax[~valid] == -1).all()
    output.loss.backward()
    expected["loss"].backward()
    for a, b in zip(ours, theirs, strict=True):
        largest = b.grad.abs().max().item()
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-2, atol=1e-2 * largest)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cuda_graph_gives_the_same_numbers(device, reduction):
    """Nothing is read on the host while a graph is captured: it fits every number of ignored rows."""
    tensors, target = layer(ignored_rows("half"), device)
    budget = rows_per_chunk(16, tensors[1])
    copies = leaves(*tensors)
    static = target.clone()

    def step():
        output = liger.fused_linear_ce(
            *copies[:2], static, copies[2], memory_budget=budget, reduction=reduction, **ALL_METRICS
        )
        return [*output, *torch.autograd.grad(output.loss.sum(), copies)]

    graph, captured = capture(step, warm_up=3)
    for mask in ("half", "none", "all but one"):
        static.copy_(layer(ignored_rows(mask), device)[1])
        graph.replay()
        for actual, expected in zip(captured, step(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_streams_and_threads(device):
    """Calls at the same time, on streams of their own, do not read each other's counts."""
    cases = [layer(torch.rand(ROWS) < share, device) for share in (0.2, 0.5, 0.8, 0.95)]
    budget = rows_per_chunk(16, cases[0][0][1])
    expected = [liger.fused_linear_ce(*t[:2], y, t[2], memory_budget=budget) for t, y in cases]
    torch.cuda.synchronize()

    def repeat(case):
        (x, weight, bias), target = case
        with torch.cuda.stream(torch.cuda.Stream()):
            losses = [liger.fused_linear_ce(x, weight, target, bias, memory_budget=budget) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return losses

    with ThreadPoolExecutor(len(cases)) as pool:
        for losses, value in zip(pool.map(repeat, cases), expected, strict=True):
            for loss in losses:
                torch.testing.assert_close(loss, value, rtol=1e-5, atol=0)
