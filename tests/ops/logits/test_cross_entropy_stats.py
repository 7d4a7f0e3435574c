# SPDX-License-Identifier: BSD-3-Clause
"""The statistics of logits that are some of the classes, and their gradient, against float64 in every
backend."""

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch, strided_like
from cross_entropy_reference import LARGEST_LSE

stats_op = torch.ops.liger.cross_entropy_stats.default
backward_op = torch.ops.liger.cross_entropy_stats_backward.default
backward_op_ = torch.ops.liger.cross_entropy_stats_backward_.default

VOCAB, START = 500, 130
# Rows and classes here: one block, several vectors to a thread, a row that is cut into tiles.
SHAPES = [(1, 1), (7, 129), (3, 9001)]
OPTIONS = {"plain": {}, "softcap": {"softcap": 5.0}, "class weights": {"weighted": True}}
OPTIONS["both"] = OPTIONS["softcap"] | OPTIONS["class weights"]


def make(device, rows, classes, dtype=torch.float32, softcap=None, weighted=False):
    """(logits, target, class weights or None, softcap); targets lie before, among and after the classes
    here."""
    logits = (torch.randn(rows, classes, device=device) * 3).to(dtype)
    target = torch.randint(START + classes + 100, (rows,), device=device)
    target[0] = START + classes - 1
    if rows > 2:
        target[1], target[2] = -100, START - 1
    return logits, target, torch.rand(classes, device=device) + 0.1 if weighted else None, softcap


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def here(target, classes):
    column = target.long() - START
    present = (column >= 0) & (column < classes) & (target != -100)
    return torch.where(present, column, 0), present


def plain_stats(logits, target, ce_weight, softcap):
    z = capped(logits if logits.dtype == torch.float64 else logits.float(), softcap)
    column, present = here(target, z.shape[1])
    high = z.amax(-1)
    chosen = torch.where(present, z.gather(1, column[:, None])[:, 0], 0.0)
    below = z - high[:, None]
    class_sum = (below if ce_weight is None else below * ce_weight).sum(-1)
    stats = torch.stack([high, (z - high[:, None]).exp().sum(-1), chosen, class_sum])
    ignored = torch.tensor([0.0, 1.0, 0.0, 0.0], device=z.device, dtype=z.dtype)[:, None]
    return torch.where(target == -100, ignored, stats)


def plain_gradient(
    logits, target, reference, coef_exp, coef_target, coef_class, ce_weight, softcap, coef_log=None
):
    wide = logits if logits.dtype == torch.float64 else logits.float()
    z = capped(wide, softcap)
    column, present = here(target, z.shape[1])
    log = z - reference[:, None]
    grad = (
        coef_exp[:, None] if coef_log is None else coef_exp[:, None] + coef_log[:, None] * log
    ) * log.exp()
    grad = grad.scatter_add(1, column[:, None], torch.where(present, -coef_target, 0.0)[:, None])
    grad = grad - coef_class[:, None] * (1.0 if ce_weight is None else ce_weight)
    if softcap is not None:
        grad = grad * (1 - (z / softcap) ** 2)
    return grad.masked_fill((target == -100)[:, None], 0.0).to(logits.dtype)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics(device, shape, dtype, name):
    logits, target, ce_weight, softcap = make(device, *shape, dtype, **OPTIONS[name])
    expected = plain_stats(logits, target, ce_weight, softcap)
    exact = plain_stats(logits.double(), target, ce_weight, softcap)
    for given in (logits, strided_like(logits)):
        stats = stats_op(given, target.int(), ce_weight, START, -100, softcap, True)
        assert stats.dtype == torch.float32
        for i, what in enumerate(("max", "sum", "target", "class sum")):
            # exp turns the rounding of z - max into a relative error.
            assert_as_exact_as_torch(stats[i], expected[i], exact[i], what, intermediate=LARGEST_LSE)
    three = stats_op(logits, target, ce_weight, START, -100, softcap, False)
    # A kernel that computes less may round differently.
    four = stats_op(logits, target, ce_weight, START, -100, softcap, True)
    torch.testing.assert_close(three, four[:3], rtol=1e-6, atol=1e-6)


