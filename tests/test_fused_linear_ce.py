"""fused_linear_ce against float64, in every backend that runs here."""

import itertools

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch, check_op, error, strided_like
from cross_entropy_reference import (
    LARGEST_LSE,
    METRICS,
    OPTIONS,
    RETURN_ALL,
    options,
    random_target,
    reference,
    shared_denominator,
)
from torch.nn.functional import linear

import liger

REDUCTIONS = ["mean", "sum", "none"]
# rows, hidden, vocab
SHAPES = [(1, 8, 7), (5, 33, 129), (300, 16, 64), (17, 64, 1000), (3, 40, 32003)]


def batch(rows, hidden, vocab, device, dtype=torch.float32, ignore_index=-100):
    """(input, weight, bias, target) whose logits have a standard deviation of about 2."""
    made = (
        2 * torch.randn(rows, hidden, device=device),
        torch.randn(vocab, hidden, device=device) / hidden**0.5,
        torch.randn(vocab, device=device) / 4,
    )
    return *(t.to(dtype) for t in made), random_target(rows, vocab, device, ignore_index)


def rows_per_chunk(rows, weight):
    """A memory budget for chunks of so many rows (float32 sums of the weight gradient may allow more)."""
    return rows * weight.shape[0] * weight.element_size()


def check(tensors, target, accum_dtype=None, memory_budget=None, **chosen):
    check_op(
        lambda x, w, b=None: liger.fused_linear_ce(
            x, w, target, b, accum_dtype=accum_dtype, memory_budget=memory_budget, **chosen
        ),
        lambda x, w, b=None: reference(linear(x, w, b), target, **chosen)["loss"],
        tensors,
        LARGEST_LSE,
    )


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


# --- values and gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [4, 13])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(device, name, reduction, chunk):
    chosen = options(name, 13, 129, device, reduction)
    *tensors, target = batch(13, 24, 129, device, ignore_index=chosen.get("ignore_index", -100))
    check(tensors, target, memory_budget=rows_per_chunk(chunk, tensors[1]), **chosen)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(device, shape, dtype, name):
    rows, hidden, vocab = shape
    chosen = options(name, rows, vocab, device)
    x, weight, bias, target = batch(rows, hidden, vocab, device, dtype, chosen.get("ignore_index", -100))
    # The products keep the shapes of plain torch where their sums are long: another order of summing is no error.
    chunk = rows // 2 if rows > 3 else rows
    check([x, weight], target, memory_budget=rows_per_chunk(chunk, weight), **chosen)
    check([x, weight, bias], target, **chosen)


