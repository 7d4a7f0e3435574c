# SPDX-License-Identifier: BSD-3-Clause
"""The engine that fused_linear_ce has for compute capability 9.0: against float64, and against the generic
engine."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import strided_like
from cross_entropy_reference import options
from cuda_graphs import capture
from sm90_engine import (
    BESIDE,
    BFLOAT16,
    DTYPES,
    FLOAT16,
    GRADIENT,
    KINDS,
    MIB,
    PARTS,
    PARTS_OF_CHUNKS,
    ROWS,
    SHAPES,
    SUMS,
    SUMS_BF16,
    assert_same_bits,
    check,
    exact,
    run,
    uses_the_engine,
)
from torch.nn.functional import linear

pytestmark = pytest.mark.gpu

REDUCTIONS = ["mean", "sum", "none"]


# --- values and gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
@DTYPES
def test_every_kind_of_plan(sm90, dtype, name):
    shape = SHAPES[name].of(dtype)
    check(shape, *shape.layer(sm90, dtype=dtype))


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@KINDS
@DTYPES
def test_reductions_and_what_is_trained(sm90, dtype, shape, reduction, trained):
    shape = shape.of(dtype)
    check(shape, *shape.layer(sm90, dtype=dtype), trained, reduction=reduction)


@pytest.mark.parametrize(
    "name",
    ["class weights", "token weights", "ignore_index", "z-loss", "denominator", "z-loss and class weights"],
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@DTYPES
def test_every_option(sm90, dtype, name, reduction):
    chosen = options(name, BESIDE.rows, BESIDE.vocab, sm90, reduction)
    x, weight, target = BESIDE.layer(sm90, dtype=dtype)
    target[target == -100] = chosen.get("ignore_index", -100)
    check(BESIDE, x, weight, target, **chosen)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@KINDS
def test_all_options_at_once(sm90, shape, reduction):
    chosen = {
        "ce_weight": torch.rand(shape.vocab, device=sm90) + 0.1,
        "token_weight": torch.rand(shape.rows, device=sm90) + 0.1,
        "lse_square_scale": 1e-2,
    }
    if reduction != "none":
        chosen["denominator"] = torch.tensor(123.5, device=sm90)
    check(shape, *shape.layer(sm90), reduction=reduction, **chosen)


@pytest.mark.parametrize("shape", [PARTS, PARTS_OF_CHUNKS], ids=["one chunk", "chunks"])
def test_parts_of_a_few_valid_rows(sm90, shape):
    check(shape, *shape.layer(sm90, ignored=0.9))


# --- ignored rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [SHAPES["in the weight gradient"], BESIDE, PARTS, SUMS], ids=lambda s: str(s.rows)
)
def test_the_first_row_of_a_class_is_subtracted_in_float32(sm90, shape):
    x, weight, _ = shape.layer(sm90, scale=0.25)
    target = torch.full((shape.rows,), -100, device=sm90)
    count = min(shape.rows, shape.vocab)
    # Logits this small make the target nearly all of the gradient.
    target[:count] = torch.randperm(shape.vocab, device=sm90)[:count]
    target[0] = -100  # so that the denominator is no power of two
    _, grads = run(shape, x, weight, target)
    _, expected = exact(x, weight, target)
    for name, actual, wanted in zip(("input", "weight"), grads, expected, strict=True):
        error = (actual.double() - wanted).norm() / (wanted.to(BFLOAT16).double() - wanted).norm()
        assert error <= 1.1, f"gradient of {name}: {error.item():.3g} times the error of one rounding"


@KINDS
@DTYPES
def test_a_class_that_is_every_target(sm90, dtype, shape):
    """All rows but the first one have the one-hot term as an element, which may be the largest of the row."""
    shape = shape.of(dtype)
    x, weight, target = shape.layer(sm90, dtype=dtype)
    target[target >= 0] = shape.vocab - 1
    check(shape, x, weight, target)


@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.99])
@KINDS
@DTYPES
def test_ignored_rows(sm90, dtype, shape, ignored):
    shape = shape.of(dtype)
    check(shape, *shape.layer(sm90, ignored, dtype=dtype))


@pytest.mark.parametrize("place", ["first", "last"])
@KINDS
def test_ignored_rows_side_by_side(sm90, shape, place):
    """Whole chunks have nothing to do."""
    x, weight, target = shape.layer(sm90, ignored=0.0)
    most = shape.rows * 3 // 4
    target[slice(None, most) if place == "first" else slice(-most, None)] = -100
    check(shape, x, weight, target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@KINDS
@DTYPES
def test_all_rows_ignored(sm90, dtype, shape, reduction):
    shape = shape.of(dtype)
    x, weight, target = shape.layer(sm90, ignored=1.0, dtype=dtype)
    upstream = torch.ones(shape.rows, device=sm90) if reduction == "none" else None
    output, grads = run(shape, x, weight, target, upstream=upstream, reduction=reduction)
    assert output.loss.isnan() if reduction == "mean" else not output.loss.any()
    assert not output.logprobs.any()
    for grad, like in zip(grads, (x, weight), strict=True):
        assert grad.shape == like.shape and grad.dtype == dtype and not grad.any()


@KINDS
def test_ignored_rows_may_hold_anything(sm90, shape):
    x, weight, target = shape.layer(sm90, ignored=0.5)
    dirty = x.clone()
    dirty[target == -100] = torch.inf
    assert_same_bits([run(shape, rows, weight, target) for rows in (x, dirty)])


# --- the range of logits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.01, 1.0])
@KINDS
def test_sums_beyond_their_range_are_repaired(sm90, shape, share):
    """Targets more than 41 below the largest logit, in a few tiles of rows or in all: their sums pass
    2^60."""
    x, weight, target = shape.layer(sm90, ignored=0.1)
    x[: round(share * shape.rows)] *= 60
    logits = linear(x.double(), weight.double())
    live = target != -100
    below = logits.logsumexp(-1) - logits.gather(1, target.clamp_min(0).unsqueeze(1)).squeeze(1)
    assert (below[live] > 42).any() and (share == 1 or (below[live] < 41).any())
    check(shape, x, weight, target, loss_tolerance=ROWS)


@KINDS
def test_the_smallest_logit_as_target(sm90, shape):
    """The sums are large, up to the range in which they stay as they are."""
    x, weight, _ = shape.layer(sm90, scale=2.0)
    logits = linear(x.double(), weight.double())
    target = logits.argmin(-1)
    below = logits.logsumexp(-1) - logits.min(-1).values
    assert below.median() > 25 and (below < 41).any()
    check(shape, x, weight, target)


@KINDS
def test_weights_of_rows_that_underflow(sm90, shape):
    """Weight over sum of exponentials is 0 in float32: a class that is the target of several such rows."""
    x, weight, _ = shape.layer(sm90, scale=2.0)
    logits = linear(x.double(), weight.double())
    target = logits.argmin(-1)
    small = torch.rand(shape.rows, device=sm90) < 0.3
    token_weight = torch.where(small, 1e-37, 1.0)
    small &= (logits.logsumexp(-1) - logits.min(-1).values) > 20
    assert small.sum() > target[small].unique().numel()
    check(shape, x, weight, target, token_weight=token_weight, reduction="sum")


@pytest.mark.parametrize("scale", [1e15, 1e20, 1e27])
@KINDS
def test_weight_gradients_whose_squares_overflow(sm90, shape, scale):
    """Sums of chunks have a scale per block."""
    x, weight, target = shape.layer(sm90)
    x, weight = (x.double() * scale).to(x.dtype), (weight.double() / scale).to(x.dtype)
    _, grads = run(shape, x, weight, target)
    _, expected = exact(x, weight, target)
    for actual, wanted in zip(grads, expected, strict=True):
        assert (actual.double() - wanted).norm() <= GRADIENT * wanted.norm()


@KINDS
def test_the_largest_logit_as_target(sm90, shape):
    """Probabilities close to 1: gradients are small differences."""
    x, weight, _ = shape.layer(sm90, scale=2.0)
    target = linear(x.double(), weight.double()).argmax(-1)
    # The loss is far smaller than the logits, whose sums in float32 have the error.
    check(shape, x, weight, target, loss_tolerance=2e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@DTYPES
def test_targets_out_of_range_are_nan_as_in_the_generic_engine(sm90, dtype, reduction):
    x, weight, target = BESIDE.layer(sm90, dtype=dtype)
    target[3], target[700] = BESIDE.vocab, -5
    upstream = torch.ones(BESIDE.rows, device=sm90) if reduction == "none" else None
    (ours, grads), (theirs, generic_grads) = (
        run(BESIDE, x, weight, target, upstream=upstream, generic=generic, reduction=reduction)
        for generic in (False, True)
    )
    assert ours.loss.isnan().sum() == (1 if reduction == "mean" else 2)
    for actual, expected in (
        (ours.loss, theirs.loss),
        (ours.logprobs, theirs.logprobs),
        *zip(grads, generic_grads, strict=True),
    ):
        assert torch.equal(actual.isnan(), expected.isnan())
        largest = expected.nan_to_num().abs().max().item()
        torch.testing.assert_close(actual.nan_to_num(), expected.nan_to_num(), rtol=2e-2, atol=2e-2 * largest)


# --- arguments ----------------------------------------------------------------------------------------------


def transposed(tensor):
    return tensor.t().contiguous().t()


def wider_rows(extra, offset):
    """The values within wider rows, from an address of 2 * offset bytes on."""

    def form(tensor):
        rows, columns = tensor.shape
        wide = tensor.new_full((rows * (columns + extra) + offset,), torch.nan)
        view = wide[offset:].view(rows, columns + extra)[:, :columns]
        view.copy_(tensor)
        return view

    return form


@pytest.mark.parametrize(
    "form",
    [strided_like, transposed, wider_rows(64, 0), wider_rows(4, 0), wider_rows(0, 1), wider_rows(8, 8)],
    ids=["strided", "transposed", "wider rows", "odd rows", "misaligned", "offset"],
)
@pytest.mark.parametrize("shape", [BESIDE, SUMS], ids=["one chunk", "chunks"])
@DTYPES
def test_any_strides_give_the_same_bits(sm90, dtype, shape, form):
    x, weight, target = shape.layer(sm90, dtype=dtype)
    token_weight = torch.rand(shape.rows, device=sm90)
    runs = [
        run(shape, x, weight, target, token_weight=token_weight),
        run(shape, form(x), form(weight), strided_like(target), token_weight=strided_like(token_weight)),
    ]
    assert_same_bits(runs)


@KINDS
def test_int32_targets(sm90, shape):
    x, weight, target = shape.layer(sm90)
    assert_same_bits([run(shape, x, weight, y) for y in (target, target.int())])


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(BFLOAT16, 1.0), (FLOAT16, 1.0), (FLOAT16, 4.0)],
    ids=["bfloat16", "float16", "float16 shifted"],
)
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_bits_twice_and_inputs_untouched(sm90, name, dtype, scale):
    shape = SHAPES[name].of(dtype)
    x, weight, target = shape.layer(sm90, scale=scale, dtype=dtype)
    copies = [t.clone() for t in (x, weight, target)]
    runs = []
    for fill in (0.0, torch.nan):
        # Whatever the memory held before.
        garbage = torch.full((64 * MIB,), fill, device=sm90)
        del garbage
        runs.append(run(shape, x, weight, target))
    assert_same_bits(runs)
    for tensor, copy in zip((x, weight, target), copies, strict=True):
        assert torch.equal(tensor, copy)


# --- how it runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@KINDS
@DTYPES
def test_a_graph_fits_other_inputs_and_any_number_of_ignored_rows(sm90, dtype, shape, reduction):
    shape = shape.of(dtype)
    static = shape.layer(sm90, ignored=0.5, dtype=dtype)
    upstream = torch.rand(shape.rows, device=sm90) if reduction == "none" else None

    def step():
        return run(shape, *static, upstream=upstream, reduction=reduction)

    graph, captured = capture(step)
    for ignored, scale in ((0.5, 1.0), (0.0, 4.0), (0.99, 0.5), (0.2, 30.0)):
        for tensor, value in zip(static, shape.layer(sm90, ignored, scale, dtype), strict=True):
            tensor.copy_(value)
        graph.replay()
        assert_same_bits([captured, step()])


@pytest.mark.parametrize("generic", [False, True])
@DTYPES
def test_the_kernels_are_those_of_the_engine(sm90, dtype, generic):
    x, weight, target = SUMS.layer(sm90, dtype=dtype)
    assert uses_the_engine(lambda: run(SUMS, x, weight, target, generic=generic)) is not generic


# Blocks wait for each other. If a block that is waited for cannot start, the process has to be ended.
@pytest.mark.timeout(120, method="thread")
def test_calls_at_the_same_time_on_streams_of_their_own(sm90):
    shapes = [BESIDE, SUMS, PARTS_OF_CHUNKS, SUMS_BF16]
    layers = [shape.layer(sm90) for shape in shapes]
    expected = [run(shape, *layer) for shape, layer in zip(shapes, layers, strict=True)]
    torch.cuda.synchronize()

    def repeat(index):
        with torch.cuda.stream(torch.cuda.Stream(priority=-(index % 2))):
            results = [run(shapes[index], *layers[index]) for _ in range(10)]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(len(shapes)) as pool:
        for results, alone in zip(pool.map(repeat, range(len(shapes))), expected, strict=True):
            assert_same_bits([alone, *results])
