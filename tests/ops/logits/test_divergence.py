# SPDX-License-Identifier: BSD-3-Clause
"""KL, generalised JSD and total variation against float64, in every backend; docs/guides/divergence.md in
code."""

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch, compiled, strided_like
from cross_entropy_reference import LARGEST_LSE
from errors import error_about

import liger

FORMS = {
    "kl": (liger.kl_div, {}),
    "reverse kl": (liger.kl_div, {"reverse": True}),
    "jsd": (liger.jsd, {}),
    "jsd 0.1": (liger.jsd, {"beta": 0.1}),
    "jsd 0": (liger.jsd, {"beta": 0.0}),
    "jsd 1": (liger.jsd, {"beta": 1.0}),
    "tvd": (liger.tvd, {}),
}
FINITE = ("jsd", "jsd 0.1", "tvd")
# One vector, rows that end within one, several vectors to a thread.
SHAPES = [(1, 1), (7, 129), (3, 9001)]


def plain(name, student, teacher, temperature=1.0, log_probs=False):
    """The loss of each row by its definition."""
    wide = torch.float64 if student.dtype == torch.float64 else torch.float32
    log_q, log_p = student.to(wide), teacher.to(wide)
    if not log_probs:
        log_q, log_p = ((z / temperature).log_softmax(-1) for z in (log_q, log_p))
    p, q = log_p.exp(), log_q.exp()
    if name == "tvd":
        return (p - q).abs().sum(-1) / 2
    if name in ("kl", "jsd 0"):
        return (p * (log_p - log_q)).sum(-1)
    if name in ("reverse kl", "jsd 1"):
        return (q * (log_q - log_p)).sum(-1)
    beta = FORMS[name][1].get("beta", 0.5)
    log_m = (beta * p + (1 - beta) * q).log()
    return (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)


def ours(name, student, teacher, *arguments, **options):
    function, form = FORMS[name]
    return function(student, teacher, *arguments, **form, **options)


def make(device, rows, classes, dtype=torch.float32):
    return [(torch.randn(rows, classes, device=device) * 2).to(dtype) for _ in range(2)]


def with_gradient(function, student, upstream):
    student = student.detach().requires_grad_()
    loss = function(student)
    return loss, torch.autograd.grad(loss, student, upstream.to(loss.dtype))[0]


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradient(device, shape, dtype, name):
    pair, upstream = make(device, *shape, dtype), torch.randn(shape[0], device=device)

    def run(function, s, t, **options):
        return with_gradient(lambda leaf: function(name, leaf, t, **options), s, upstream)

    for options in ({}, {"temperature": 2.5}, {"log_probs": True}):
        if "log_probs" in options:
            pair = [t.float().log_softmax(-1).to(dtype) for t in pair]
        student, teacher = pair
        exact = run(plain, student.double(), teacher.double(), **options)
        theirs = run(plain, student, teacher, **options)
        for s in (student, strided_like(student)):
            results = run(ours, s, teacher, reduction="none", **options)
            assert results[0].dtype == torch.float32 and results[1].dtype == dtype
            for what, *values in zip(("loss", "gradient"), results, theirs, exact, strict=True):
                assert_as_exact_as_torch(*values, f"{what} {options}", intermediate=LARGEST_LSE)


@pytest.fixture
def torch_backend():
    """The one that computes float64."""
    with liger.use_backend("torch"):
        yield


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.usefixtures("torch_backend")
def test_gradient_in_float64(name):
    student, teacher = make("cpu", 3, 6, torch.float64)
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: ours(name, s, teacher, temperature=1.7), (student,))
    assert torch.autograd.gradcheck(lambda s: ours(name, s, teacher, log_probs=True), (student,))