@pytest.mark.parametrize("accum_dtype", [None, torch.float32, "input"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunk_plans_agree(device, dtype, accum_dtype):
    """One row per chunk, a ragged last chunk, and one chunk for all, against the same exact result."""
    x, weight, bias, target = batch(37, 8, 200, device, dtype)
    accum_dtype = dtype if accum_dtype == "input" else accum_dtype
    for rows in (1, 5, 36, 37):
        budget = rows_per_chunk(rows, weight)
        if accum_dtype == dtype and dtype != torch.float32:
            # A sum in the dtype of the input loses digits with every chunk: only its first digits are compared.
            grads = []
            for b in (budget, None):
                copies = leaves(x, weight, bias)
                loss = liger.fused_linear_ce(
                    copies[0], copies[1], target, copies[2], accum_dtype=accum_dtype, memory_budget=b
                )
                grads.append(torch.autograd.grad(loss, copies))
            for chunked, whole in zip(*grads, strict=True):
                assert error(chunked, whole) < 37 * torch.finfo(dtype).eps
        else:
            check([x, weight, bias], target, accum_dtype, budget)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_float32_accumulation_is_as_exact_as_one_product(device, dtype):
    """Many chunks summed in float32 lose nothing against one chunk; summed in the dtype of the input they do."""
    rows, hidden, vocab = 256, 4, 96
    x, weight, _, target = batch(rows, hidden, vocab, device, dtype)
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
    x, weight, bias, target = batch(48, 20, 97, device)
    ce_weight = torch.rand(97, device=device) + 0.1
    denominator = shared_denominator(target, ce_weight) if reduction == "mean" else None

    def whole(x, w, b):
        return liger.fused_linear_ce(x, w, target, b, ce_weight=ce_weight, reduction=reduction)

    def micro_batches(x, w, b):
        losses = [
            liger.fused_linear_ce(part, w, y, b, ce_weight=ce_weight, denominator=denominator, reduction=reduction)
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
    x, weight, bias, target = batch(24, 16, 65, device)
    count = (target != -100).sum()
    whole, parts = leaves(weight, bias), leaves(weight, bias)
    liger.fused_linear_ce(x, whole[0], target, whole[1]).backward()
    for rows, y in zip(x.split(6), target.split(6), strict=True):
        liger.fused_linear_ce(rows, parts[0], y, parts[1], denominator=count).backward()
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(2, 5), (2, 1, 3), ()], ids=str)
def test_leading_dimensions(device, shape, reduction):
    x, weight, bias, target = batch(torch.Size(shape).numel(), 12, 33, device)
    flat = liger.fused_linear_ce(x, weight, target, bias, reduction=reduction, **RETURN_ALL)
    x, y = x.view(*shape, 12).requires_grad_(), target.view(shape)
    output = liger.fused_linear_ce(x, weight, y, bias, reduction=reduction, **RETURN_ALL)
    for field, a, b in zip(output._fields, output, flat, strict=True):
        per_row = field in ("predicted_tokens", "logprobs", "entropy")
        per_row |= reduction == "none" and field in ("loss", "z_loss")
        assert a.shape == (shape if per_row else ()), field
        assert torch.equal(a.reshape(-1), b.reshape(-1)), field
    output.loss.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("make", [strided_like, lambda t: t.t().contiguous().t() if t.dim() == 2 else strided_like(t)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_strided_arguments(device, make, reduction):
    x, weight, bias, target = batch(10, 24, 65, device)
    token_weight, ce_weight = torch.rand(10, device=device), torch.rand(65, device=device)
    results = []
    for transform in (lambda t: t, make):
        strided = [transform(t).detach().requires_grad_() for t in (x, weight, bias)]
        loss = liger.fused_linear_ce(
            strided[0], strided[1], transform(target), strided[2], ce_weight=transform(ce_weight),
            token_weight=transform(token_weight), reduction=reduction,
        )  # fmt: skip
        results.append([loss, *torch.autograd.grad(loss.sum(), strided)])
    for contiguous, strided in zip(*results, strict=True):
        torch.testing.assert_close(strided, contiguous, rtol=1e-5, atol=1e-6)


def test_int32_targets(device):
    x, weight, bias, target = batch(10, 24, 65, device)
    for a, b in zip(
        liger.fused_linear_ce(x, weight, target.int(), bias, **RETURN_ALL),
        liger.fused_linear_ce(x, weight, target, bias, **RETURN_ALL),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_gradcheck():
    for name, reduction in itertools.product(("plain", "all"), REDUCTIONS):
        chosen = options(name, 4, 6, "cpu", reduction)
        *tensors, target = batch(4, 3, 6, "cpu", torch.float64, chosen.get("ignore_index", -100))
        for budget in (None, 6 * 8):
            assert torch.autograd.gradcheck(
                lambda x, w, b, y=target, budget=budget, chosen=chosen: liger.fused_linear_ce(
                    x, w, y, b, memory_budget=budget, **chosen
                ),
                leaves(*tensors),
            )


# --- the edges ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", [0, 5])
def test_no_rows_and_all_ignored_as_torch(device, rows, reduction):
    x, weight, bias, _ = batch(rows, 8, 9, device)
    target = torch.full((rows,), -100, device=device)
    ours, theirs = leaves(x, weight, bias), leaves(x, weight, bias)
    output = liger.fused_linear_ce(ours[0], ours[1], target, ours[2], reduction=reduction, **RETURN_ALL)
    expected = torch.nn.functional.cross_entropy(linear(*theirs), target, reduction=reduction)
    torch.testing.assert_close(output.loss, expected, equal_nan=True)
    assert output.token_accuracy.isnan()
    output.loss.sum().backward()
    for leaf in ours:
        assert leaf.grad.shape == leaf.shape and not leaf.grad.any()


def test_ignored_rows_may_hold_anything(device):
    x, weight, _, target = batch(6, 8, 33, device)
    target[2] = -100
    clean = leaves(x, weight)
    liger.fused_linear_ce(*clean, target, label_smoothing=0.1).backward()
    x[2] = 1e30
    dirty = leaves(x, weight)
    liger.fused_linear_ce(*dirty, target, label_smoothing=0.1).backward()
    assert not dirty[0].grad[2].any()
    torch.testing.assert_close(dirty[1].grad, clean[1].grad, rtol=1e-6, atol=1e-7)


# --- metrics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "all", "all and denominator"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chunk", [4, 23])
def test_metrics(device, name, reduction, chunk):
    chosen = options(name, 23, 300, device, reduction)
    x, weight, bias, target = batch(23, 16, 300, device, ignore_index=chosen.get("ignore_index", -100))
    exact_logits = linear(*(t.double() for t in (x, weight, bias)))
    target[::5] = exact_logits[::5].argmax(-1)
    output = liger.fused_linear_ce(
        x, weight, target, bias, memory_budget=rows_per_chunk(chunk, weight), **chosen, **RETURN_ALL
    )
    plain, exact = reference(linear(x, weight, bias), target, **chosen), reference(exact_logits, target, **chosen)
    assert torch.equal(output.predicted_tokens, exact["predicted_tokens"])
    for metric in ("loss", "z_loss", "token_accuracy", "logprobs", "entropy"):
        assert_as_exact_as_torch(getattr(output, metric), plain[metric], exact[metric], metric, LARGEST_LSE)


@pytest.mark.parametrize("metric", METRICS)
def test_one_metric_alone(device, metric):
    x, weight, bias, target = batch(11, 16, 77, device)
    everything = liger.fused_linear_ce(x, weight, target, bias, lse_square_scale=0.01, **RETURN_ALL)
    alone = liger.fused_linear_ce(
        x, weight, target, bias, lse_square_scale=0.01, **{f"return_{metric}": True}
    )
    for field in liger.CrossEntropyOutput._fields:
        if field in ("loss", metric):
            assert torch.equal(getattr(alone, field), getattr(everything, field))
        else:
            assert getattr(alone, field) is None


def test_dtypes_of_results(device):
    for dtype in DTYPES:
        x, weight, bias, target = batch(4, 8, 9, device, dtype)
        for field, value in liger.fused_linear_ce(x, weight, target, bias, **RETURN_ALL)._asdict().items():
            assert value.dtype == (torch.int64 if field == "predicted_tokens" else torch.float32), field


def test_only_the_loss_is_differentiable(device):
    x, weight, bias, target = batch(4, 8, 9, device)
    output = liger.fused_linear_ce(*leaves(x, weight), target, bias, **RETURN_ALL)
    assert output.loss.requires_grad and not any(value.requires_grad for value in output[1:])


# --- autograd -----------------------------------------------------------------------------------------------------


def call_forward(x, weight, target, bias, needs, reduction="mean"):
    """The op under the composite, with a choice of the gradients to make in the forward."""
    return torch.ops.liger.fused_linear_ce_forward(
        x, weight, target, bias, None, None, None, -100, 0.0, 0.0, None, reduction, None, None, *[False] * 5, *needs
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trained", [t for t in itertools.product([True, False], repeat=3) if any(t)], ids=str)
def test_only_what_is_trained_gets_a_gradient(device, trained, reduction):
    """In particular a trainable head over frozen hidden states."""
    x, weight, bias, target = batch(9, 8, 33, device)
    everything = leaves(x, weight, bias)
    loss = liger.fused_linear_ce(everything[0], everything[1], target, everything[2], reduction=reduction)
    expected = torch.autograd.grad(loss.sum(), everything)
    some = [t.clone().requires_grad_(want) for t, want in zip((x, weight, bias), trained, strict=True)]
    liger.fused_linear_ce(some[0], some[1], target, some[2], reduction=reduction).sum().backward()
    for leaf, want, value in zip(some, trained, expected, strict=True):
        assert torch.equal(leaf.grad, value) if want else leaf.grad is None


def test_gradients_not_asked_for_are_not_made(device):
    x, weight, bias, target = batch(9, 8, 33, device)
    for needs in itertools.product([False, True], repeat=3):
        grads = call_forward(x, weight, target, bias, needs)[-3:]
        full = [t.shape if need else (0,) for t, need in zip((x, weight, bias), needs, strict=True)]
        assert [g.shape for g in grads] == full
        assert all(g.is_contiguous() and g.dtype == x.dtype for g in grads)
    assert call_forward(x, weight, target, None, (True,) * 3)[-1].shape == (0,)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_not_made_in_the_forward_are_made_in_the_backward(device, reduction):
    """As in a graph that was traced without grad mode and is run with it."""
    x, weight, bias, target = batch(9, 8, 33, device)
    grads = []
    for needs in ((True, True, True), (False, False, False), (True, False, False)):
        copies = leaves(x, weight, bias)
        loss = call_forward(copies[0], copies[1], target, copies[2], needs, reduction)[0]
        grads.append(torch.autograd.grad(1.5 * loss.sum(), copies))
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_second_backward_equals_the_first(device, dtype, reduction):
    x, weight, bias, target = batch(9, 8, 33, device, dtype)
    copies = leaves(x, weight, bias)
    loss = 3 * liger.fused_linear_ce(copies[0], copies[1], target, copies[2], reduction=reduction).sum()
    first = torch.autograd.grad(loss, copies, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.fill_(7)
    second = torch.autograd.grad(loss, copies, retain_graph=True)
    third = torch.autograd.grad(loss, copies)
    for a, b, c in zip(kept, second, third, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c) and a.any()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, copies)


def test_backward_needs_no_second_weight_gradient(device):
    """The gradient made in the forward becomes .grad itself."""
    x, weight, bias, target = batch(9, 8, 33, device)
    copies = leaves(x, weight, bias)
    loss = liger.fused_linear_ce(copies[0], copies[1], target, copies[2])
    made = [t.data_ptr() for t in loss.grad_fn.saved_tensors]
    loss.backward()
    assert [leaf.grad.data_ptr() for leaf in copies] == made


def test_a_new_step_does_not_change_an_old_gradient(device):
    x, weight, bias, target = batch(9, 8, 33, device)
    copies = leaves(x, weight, bias)
    liger.fused_linear_ce(copies[0], copies[1], target, copies[2]).backward()
    old = [leaf.grad for leaf in copies]
    kept = [g.clone() for g in old]
    for leaf in copies:
        leaf.grad = None
    (2 * liger.fused_linear_ce(copies[0], copies[1], target, copies[2])).backward()
    for leaf, g, value in zip(copies, old, kept, strict=True):
        assert torch.equal(g, value) and torch.equal(leaf.grad, 2 * value)


def test_one_argument_at_a_time(device):
    x, weight, bias, target = batch(9, 8, 33, device)
    copies = leaves(x, weight, bias)
    loss = liger.fused_linear_ce(copies[0], copies[1], target, copies[2])
    separate = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for leaf in copies]
    for a, b in zip(separate, torch.autograd.grad(loss, copies), strict=True):
        assert torch.equal(a, b)


def test_a_changed_gradient_of_the_forward_is_noticed(device):
    x, weight, bias, target = batch(9, 8, 33, device)
    copies = leaves(x, weight)
    loss, *_, grad_weight, _ = call_forward(*copies, target, bias, (True, True, False))
    grad_weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_second_derivative(device):
    x, weight, _, target = batch(9, 8, 33, device)
    copies = leaves(x, weight)
    for reduction in ("mean", "none"):
        loss = liger.fused_linear_ce(*copies, target, reduction=reduction).sum()
        grad = torch.autograd.grad(loss, copies[1], create_graph=True)[0]
        with pytest.raises(RuntimeError, match="fused_linear_ce has no second derivative"):
            grad.square().sum().backward()


def test_inputs_are_not_written_and_bits_repeat(device):
    x, weight, bias, target = batch(130, 16, 300, device)
    copies = leaves(x, weight, bias)
    versions = [leaf._version for leaf in copies]
    runs = []
    for _ in range(2):
        output = liger.fused_linear_ce(
            copies[0], copies[1], target, copies[2], memory_budget=rows_per_chunk(32, weight), **RETURN_ALL
        )
        runs.append([*output, *torch.autograd.grad(output.loss, copies)])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
    assert [leaf._version for leaf in copies] == versions
    for leaf, value in zip(copies, (x, weight, bias), strict=True):
        assert torch.equal(leaf, value)


def test_weight_that_is_computed(device):
    """A low-rank update of a frozen head: the gradient goes on through the weight."""
    x, weight, _, target = batch(9, 8, 33, device)
    down, up = leaves(torch.randn(2, 8, device=device), torch.randn(33, 2, device=device))
    ours = torch.autograd.grad(liger.fused_linear_ce(x, weight + up @ down, target), [down, up])
    logits = linear(x, weight + up @ down)
    theirs = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, target), [down, up])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_autocast_casts_as_linear_does(device, dtype, reduction):
    x, weight, bias, target = batch(9, 8, 33, device)
    copies, low = leaves(x, weight, bias), leaves(*(t.to(dtype) for t in (x, weight, bias)))
    with torch.autocast(device.type, dtype):
        loss = liger.fused_linear_ce(copies[0], copies[1], target, copies[2], reduction=reduction)
    expected = liger.fused_linear_ce(low[0], low[1], target, low[2], reduction=reduction)
    assert torch.equal(loss, expected)
    loss.sum().backward()
    expected.sum().backward()
    for leaf, other in zip(copies, low, strict=True):
        assert leaf.grad.dtype == torch.float32 and torch.equal(leaf.grad, other.grad.float())


# --- bad input ----------------------------------------------------------------------------------------------------


def test_target_out_of_range_on_the_cpu():
    words = "fused_linear_ce: target at row 1 is 17, expected 0 <= target < 10 or ignore_index -100"
    with pytest.raises(RuntimeError, match=f"^{words}$"):
        liger.fused_linear_ce(torch.randn(2, 4), torch.randn(10, 4), torch.tensor([1, 17]))


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [10, -1])
def test_target_out_of_range_on_a_gpu_gives_nan(device, wrong):
    x, weight, bias, _ = batch(4, 8, 10, device)
    target = torch.tensor([1, wrong, 3, -100], device=device)
    loss = liger.fused_linear_ce(x, weight, target, bias, reduction="none")
    assert loss.isnan().tolist() == [False, True, False, False]
    assert liger.fused_linear_ce(x, weight, target, bias).isnan()


BAD = {
    "input dimensions": (
        lambda a: a.update(input=torch.randn(())),
        "input has shape (), expected (rows, hidden)",
    ),
    "hidden size": (
        lambda a: a.update(weight=torch.randn(10, 5)),
        "weight has shape (10, 5), expected (vocab, hidden) with the hidden size of input, 8",
    ),
    "sharded weight": (
        lambda a: a.update(weight=torch.randn(0, 8)),
        "weight has shape (0, 8), expected at least one row; a sharded weight must be gathered first",
    ),
    "dtype mix": (
        lambda a: a.update(weight=a["weight"].half()),
        "weight has dtype float16, expected that of input, float32",
    ),
    "integer input": (
        lambda a: a.update(input=a["input"].long()),
        "input has dtype int64, expected float16, bfloat16, float32 or float64",
    ),
    "bias shape": (lambda a: a.update(bias=torch.randn(9)), "bias has shape (9,), expected (10,), one value per class"),
    "bias dtype": (
        lambda a: a.update(bias=torch.randn(10).half()),
        "bias has dtype float16, expected that of input, float32",
    ),
    "float target": (
        lambda a: a.update(target=a["target"].float()),
        "target has dtype float32, expected int64 or int32 class indices (class probabilities are not supported)",
    ),
    "target shape": (
        lambda a: a.update(target=a["target"][:3]),
        "target has shape (3,), expected (4,), one class index per row",
    ),
    "batch shape": (
        lambda a: a.update(input=a["input"].view(2, 2, 8)),
        "target has shape (4,), expected that of input without its last dimension, (2, 2)",
    ),
    "token_weight shape": (
        lambda a: a.update(token_weight=torch.ones(5)),
        "token_weight has shape (5,), expected (4,), one weight per row",
    ),
    "ce_weight shape": (
        lambda a: a.update(ce_weight=torch.ones(9)),
        "ce_weight has shape (9,), expected (10,), one weight per class",
    ),
    "denominator with none": (
        lambda a: a.update(denominator=3, reduction="none"),
        "denominator was given with reduction 'none', expected 'mean' or 'sum'",
    ),
    "reduction": (
        lambda a: a.update(reduction="batchmean"),
        "reduction is 'batchmean', expected 'mean', 'sum' or 'none'",
    ),
    "smoothing": (
        lambda a: a.update(label_smoothing=-0.5),
        "label_smoothing is -0.5, expected a value between 0 and 1",
    ),
    "softcap": (lambda a: a.update(softcap=-1.0), "softcap is -1, expected a positive value or None"),
    "zero budget": (
        lambda a: a.update(memory_budget=0),
        "memory_budget is 0, expected a positive number of bytes or None",
    ),
    "negative budget": (
        lambda a: a.update(memory_budget=-5),
        "memory_budget is -5, expected a positive number of bytes or None",
    ),
    "accum_dtype": (
        lambda a: a.update(accum_dtype=torch.float16),
        "accum_dtype is float16, expected float32, the dtype of input, float32, or None",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(device, name):
    change, words = BAD[name]
    arguments = {"input": torch.randn(4, 8), "weight": torch.randn(10, 8), "target": torch.tensor([1, 2, 3, 4])}
    change(arguments)
    on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError) as caught:
        liger.fused_linear_ce(**on_device)
    assert str(caught.value).splitlines()[0] == f"fused_linear_ce: {words}"


@pytest.mark.parametrize("name", ["ce_weight", "token_weight", "denominator"])
def test_weights_that_require_grad_are_refused(device, name):
    x, weight, _, target = batch(4, 8, 4, device)
    extra = torch.ones((1,) if name == "denominator" else (4,), device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=rf"fused_linear_ce: {name} requires grad, but .* has no gradient for it"):
        liger.fused_linear_ce(x.requires_grad_(), weight, target, **{name: extra})


@pytest.mark.gpu
def test_weight_on_another_device(device):
    x, weight, _, target = batch(4, 8, 10, device)
    with pytest.raises(RuntimeError, match="fused_linear_ce: weight is on cpu, expected the device of input, cuda"):
        liger.fused_linear_ce(x, weight.cpu(), target)


# --- size ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_more_than_two_to_the_31_logits_in_one_chunk(device, reduction):
    rows, hidden, vocab, last = 17000, 64, 128256, 5
    budget = 2 * rows * vocab
    assert rows * vocab > 1 << 31
    if torch.cuda.mem_get_info()[0] < 4 * budget:
        pytest.skip("needs 18 GB of free GPU memory")
    x, weight, _, target = batch(rows, hidden, vocab, device, torch.bfloat16)
    target[-last:] = torch.arange(last, device=device)
    whole, tail = leaves(x, weight), leaves(x[-last:], weight)
    denominator = torch.tensor(float(last), device=device) if reduction == "mean" else None
    outputs = [
        liger.fused_linear_ce(
            *tensors, y, memory_budget=budget, reduction=reduction, denominator=denominator, return_logprobs=True
        )
        for tensors, y in ((whole, target), (tail, target[-last:]))
    ]
    for output in outputs:
        output.loss.sum().backward()
    torch.testing.assert_close(outputs[0].logprobs[-last:], outputs[1].logprobs, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(whole[0].grad[-last:], tail[0].grad, rtol=5e-2, atol=1e-3)
