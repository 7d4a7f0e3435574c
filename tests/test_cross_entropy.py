"""cross_entropy against float64, in every backend that runs here."""

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch, check_op, strided_like
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

import liger

REDUCTIONS = ["mean", "sum", "none"]
SHAPES = [(1, 7), (5, 129), (300, 64), (17, 1000), (3, 32003)]


def batch(rows, vocab, device, dtype=torch.float32, ignore_index=-100):
    logits = (3 * torch.randn(rows, vocab, device=device)).to(dtype)
    return logits, random_target(rows, vocab, device, ignore_index)


def check(logits, target, **chosen):
    check_op(
        lambda x: liger.cross_entropy(x, target, **chosen),
        lambda x: reference(x, target, **chosen)["loss"],
        [logits],
        LARGEST_LSE,
    )


# --- values and gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(device, name, reduction):
    chosen = options(name, 13, 129, device, reduction)
    check(*batch(13, 129, device, ignore_index=chosen.get("ignore_index", -100)), **chosen)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(device, shape, dtype, name):
    chosen = options(name, *shape, device)
    check(*batch(*shape, device, dtype, chosen.get("ignore_index", -100)), **chosen)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_weighted_mean_equals_torch_cross_entropy_loss(device, reduction):
    logits, target = batch(48, 97, device)
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


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(2, 5, 33), (2, 1, 3, 33), (33,)], ids=str)
def test_leading_dimensions(device, shape, reduction):
    logits = torch.randn(shape, device=device, requires_grad=True)
    target = torch.randint(0, 33, shape[:-1], device=device)
    output = liger.cross_entropy(logits, target, reduction=reduction, **RETURN_ALL)
    expected = reference(logits.detach().reshape(-1, 33).double(), target.reshape(-1), reduction=reduction)
    loss_shape = target.shape if reduction == "none" else ()
    assert output.loss.shape == output.z_loss.shape == loss_shape
    assert output.predicted_tokens.shape == output.logprobs.shape == output.entropy.shape == target.shape
    torch.testing.assert_close(output.loss.double().reshape(-1), expected["loss"].reshape(-1), rtol=1e-5, atol=1e-5)
    output.loss.sum().backward()
    assert logits.grad.shape == logits.shape


@pytest.mark.parametrize("make", [strided_like, lambda t: t.t().contiguous().t(), lambda t: t[:, :1].expand(t.shape)])
def test_strided_logits_and_gradient(device, make):
    logits, target = batch(9, 65, device)
    upstream = torch.randn(9, device=device)
    results = []
    for transform, spread in ((lambda t: make(t).contiguous(), lambda g: g), (make, strided_like)):
        leaf = transform(logits).detach().requires_grad_()
        loss = liger.cross_entropy(leaf, target, softcap=3.0, reduction="none")
        results.append([loss, *torch.autograd.grad(loss, leaf, spread(upstream))])
    for contiguous, strided in zip(*results, strict=True):
        torch.testing.assert_close(strided, contiguous, rtol=1e-6, atol=1e-7)


def test_expanded_upstream_gradient(device):
    logits, target = batch(6, 40, device)
    leaf = logits.requires_grad_()
    summed = torch.autograd.grad(liger.cross_entropy(leaf, target, reduction="none").sum(), leaf)[0]
    assert torch.equal(summed, torch.autograd.grad(liger.cross_entropy(leaf, target, reduction="sum"), leaf)[0])


def test_int32_and_strided_targets(device):
    logits, target = batch(12, 50, device)
    expected = liger.cross_entropy(logits, target, **RETURN_ALL)
    for other in (target.int(), strided_like(target), strided_like(target.int())):
        for a, b in zip(liger.cross_entropy(logits, other, **RETURN_ALL), expected, strict=True):
            assert torch.equal(a, b)


def test_weights_of_other_dtypes(device):
    logits, target = batch(12, 50, device)
    weights = torch.randint(1, 9, (50,), device=device) / 4
    tokens = torch.randint(1, 9, (12,), device=device) / 4
    expected = liger.cross_entropy(logits, target, ce_weight=weights, token_weight=tokens)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        got = liger.cross_entropy(logits, target, ce_weight=weights.to(dtype), token_weight=tokens.to(dtype))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("denominator", [7, 7.0, torch.tensor(7), torch.tensor([7.0]), torch.tensor(7.0).double()])
