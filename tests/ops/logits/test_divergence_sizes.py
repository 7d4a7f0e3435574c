# SPDX-License-Identifier: BSD-3-Clause
"""Divergences of rows and batches of every size, also those at which the cuda backend changes its kernel."""

import pytest
import torch
from cases import DTYPES, ignored_in_patterns, padded

KINDS = ["forward_kl", "reverse_kl", "jsd", "tvd"]
BETA, TEMPERATURE = 0.3, 1.5


def exact_rows(kind, student, teacher):
    """(loss, gradient) of each row in float64."""
    leaf = student.double().requires_grad_()
    log_q, log_p = ((z / TEMPERATURE).log_softmax(-1) for z in (leaf, teacher.double()))
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        losses = (p * (log_p - log_q)).sum(-1)
    elif kind == "reverse_kl":
        losses = (q * (log_q - log_p)).sum(-1)
    elif kind == "tvd":
        losses = (p - q).abs().sum(-1) / 2
    else:
        log_m = (BETA * p + (1 - BETA) * q).log()
        losses = (BETA * p * (log_p - log_m) + (1 - BETA) * q * (log_q - log_m)).sum(-1)
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


def pair(rows, vocab, device, dtype):
    return [(torch.randn(rows, vocab, device=device) * 2).to(dtype) for _ in range(2)]


def one_call(kind, student, teacher, target=None, weight=None, in_place=False):
    """(loss of each row, gradient) from the op that makes both."""
    options = (kind, BETA, TEMPERATURE, False, -100, True)
    if in_place:
        return torch.ops.liger.divergence_forward_(student, teacher, target, weight, *options), student
    losses, _, gradient = torch.ops.liger.divergence_forward(student, teacher, target, weight, *options, True)
    return losses, gradient


def check_rows(kind, values, layout=torch.clone, target=None, in_place=False):
    student, teacher = (layout(v) for v in values)
    weight = torch.rand(len(student), device=student.device) + 0.5
    # By the strides of a view the gradient lies otherwise than the logits.
    losses, gradient = one_call(kind, student, teacher, target, weight, in_place)
    assert in_place or torch.equal(student, values[0])
    assert torch.equal(teacher, values[1])
    epsilon = torch.finfo(student.dtype).eps
    for start in range(0, len(weight), 64):
        some = slice(start, start + 64)
        exact, exact_gradient = exact_rows(kind, values[0][some], values[1][some])
        factor = weight[some].double()
        if target is not None:
            factor = factor.masked_fill(target[some] == -100, 0.0)
        torch.testing.assert_close(losses[some].double(), exact * factor, rtol=1e-5, atol=2e-6)
        expected = exact_gradient * factor.unsqueeze(1)
        difference = (gradient[some].double() - expected).abs()
        # What a probability loses to its exponent is a share of it, not of the difference of two.
        room = epsilon * expected.abs() + 1e-5 * expected.abs().amax(1, keepdim=True) + 1e-12
        if kind == "tvd":
            # Where the probabilities are equal up to rounding, either sign is as good, there and in the sum
            # of all.
            log_q, log_p = ((v[some].double() / TEMPERATURE).log_softmax(-1) for v in values)
            near, q = (log_q - log_p).abs() < 1e-5, log_q.exp()
            difference = difference.masked_fill(near, 0.0)
            room += 2 * q * (q * near).sum(1, keepdim=True) * factor.unsqueeze(1)
        if student.dtype == torch.float16:
            room += 6e-8
        assert (difference <= room).all(), (kind, (difference / room).max().item())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [7, 4099, 50257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_alignment(device, dtype, vocab, kind):
    """Rows follow each other without gaps, so that each lies differently to 16 bytes."""
    values = pair(5, vocab, device, dtype)
    target = torch.tensor([0, -100, 1, 2, 3], device=device)
    for layout in (torch.clone, padded):
        check_rows(kind, values, layout, target)
    check_rows(kind, values, target=target, in_place=True)


# The bytes of a row at which the cuda backend changes how it keeps the rows of both, with 228 KB of shared
# memory: at all; with three blocks on a multiprocessor in a block, in two, in three, in the largest clusters;
# with two of them in the largest clusters; with one, the last. First jsd, which keeps more.
LIMITS = [
    8192, 25216, 50176, 74880, 192512, 295936, 595968,
    37888, 75264, 112128, 288768, 444416, 892928,
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", LIMITS)
def test_where_the_kernel_changes(gpu, limit, dtype, kind):
    at = limit // dtype.itemsize
    for vocab, layout in ((at - 1, padded), (at, torch.clone), (at + 1, torch.clone), (at + 13, padded)):
        check_rows(kind, pair(3, vocab, gpu, dtype), layout)


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [torch.clone, padded])
@pytest.mark.parametrize("row_bytes, blocks", [(20012, 396), (64006, 198), (256518, 50)])
def test_more_rows_than_blocks(gpu, row_bytes, blocks, layout, dtype, kind, in_place):
    """Each block takes several rows, which follow computed and ignored ones."""
    rows = 2 * blocks + 5
    values = pair(rows, row_bytes // dtype.itemsize, gpu, dtype)
    check_rows(
        kind, values, layout, ignored_in_patterns(torch.arange(rows, device=gpu), -100, blocks), in_place
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [9003, 60003, 128259])
def test_rows_do_not_depend_on_their_batch(gpu, vocab, kind):
    """A row has the same bits in every place of a batch, and in every repetition."""
    student, teacher = pair(480, vocab, gpu, torch.bfloat16)
    place = torch.arange(480, device=gpu).roll(80)
    whole = one_call(kind, student, teacher)
    # By multiples of 8 rows, so that each lies alike to 16 bytes and is cut alike.
    moved = one_call(kind, student[place], teacher[place])
    assert torch.equal(moved[0], whole[0][place]) and torch.equal(moved[1], whole[1][place])
    for _ in range(3):
        again = one_call(kind, student, teacher)
        assert torch.equal(again[0], whole[0]) and torch.equal(again[1], whole[1])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_hold_nothing_finite_or_nan(gpu, kind):
    """A row of nan or without a finite logit gives nan and harms no other row."""
    student, teacher = pair(900, 20000, gpu, torch.bfloat16)
    clean = one_call(kind, student, teacher)
    student[3, 777], teacher[5, 19999] = torch.nan, torch.nan
    student[7], teacher[9] = -torch.inf, -torch.inf
    losses, gradient = one_call(kind, student, teacher)
    spoilt = torch.zeros(900, dtype=torch.bool, device=gpu)
    spoilt[[3, 5, 7, 9]] = True
    assert losses[spoilt].isnan().all()
    assert torch.equal(losses[~spoilt], clean[0][~spoilt])
    assert torch.equal(gradient[~spoilt], clean[1][~spoilt])


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits(gpu):
    rows, vocab, last = 17000, 128256, 5
    assert rows * vocab > 1 << 31
    if torch.cuda.mem_get_info()[0] < 4 * rows * vocab * 2:
        pytest.skip("needs 18 GB of free GPU memory")
    student, teacher = (torch.randn(rows, vocab, device=gpu, dtype=torch.bfloat16) for _ in range(2))
    losses, gradient = one_call("jsd", student, teacher)
    few = one_call("jsd", student[-last:].clone(), teacher[-last:].clone())
    torch.testing.assert_close(losses[-last:], few[0])
    torch.testing.assert_close(gradient[-last:], few[1])