@pytest.mark.covering(2)
@pytest.mark.parametrize("with_log", [False, True], ids=["", "logs"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradient(device, shape, dtype, name, with_log):
    logits, target, ce_weight, softcap = make(device, *shape, dtype, **OPTIONS[name])
    rows = shape[0]
    reference = capped(logits.float(), softcap).logsumexp(-1) + torch.rand(rows, device=device)
    coef_exp, coef_target, coef_class = (torch.randn(rows, device=device) for _ in range(3))
    coefficients = (reference, coef_exp, coef_target, coef_class)
    coef_log = torch.randn(rows, device=device) if with_log else None
    expected = plain_gradient(logits, target, *coefficients, ce_weight, softcap, coef_log)
    wide = (*(c.double() for c in coefficients), ce_weight, softcap, coef_log.double() if with_log else None)
    exact = plain_gradient(logits.double(), target, *wide)
    for given in (logits, strided_like(logits), torch.cat([logits, logits], 1)[:, : shape[1]]):
        arguments = (target, *coefficients, ce_weight, START, -100, softcap, coef_log)
        grad = backward_op(given, *arguments)
        assert grad.dtype == dtype
        assert_as_exact_as_torch(grad, expected, exact, intermediate=LARGEST_LSE)
        given = given.clone(memory_format=torch.preserve_format)
        backward_op_(given, *arguments)
        assert torch.equal(given, grad)


def test_softmax_minus_onehot(device):
    """The gradient of every loss of log-probabilities: c * (softmax - onehot), from two statistics and one
    number per row."""
    logits, target, _, _ = make(device, 6, 41)
    target = torch.randint(41, (6,), device=device)
    c = torch.randn(6, device=device)
    largest, total, _ = stats_op(logits, target, None, 0, -100, None, False)
    grad = backward_op(logits, target, largest, c / total, c, None, None, 0, -100, None, None)
    expected = c[:, None] * (logits.softmax(-1) - torch.nn.functional.one_hot(target, 41))
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_parts_give_the_whole(device, softcap):
    """Log-probabilities and their gradients, by autograd through the statistics of three unequal parts."""
    whole = torch.randn(9, 50, device=device) * 3
    target = torch.randint(50, (9,), device=device)
    upstream = torch.randn(9, device=device)

    def by_parts(logits):
        parts, start = [], 0
        for part in logits.split([20, 7, 23], 1):
            parts.append(stats_op(part, target, None, start, -100, softcap, True))
            start += part.shape[1]
        high, total, chosen, class_sum = torch.stack(parts).unbind(1)
        largest = high.amax(0).detach()
        lse = largest + ((high.detach() - largest).exp() * total).sum(0).log()
        # Each sum is relative to the largest logit of its part.
        sizes = torch.tensor([[20], [7], [23]], device=device)
        return chosen.sum(0) - lse + 0.01 * (class_sum + sizes * high.detach()).sum(0)

    def plain(logits):
        z = capped(logits, softcap)
        return z.log_softmax(-1).gather(1, target[:, None])[:, 0] + 0.01 * z.sum(-1)

    results = []
    for function, logits in ((by_parts, whole), (plain, whole), (plain, whole.double())):
        leaf = logits.clone().requires_grad_()
        value = function(leaf)
        results.append((value, *torch.autograd.grad(value, leaf, upstream.to(value.dtype))))
    for values in zip(*results, strict=True):
        assert_as_exact_as_torch(*values, intermediate=LARGEST_LSE)


def test_ignored_rows_have_nothing_whatever_their_logits_hold(device):
    logits = torch.full((2, 40), torch.nan, device=device)
    target = torch.full((2,), 7, device=device)
    stats = stats_op(logits, target, None, 0, 7, 3.0, True)
    assert torch.equal(stats, torch.tensor([[0.0], [1.0], [0.0], [0.0]], device=device).expand(4, 2))
    nan = torch.full((2,), torch.nan, device=device)
    assert not backward_op(logits, target, nan, nan, nan, nan, None, 0, 7, 3.0, nan).any()


def test_classes_that_are_impossible(device):
    """Logits of -inf: a whole part of them adds nothing, and gives no nan to the gradient."""
    logits = torch.full((2, 300), -torch.inf, device=device)
    logits[1, 5] = 2.0
    target = torch.tensor([400, 5], device=device)
    stats = stats_op(logits, target, None, 0, -100, None, False)
    expected = [[-torch.inf, 2.0], [0.0, 1.0], [0.0, 2.0]]
    assert torch.equal(stats, torch.tensor(expected, device=device))
    one = torch.ones(2, device=device)
    for coef_log in (None, one):
        grad = backward_op(logits, target, torch.full((2,), -torch.inf, device=device), one, one, None, None, 0,
                           -100, None, coef_log)  # fmt: skip
        assert not grad[0].any()


def test_gradient_of_the_entropy(device):
    """From the log-sum-exp as reference, the entropy and one number per row; classes without probability have
    none."""
    logits, _, _, _ = make(device, 6, 41)
    logits[1, 3:9] = -torch.inf
    target = torch.zeros(6, dtype=torch.int64, device=device)
    c, nothing = torch.randn(6, device=device), torch.zeros(6, device=device)
    logp = logits.double().log_softmax(-1)
    entropy = torch.special.entr(logp.exp()).sum(-1)
    expected = torch.special.entr(logp.exp()) - logp.exp() * entropy[:, None]
    arguments = (logits.logsumexp(-1), -c * entropy.float(), nothing, None, None, 0, -100, None, -c)
    grad = backward_op(logits, target, *arguments)
    torch.testing.assert_close(grad.double(), c.double()[:, None] * expected, rtol=1e-4, atol=1e-5)
    finite = logits[2:].double().requires_grad_()
    (by_autograd,) = torch.autograd.grad(torch.special.entr(finite.softmax(-1)).sum(), finite)
    torch.testing.assert_close(expected[2:], by_autograd)


def test_huge_logits_lose_nothing(device):
    """What they have in common is taken away before anything is rounded."""
    logits = torch.randn(4, 600, device=device)
    target = torch.randint(600, (4,), device=device)
    shifted = (logits.half().float() + 8192.0).contiguous()
    stats = stats_op(shifted, target, None, 0, -100, None, False)
    exact = plain_stats(shifted.double(), target + START, None, None)
    torch.testing.assert_close(stats[1].double(), exact[1], rtol=1e-5, atol=0)
    assert torch.equal(stats[0].double(), exact[0]) and torch.equal(stats[2].double(), exact[2])


def test_bad_input(device):
    logits, target, _, _ = make(device, 6, 41)
    row = torch.ones(6, device=device)

    def refuses(match, op, *arguments):
        with pytest.raises(RuntimeError, match=match):
            op(*arguments)

    where = (0, -100, None)
    refuses("cross_entropy_stats: logits has shape", stats_op, logits[:, :0], target, None, *where, False)
    refuses("cross_entropy_stats: target has shape", stats_op, logits, target[1:], None, *where, False)
    refuses("cross_entropy_stats: softcap is -1", stats_op, logits, target, None, 0, -100, -1.0, False)
    refuses(r"ce_weight has shape \(6,\)", stats_op, logits, target, row, *where, True)


def test_the_gradient_has_no_gradient(device):
    logits, target, _, _ = make(device, 6, 41)
    logits.requires_grad_()
    stats = stats_op(logits, target, None, START, -100, None, False)
    (grad,) = torch.autograd.grad(stats[1].sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="cross_entropy_stats is not differentiable"):
        grad.sum().backward()