def test_denominators(device, denominator):
    logits, target = batch(12, 50, device)
    if isinstance(denominator, torch.Tensor):
        denominator = denominator.to(device)
    plain = liger.cross_entropy(logits, target, reduction="sum")
    for reduction in ("mean", "sum"):
        loss = liger.cross_entropy(logits, target, reduction=reduction, denominator=denominator)
        torch.testing.assert_close(loss, plain / 7, rtol=1e-6, atol=0)


def test_gradcheck():
    for name in OPTIONS:
        for reduction in REDUCTIONS:
            chosen = options(name, 4, 6, "cpu", reduction)
            logits, target = batch(4, 6, "cpu", torch.float64, chosen.get("ignore_index", -100))
            assert torch.autograd.gradcheck(
                lambda x, y=target, chosen=chosen: liger.cross_entropy(x, y, **chosen), logits.requires_grad_()
            )


# --- the edges ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_rows(device, reduction):
    logits = torch.randn(0, 9, device=device, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64, device=device)
    output = liger.cross_entropy(logits, target, reduction=reduction, **RETURN_ALL)
    expected = torch.nn.functional.cross_entropy(logits.detach(), target, reduction=reduction)
    torch.testing.assert_close(output.loss, expected, equal_nan=True)
    assert output.token_accuracy.isnan()
    output.loss.sum().backward()
    assert logits.grad.shape == (0, 9)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_ignored_as_torch(device, reduction):
    logits = torch.randn(5, 9, device=device)
    target = torch.full((5,), -100, device=device)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    output = liger.cross_entropy(ours, target, reduction=reduction, **RETURN_ALL)
    expected = torch.nn.functional.cross_entropy(theirs, target, reduction=reduction)
    torch.testing.assert_close(output.loss, expected, equal_nan=True)
    assert output.token_accuracy.isnan()
    assert torch.equal(output.predicted_tokens, target.new_full((5,), -1))
    output.loss.sum().backward()
    expected.sum().backward()
    assert torch.equal(ours.grad, theirs.grad) and not ours.grad.any()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_ignored_rows_may_hold_anything(device, poison):
    logits, target = batch(6, 33, device)
    target[2] = -100
    clean = liger.cross_entropy(logits, target, label_smoothing=0.1, lse_square_scale=0.1, **RETURN_ALL)
    logits[2] = poison
    leaf = logits.requires_grad_()
    output = liger.cross_entropy(leaf, target, label_smoothing=0.1, lse_square_scale=0.1, **RETURN_ALL)
    for a, b in zip(output, clean, strict=True):
        assert torch.equal(a, b)
    output.loss.backward()
    assert not leaf.grad[2].any() and leaf.grad.isfinite().all()