@pytest.mark.parametrize("name", FORMS)
def test_reductions_weights_and_masks(device, name):
    student, teacher = (t.view(2, 4, 33) for t in make(device, 8, 33))
    target = torch.randint(5, (2, 4), device=device)
    target[0, 1] = target[1, 3] = -100
    token_weight = torch.rand(2, 4, device=device)
    # What ignored rows hold does not matter.
    student[0, 1] = torch.nan
    rows = plain(name, student, teacher).masked_fill(target == -100, 0.0)
    weighted = rows * token_weight
    for expected, options in (
        (weighted, {"reduction": "none"}),
        (weighted.sum(), {"reduction": "sum"}),
        (weighted.sum() / 6, {}),
        (weighted.sum() / 2, {"reduction": "batchmean"}),
        (weighted.sum() / 5, {"denominator": torch.tensor(5, device=device)}),
        (weighted.sum() / 5, {"denominator": 5, "reduction": "sum"}),
    ):
        leaf = student.clone().requires_grad_()
        loss = ours(name, leaf, teacher, target, token_weight=token_weight, **options)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        assert grad.isfinite().all() and not grad[0, 1].any() and not grad[1, 3].any()
    torch.testing.assert_close(
        ours(name, student[1], teacher[1]), plain(name, student[1], teacher[1]).mean(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", ["kl", *FINITE])
def test_classes_that_the_teacher_rules_out(device, name):
    student, teacher = make(device, 4, 300)
    teacher[:, 100:] = -torch.inf
    loss, grad = with_gradient(
        lambda s: ours(name, s, teacher, reduction="none"), student, torch.ones(4, device=device)
    )
    # A logit of -1e4 gives a probability of zero as well, and no infinity to the plain formula.
    almost = teacher.double().clamp_min(-1e4)
    expected, expected_grad = with_gradient(
        lambda s: plain(name, s, almost), student.double(), torch.ones(4, device=device)
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("beta", [2.5e-10, 1e-7, 1 - 1e-7, 1 - 2.5e-10])
def test_mixtures_of_nearly_one_distribution(device, beta):
    student, teacher = (20 * logits for logits in make(device, 4, 300))
    loss, grad = with_gradient(
        lambda s: liger.jsd(s, teacher, beta=beta, reduction="none"), student, torch.ones(4, device=device)
    )
    assert ((loss >= 0) & (loss < 1e-4)).all() and grad.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", FORMS)
def test_nan_stays(device, name, value):
    """Of a student that has diverged."""
    student, teacher = make(device, 3, 40)
    student[0, 3] = value
    loss = ours(name, student, teacher, reduction="none")
    assert loss[0].isnan() and loss[1:].isfinite().all()


@pytest.mark.parametrize("name", FORMS)
def test_classes_masked_by_the_most_negative_number(device, name):
    """More of them than a thread reads at first."""
    student, teacher = make(device, 2, 20000)
    for logits in (student, teacher):
        logits[:, 4:9000] = torch.finfo(logits.dtype).min
    loss, grad = with_gradient(
        lambda s: ours(name, s, teacher, reduction="none"), student, torch.ones(2, device=device)
    )
    rest = [torch.cat([logits[:, :4], logits[:, 9000:]], 1).double() for logits in (student, teacher)]
    expected, expected_grad = with_gradient(
        lambda s: plain(name, s, rest[1]), rest[0], torch.ones(2, device=device)
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    actual = torch.cat([grad[:, :4], grad[:, 9000:]], 1)
    torch.testing.assert_close(actual.double(), expected_grad, rtol=1e-4, atol=1e-7)
    assert not grad[:, 4:9000].any()


def test_reverse_kl_of_a_class_that_the_teacher_rules_out_is_infinite(device):
    student, teacher = make(device, 1, 8)
    teacher[0, 3] = -torch.inf
    assert liger.kl_div(student, teacher, reverse=True) == torch.inf


@pytest.mark.parametrize("name", FINITE)
def test_disjoint_supports(device, name):
    """Neither has what the other has: the largest value, and no nan."""
    student = torch.tensor([[0.0, -torch.inf]], device=device)
    loss, grad = with_gradient(
        lambda s: ours(name, s, student.flip(1)), student, torch.ones((), device=device)
    )
    beta = torch.tensor(FORMS[name][1].get("beta", 0.5))
    largest = 1.0 if name == "tvd" else -(beta * beta.log() + (1 - beta) * (1 - beta).log())
    torch.testing.assert_close(loss.cpu(), torch.as_tensor(largest))
    assert not grad.any()


@pytest.mark.parametrize("name", FORMS)
def test_equal_distributions_and_huge_logits(device, name):
    """A large part that all logits have in common is lost to no rounding."""
    student = (torch.randn(3, 400, device=device) * 1024).round() / 1024
    shifted = student + 8192.0
    loss, grad = with_gradient(
        lambda s: ours(name, s, shifted, reduction="sum"), student, torch.ones((), device=device)
    )
    exact = plain(name, student.double(), shifted.double()).sum()
    assert abs(loss.double() - exact) < 1e-5 and grad.abs().max() < 1e-5


def test_temperature_is_not_squared(device):
    student, teacher = make(device, 5, 20)
    scaled = liger.kl_div(student / 3, teacher / 3)
    torch.testing.assert_close(liger.kl_div(student, teacher, temperature=3.0), scaled)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.usefixtures("torch_backend")
def test_losses_in_float64(name):
    student, teacher = make("cpu", 6, 40, torch.float64)
    torch.testing.assert_close(
        ours(name, student, teacher, reduction="none"), plain(name, student, teacher), rtol=1e-13, atol=1e-15
    )


@pytest.mark.gpu
@pytest.mark.parametrize("ignored", [False, True])
def test_most_classes_in_rows_that_lie_differently(ignored):
    """2^31 - 1 of them, by single elements: none of what comes after the last is touched."""
    classes = 2**31 - 1
    with compiled() as device:
        if torch.cuda.mem_get_info()[0] < 14 << 30:
            pytest.skip("needs 14 GB of free GPU memory")
        student = torch.zeros(classes + 1, device=device, dtype=torch.float16)[1:].view(1, classes)
        teacher = torch.zeros(classes, device=device, dtype=torch.float16).view(1, classes)
        target = torch.full((1,), -100 if ignored else 0, device=device)
        options = ("forward_kl", 0.5, 1.0, False, -100, True)
        losses, _, gradient = torch.ops.liger.divergence_forward(
            student, teacher, target, None, *options, True
        )
        assert losses.abs() < 1e-2 and not gradient[0, -3:].any() and not gradient[0, :3].any()


def test_mean_of_no_rows(device):
    """nan, as of liger.cross_entropy; the gradients are empty."""
    for shape, nan in (((0, 7), ("mean", "batchmean")), ((2, 0, 7), ("mean",))):
        for reduction in ("mean", "batchmean", "sum"):
            empty = torch.empty(shape, device=device, requires_grad=True)
            loss = liger.jsd(empty, empty.detach(), reduction=reduction)
            loss.backward()
            assert loss.isnan() == (reduction in nan) and empty.grad.shape == shape
    assert liger.jsd(torch.empty(0, 7, device=device), torch.empty(0, 7, device=device), denominator=3) == 0


@pytest.mark.parametrize("function", [liger.kl_div, liger.jsd, liger.tvd])
@pytest.mark.parametrize("pair", [(DTYPES[-1], torch.float32), (torch.float32, DTYPES[-1])], ids=str)
def test_dtypes_are_promoted(device, function, pair):
    student, teacher = (t.to(dtype) for t, dtype in zip(make(device, 4, 9), pair, strict=True))
    for reduction in ("mean", "none"):
        results = []
        for cast in (lambda t: t, torch.Tensor.float):
            leaf = student.clone().requires_grad_()
            loss = function(cast(leaf), cast(teacher), reduction=reduction)
            loss.sum().backward()
            results.append((loss, leaf.grad))
        assert results[0][1].dtype == pair[0]
        for ours, promoted in zip(*results, strict=True):
            assert torch.equal(ours, promoted)


def test_bad_input(device):
    student, teacher = make(device, 4, 9)

    def refuses(match, *arguments, function=liger.jsd, **options):
        with pytest.raises(error_about(match), match=match):
            function(*arguments, **options)

    refuses(
        "tvd: temperature is 2 with log_probs", student, teacher, function=liger.tvd, temperature=2.0, log_probs=True
    )  # fmt: skip
    refuses(
        "jsd: denominator was given with reduction 'none'", student, teacher, denominator=2, reduction="none"
    )
    refuses("jsd: denominator has shape", student, teacher, denominator=torch.ones(2, device=device))
    forward, row = torch.ops.liger.divergence_forward, torch.zeros(4, device=device)
    for match, weight, divergence in (
        ("divergence is 'hellinger'", None, "hellinger"),
        (r"divergence_forward: row_weight has shape \(3,\)", row[1:], "jsd"),
        ("divergence_forward: row_weight has dtype float64, expected float32", row.double(), "jsd"),
    ):
        options = (divergence, 0.5, 1.0, False, -100, False, True)
        refuses(match, student, teacher, None, weight, *options, function=forward)
    refuses(
        "divergence: row_weight requires grad", student.clone().requires_grad_(), teacher, None,
        row.clone().requires_grad_(), "jsd", 0.5, 1.0, False, -100, False, True, function=forward,
    )  # fmt: skip