def test_minus_infinity_where_it_plays_no_role(device):
    logits, target = batch(4, 21, device)
    target[:] = 3
    logits[:, 10:] = -torch.inf
    ours = logits.clone().requires_grad_()
    output = liger.cross_entropy(ours, target, **RETURN_ALL)
    output.loss.backward()
    expected = reference(logits[:, :10].double(), target)
    torch.testing.assert_close(output.loss.double(), expected["loss"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.entropy.double(), expected["entropy"], rtol=1e-5, atol=1e-6)
    assert ours.grad.isfinite().all() and not ours.grad[:, 10:].any()


def test_loss_is_infinite_where_the_target_is_impossible(device):
    logits, target = batch(3, 21, device)
    target[:] = 3
    logits[0, 3] = -torch.inf
    loss = liger.cross_entropy(logits, target, reduction="none")
    assert loss[0] == torch.inf and loss[1:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_logits(device, dtype):
    """Nothing overflows, and the loss is right to the float32 rounding of numbers as large as the logits."""
    size = 6e4 if dtype == torch.float16 else 1e30
    logits = torch.tensor([[size, 0.0, -size], [-size, -size, -size], [size, size, -size]], device=device).to(dtype)
    target = torch.tensor([0, 1, 1], device=device)
    leaf = logits.requires_grad_()
    loss = liger.cross_entropy(leaf, target, reduction="none")
    expected = torch.tensor([1.0, 3.0, 2.0], device=device).log()
    torch.testing.assert_close(loss, expected, rtol=0, atol=size * torch.finfo(torch.float32).eps)
    loss.sum().backward()
    assert leaf.grad.isfinite().all() and not leaf.grad[0].any()


def test_one_class(device):
    logits = torch.randn(3, 1, device=device, requires_grad=True)
    target = torch.zeros(3, dtype=torch.int64, device=device)
    output = liger.cross_entropy(logits, target, label_smoothing=0.1, **RETURN_ALL)
    output.loss.backward()
    for zero in (output.loss, output.logprobs, output.entropy, output.predicted_tokens, logits.grad):
        assert not zero.any()
    assert output.token_accuracy == 1


def test_ties_give_the_lowest_index(device):
    logits = torch.zeros(3, 5000, device=device)
    logits[0, 4000:] = 1.0
    logits[1, [1023, 1024, 4999]] = 2.0
    target = torch.tensor([4000, 1024, 0], device=device)
    output = liger.cross_entropy(logits, target, **RETURN_ALL)
    assert output.predicted_tokens.tolist() == [4000, 1023, 0]
    torch.testing.assert_close(output.token_accuracy.item(), 2 / 3)


def test_saturated_softcap_keeps_the_prediction(device):
    logits = torch.tensor([[50.0, 60.0, 55.0]], device=device)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    assert liger.cross_entropy(logits, target, softcap=1.0, return_predicted_tokens=True).predicted_tokens.item() == 1


# --- metrics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "all", "all and denominator"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_metrics(device, name, reduction):
    chosen = options(name, 23, 300, device, reduction)
    logits, target = batch(23, 300, device, ignore_index=chosen.get("ignore_index", -100))
    target[::5] = logits[::5].argmax(-1)
    output = liger.cross_entropy(logits, target, **chosen, **RETURN_ALL)
    plain, exact = reference(logits, target, **chosen), reference(logits.double(), target, **chosen)
    assert torch.equal(output.predicted_tokens, exact["predicted_tokens"])
    for metric in ("loss", "z_loss", "token_accuracy", "logprobs", "entropy"):
        assert_as_exact_as_torch(getattr(output, metric), plain[metric], exact[metric], metric, LARGEST_LSE)


@pytest.mark.parametrize("metric", METRICS)
def test_one_metric_alone(device, metric):
    logits, target = batch(11, 77, device)
    both = {"lse_square_scale": 0.01, "token_weight": torch.rand(11, device=device)}
    everything = liger.cross_entropy(logits, target, **both, **RETURN_ALL)
    alone = liger.cross_entropy(logits, target, **both, **{f"return_{metric}": True})
    assert isinstance(alone, liger.CrossEntropyOutput)
    for field in liger.CrossEntropyOutput._fields:
        if field in ("loss", metric):
            assert torch.equal(getattr(alone, field), getattr(everything, field))
        else:
            assert getattr(alone, field) is None


def test_dtypes_of_results(device):
    for dtype in DTYPES:
        logits, target = batch(4, 9, device, dtype)
        for field, value in liger.cross_entropy(logits, target, **RETURN_ALL)._asdict().items():
            assert value.dtype == (torch.int64 if field == "predicted_tokens" else torch.float32), field
            assert not value.requires_grad


def test_results_not_asked_for_are_empty(device):
    logits, target = batch(4, 9, device)
    no = [False] * 6
    loss, *others, lse, used = torch.ops.liger.cross_entropy_forward(
        logits, target, None, None, None, -100, 0.0, 0.0, None, "mean", *no
    )
    assert loss.shape == used.shape == () and lse.shape == (4,)
    assert [t.shape for t in others] == [(0,)] * 5
    assert used == (target != -100).sum()


def test_only_the_loss_is_differentiable(device):
    logits, target = batch(4, 9, device)
    output = liger.cross_entropy(logits.requires_grad_(), target, **RETURN_ALL)
    assert output.loss.requires_grad and output.loss.grad_fn is not None
    assert not any(value.requires_grad for value in output[1:])


def test_mean_z_loss_is_a_class_weighted_mean(device):
    logits, target = batch(30, 12, device)
    w = torch.rand(12, device=device) + 0.1
    got = liger.cross_entropy(logits, target, ce_weight=w, lse_square_scale=0.5, return_z_loss=True).z_loss
    live = target != -100
    rows = 0.5 * logits.double().logsumexp(-1).square()
    weights = w.double()[target.clamp_min(0)] * live
    torch.testing.assert_close(got.double(), (rows * weights).sum() / weights.sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_low_precision_loss_keeps_float32_digits(device, dtype):
    logits, target = batch(64, 500, device, dtype)
    output = liger.cross_entropy(logits, target, lse_square_scale=1e-3, return_z_loss=True)
    exact = reference(logits.double(), target, lse_square_scale=1e-3)
    torch.testing.assert_close(output.loss.double(), exact["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(output.z_loss.double(), exact["z_loss"], rtol=1e-6, atol=0)


# --- autograd -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("grad_mode", [False, True])
def test_forward_writes_nothing(device, inplace, grad_mode):
    logits, target = batch(8, 33, device)
    before, version = logits.clone(), logits._version
    with torch.set_grad_enabled(grad_mode):
        liger.cross_entropy(logits, target, inplace=inplace, **RETURN_ALL)
    assert torch.equal(logits, before) and logits._version == version


def test_backward_writes_nothing_and_repeats(device):
    logits, target = batch(8, 33, device)
    leaf = logits.clone().requires_grad_()
    version = leaf._version
    loss = 3 * liger.cross_entropy(leaf, target)
    first = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    second = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    first.zero_()
    third = torch.autograd.grad(loss, leaf)[0]
    assert torch.equal(second, third) and second.any()
    assert torch.equal(leaf, logits) and leaf._version == version
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inplace_gives_the_same_gradient_over_the_logits(device, dtype, reduction, name):
    chosen = options(name, 8, 33, device, reduction)
    values, target = batch(8, 33, device, dtype, chosen.get("ignore_index", -100))
    grads = []
    for inplace in (False, True):
        leaf = values.clone().requires_grad_()
        logits = leaf * 1
        loss = liger.cross_entropy(logits, target, inplace=inplace, **chosen)
        assert torch.equal(logits, values)
        upstream = []
        logits.register_hook(upstream.append)
        loss.sum().backward()
        assert (upstream[0].data_ptr() == logits.data_ptr()) == inplace
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_inplace_makes_a_later_use_of_the_logits_raise(device):
    values, target = batch(8, 33, device)
    leaf = values.requires_grad_()
    logits = leaf * 1
    other = logits.square().sum()
    liger.cross_entropy(logits, target, inplace=True).backward(retain_graph=False, inputs=[logits])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_inplace_does_not_write_strangers(device):
    """Logits that overlap themselves, and the rest of a larger tensor, stay as they are."""
    leaf = torch.randn(6, 1, device=device, requires_grad=True)
    target = torch.arange(6, device=device)
    plain = liger.cross_entropy((leaf * 1).expand(6, 10), target)
    shared = liger.cross_entropy((leaf * 1).expand(6, 10), target, inplace=True)
    assert torch.equal(*(torch.autograd.grad(loss, leaf)[0] for loss in (plain, shared)))

    for part in (slice(1, 7), (slice(0, 6), slice(2, 12))):
        whole = torch.randn(9, 13, device=device, requires_grad=True) * 1
        before, inside = whole.detach().clone(), torch.zeros(9, 13, dtype=torch.bool, device=device)
        inside[part] = True
        liger.cross_entropy(whole[part], target, inplace=True).backward()
        assert torch.equal(whole != before, inside)


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.view(2, 4, 33)])
def test_inplace_refuses_a_leaf(device, view):
    logits, target = batch(8, 33, device)
    leaf = logits.requires_grad_()
    with pytest.raises(RuntimeError, match="logits is a leaf that requires grad"):
        liger.cross_entropy(view(leaf), target.view(view(leaf).shape[:-1]), inplace=True)


def test_inplace_refuses_a_kept_graph(device):
    logits, target = batch(8, 33, device)
    loss = liger.cross_entropy(logits.requires_grad_() * 1, target, inplace=True)
    with pytest.raises(RuntimeError, match=r"cross_entropy: inplace=True .* retain_graph=True"):
        loss.backward(retain_graph=True)


def test_the_op_that_writes_refuses_autograd(device):
    logits, target = batch(3, 9, device)
    lse, one = logits.logsumexp(-1), torch.ones((), device=device)
    arguments = (target, lse, one, None, None, -100, 0.0, 0.0, None)
    expected = torch.ops.liger.cross_entropy_backward(one, logits, *arguments)
    with pytest.raises(RuntimeError, match="cross_entropy_backward_ writes over its arguments"):
        torch.ops.liger.cross_entropy_backward_(one, logits.clone().requires_grad_(), *arguments)
    version = logits._version
    torch.ops.liger.cross_entropy_backward_(one, logits, *arguments)
    assert torch.equal(logits, expected) and logits._version > version


def test_no_second_derivative(device):
    logits, target = batch(3, 9, device)
    leaf = logits.requires_grad_()
    grad = torch.autograd.grad(liger.cross_entropy(leaf, target), leaf, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="cross_entropy has no second derivative"):
        grad.square().sum().backward()


def test_same_bits_twice(device):
    logits, target = batch(130, 1000, device)
    leaf = logits.requires_grad_()
    runs = []
    for _ in range(2):
        output = liger.cross_entropy(leaf, target, label_smoothing=0.1, lse_square_scale=1e-3, **RETURN_ALL)
        runs.append([*output, *torch.autograd.grad(output.loss, leaf)])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_block_size_changes_no_bit(monkeypatch):
    logits, target = batch(29, 40, "cpu")
    leaf = logits.requires_grad_()
    runs = []
    for size in (1 << 22, 100):
        monkeypatch.setattr("liger.ops._rows._CPU_BLOCK", size)
        output = liger.cross_entropy(leaf, target, label_smoothing=0.1, **RETURN_ALL)
        runs.append([*output, *torch.autograd.grad(output.loss, leaf)])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


# --- bad input ----------------------------------------------------------------------------------------------------


def test_target_out_of_range_on_the_cpu():
    target = torch.tensor([1, 2, -100, 17])
    words = "cross_entropy: target at row 3 is 17, expected 0 <= target < 10 or ignore_index -100"
    with pytest.raises(RuntimeError, match=f"^{words}$"):
        liger.cross_entropy(torch.randn(4, 10), target)
    with pytest.raises(RuntimeError, match="target at row 0 is -1, expected 0 <= target < 10 or ignore_index 3"):
        liger.cross_entropy(torch.randn(2, 10), torch.tensor([-1, 3]), ignore_index=3)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [10, -1, 1 << 40])
def test_target_out_of_range_on_a_gpu_gives_nan(device, wrong):
    logits = torch.randn(4, 10, device=device, requires_grad=True)
    target = torch.tensor([1, wrong, 3, -100], device=device)
    output = liger.cross_entropy(logits, target, reduction="none", return_logprobs=True)
    assert output.loss.isnan().tolist() == output.logprobs.isnan().tolist() == [False, True, False, False]
    output.loss.sum().backward()
    assert logits.grad.isnan().all(-1).tolist() == [False, True, False, False]
    assert liger.cross_entropy(logits, target).isnan()


BAD = {
    "float target": (
        lambda a: a.update(target=a["target"].float()),
        "target has dtype float32, expected int64 or int32 class indices (class probabilities are not supported)",
    ),
    "target shape": (
        lambda a: a.update(target=a["target"][:3]),
        "target has shape (3,), expected (4,), one class index per row",
    ),
    "integer logits": (
        lambda a: a.update(logits=a["logits"].long()),
        "logits has dtype int64, expected float16, bfloat16, float32 or float64",
    ),
    "no classes": (
        lambda a: a.update(logits=a["logits"][:, :0]),
        "logits has shape (4, 0), expected (rows, classes) with at least one class",
    ),
    "ce_weight shape": (
        lambda a: a.update(ce_weight=torch.ones(9)),
        "ce_weight has shape (9,), expected (10,), one weight per class",
    ),
    "ce_weight dtype": (
        lambda a: a.update(ce_weight=torch.ones(10).long()),
        "ce_weight has dtype int64, expected float16, bfloat16, float32 or float64",
    ),
    "token_weight shape": (
        lambda a: a.update(token_weight=torch.ones(5)),
        "token_weight has shape (5,), expected (4,), one weight per row",
    ),
    "denominator shape": (
        lambda a: a.update(denominator=torch.ones(2)),
        "denominator has shape (2,), expected one element",
    ),
    "denominator dtype": (
        lambda a: a.update(denominator=torch.ones((), dtype=torch.bool)),
        "denominator has dtype bool, expected a floating dtype, int64 or int32",
    ),
    "denominator with none": (
        lambda a: a.update(denominator=3, reduction="none"),
        "denominator was given with reduction 'none', expected 'mean' or 'sum'",
    ),
    "reduction": (
        lambda a: a.update(reduction="average"),
        "reduction is 'average', expected 'mean', 'sum' or 'none'",
    ),
    "smoothing": (
        lambda a: a.update(label_smoothing=1.5),
        "label_smoothing is 1.5, expected a value between 0 and 1",
    ),
    "softcap": (lambda a: a.update(softcap=0.0), "softcap is 0, expected a positive value or None"),
    "batch shape": (
        lambda a: a.update(logits=a["logits"].view(2, 2, 10), target=a["target"]),
        "target has shape (4,), expected that of logits without its last dimension, (2, 2)",
    ),
    "token_weight batch shape": (
        lambda a: a.update(
            logits=a["logits"].view(4, 1, 10), target=a["target"].view(4, 1), token_weight=torch.ones(1, 4)
        ),
        "token_weight has shape (1, 4), expected that of logits without its last dimension, (4, 1)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(device, name):
    change, words = BAD[name]
    arguments = {"logits": torch.randn(4, 10), "target": torch.tensor([1, 2, 3, 4])}
    change(arguments)
    on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError) as caught:
        liger.cross_entropy(**on_device)
    assert str(caught.value).splitlines()[0] == f"cross_entropy: {words}"


@pytest.mark.parametrize("name", ["ce_weight", "token_weight", "denominator"])
def test_weights_that_require_grad_are_refused(device, name):
    logits, target = batch(4, 4, device)
    weight = torch.ones((1,) if name == "denominator" else (4,), device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=rf"cross_entropy: {name} requires grad, but .* has no gradient for it"):
        liger.cross_entropy(logits.requires_grad_(), target, **{name: weight})


@pytest.mark.gpu
def test_weight_on_another_device(device):
    logits, target = batch(4, 9, device)
    with pytest.raises(RuntimeError, match="cross_entropy: ce_weight is on cpu, expected the device of the rows, cuda"):
        liger.cross_entropy(logits, target, ce_weight=torch.ones(9))


# --- size ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("inplace", [False, True])
def test_more_than_two_to_the_31_logits(device, inplace):
    rows, vocab, last = 17000, 128256, 5
    assert rows * vocab > 1 << 31
    if torch.cuda.mem_get_info()[0] < 5 * rows * vocab * 2:
        pytest.skip("needs 22 GB of free GPU memory")
    logits = torch.randn(rows, vocab, device=device, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(0, vocab, (rows,), device=device)
    tail = logits[-last:].detach().clone().requires_grad_()
    output = liger.cross_entropy(logits * 1, target, reduction="sum", inplace=inplace, return_predicted_tokens=True)
    output.loss.backward()
    expected = liger.cross_entropy(tail, target[-last:], reduction="sum", return_predicted_tokens=True)
    expected.loss.backward()
    assert torch.equal(output.predicted_tokens[-last:], expected.predicted_tokens)
    torch.testing.assert_close(logits.grad[-last:], tail.grad, rtol=1e-2, atol=1e-6)
    per_row = liger.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(per_row[-last:].sum(), expected.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(per_row.sum(), output.loss, rtol=1e-5, atol=0)
