# SPDX-License-Identifier: BSD-3-Clause
"""Divergences whose gradient has cross entropy added: the row op of the distillation losses, in every
backend."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, compiled

from liger._core.runtime.environment import triton_interpreted

KINDS = ["forward_kl", "reverse_kl", "jsd", "tvd"]
BETA, RATIO = 0.3, 0.6
OP = torch.ops.liger.divergence_ce_forward_


def make(rows, vocab, device, dtype):
    """Targets at the ends of rows, near them and inside; ignored ones; students that are all but sure of
    theirs."""
    student, teacher = ((2 * torch.randn(rows, vocab, device=device)).to(dtype) for _ in range(2))
    places = torch.tensor([0, vocab - 1, vocab // 2, min(9, vocab - 1), max(vocab - 10, 0)], device=device)
    target = places[torch.arange(rows, device=device) % 5]
    sure = torch.arange(rows, device=device) % 3 == 0
    high = torch.where(sure, 12.0 + torch.rand(rows, device=device), student.gather(1, target[:, None])[:, 0])
    student.scatter_(1, target[:, None], high[:, None].to(dtype))
    target[1::7] = -100
    return student, teacher, target, torch.rand(rows, device=device) + 0.5


def exact(kind, student, teacher, target, weight):
    """(losses without cross entropy, the gradient with it) in float64."""
    leaf = student.double().requires_grad_()
    live = (target != -100).double() * weight.double()
    log_q, log_p = (z.log_softmax(-1) for z in (leaf, teacher.double()))
    p, q = log_p.exp(), log_q.exp()
    log_m = (BETA * p + (1 - BETA) * q).log()
    losses = (
        live
        * {
            "forward_kl": (p * (log_p - log_q)).sum(-1),
            "reverse_kl": (q * (log_q - log_p)).sum(-1),
            "tvd": (p - q).abs().sum(-1) / 2,
            "jsd": (BETA * p * (log_p - log_m) + (1 - BETA) * q * (log_q - log_m)).sum(-1),
        }[kind]
    )
    cross_entropy = F.cross_entropy(leaf, target, ignore_index=-100, reduction="none")
    total = (losses + RATIO * live * cross_entropy).sum()
    return losses.detach(), torch.autograd.grad(total, leaf)[0]


def check(kind, student, teacher, target, weight, layout=torch.clone, dtype=None):
    """The gradient lies as the logits do; where it is of another dtype, otherwise."""
    losses, expected = exact(kind, student, teacher, target, weight)
    logits, kept = layout(student), layout(teacher)
    place = (
        layout(student) if dtype is None else F.pad(torch.empty_like(student, dtype=dtype), (2, 5))[:, 2:-5]
    )
    found, hard = OP(logits, kept, target, weight, kind, BETA, 1.0, RATIO, -100, place)
    assert torch.equal(kept, teacher) and torch.equal(logits, student)
    torch.testing.assert_close(found.double(), losses, rtol=1e-5, atol=3e-6)
    live = target != -100
    cross_entropy = F.cross_entropy(student.double(), target, ignore_index=-100, reduction="none")
    torch.testing.assert_close(hard.double(), RATIO * weight * cross_entropy, rtol=1e-5, atol=3e-6)
    difference = (place.double() - expected).abs()
    if kind == "tvd":
        # Where the probabilities are equal up to rounding, either sign is as good.
        log_q, log_p = (z.double().log_softmax(-1) for z in (student, teacher))
        difference = difference.masked_fill((log_q - log_p).abs() < 1e-5, 0.0)
    # One rounding of each element, also of the targets: not of the two of which they are the difference.
    # A reverse KL takes the difference of logarithms as large as 20, of which two neighbouring floats are
    # 2e-6 apart.
    least = 8e-6 if kind == "reverse_kl" else 4e-6
    room = torch.finfo(place.dtype).eps * expected.abs() + least * weight.double().unsqueeze(1)
    assert (difference <= room).all(), (difference / room).max().item()
    assert not place[~live].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 7, 4099])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(device, dtype, vocab, kind):
    values = make(11, vocab, device, dtype)
    check(kind, *values)
    check(kind, *values, layout=lambda x: F.pad(x, (3, 2))[:, 3:-2])
    student, teacher, target, _ = values
    # Without a factor nothing is added, and one weight does for all rows; int32 targets are as good.
    one = torch.tensor(0.7, device=device)
    mine, other = torch.empty_like(student), student.clone()
    assert OP(student, teacher, target.int(), one, kind, BETA, 1.0, 0.0, -100, mine)[1].numel() == 0
    torch.ops.liger.divergence_forward_(other, teacher, target, one, kind, BETA, 1.0, False, -100, True)
    assert torch.equal(mine, other)


NARROW = [torch.float16] if triton_interpreted() else [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 7, 4099])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_gradient_in_fewer_bits(device, dtype, vocab, kind):
    """That of float32 logits, rounded once: the rounding of the one in float32."""
    values = make(11, vocab, device, torch.float32)
    check(kind, *values, dtype=dtype)
    student, teacher, target, weight = values
    for hard, temperature in ((RATIO, 1.0), (0.0, 1.7)):
        options = (target, weight, kind, BETA, temperature, hard, -100)
        wide, narrow = torch.empty_like(student), torch.empty_like(student, dtype=dtype)
        losses = OP(student, teacher, *options, wide)
        assert all(map(torch.equal, OP(student, teacher, *options, narrow), losses))
        assert torch.equal(narrow, wide.to(dtype))


@pytest.mark.parametrize("wrong", [-1, 4099, 2**32 + 5])
@pytest.mark.parametrize("kind", KINDS)
def test_target_that_is_no_class(device, kind, wrong):
    """The cross entropy and the gradient of that row are nan, as of liger.cross_entropy; of no other."""
    student, teacher, target, weight = make(11, 4099, device, torch.float32)
    right, found = torch.empty_like(student), torch.empty_like(student)
    losses, hard = OP(student, teacher, target, weight, kind, BETA, 1.0, RATIO, -100, right)
    target[5] = wrong
    others, with_nan = OP(student, teacher, target, weight, kind, BETA, 1.0, RATIO, -100, found)
    torch.testing.assert_close(others, losses)
    row = torch.arange(11, device=device) == 5
    assert with_nan[row].isnan().all() and torch.equal(with_nan[~row], hard[~row])
    assert found[row].isnan().any() and torch.equal(found[~row], right[~row])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [12288, 50257, 128256, 262143, 400001])
def test_long_rows(dtype, vocab, kind):
    """Rows that stay in shared memory, in one block and in clusters, more of them than blocks; and longer
    ones."""
    with compiled() as device:
        for rows in (5, 401 if vocab < 20000 else 61):
            values = make(rows, vocab, device, dtype)
            check(kind, *values)
            if dtype == torch.float32:
                for narrow in (torch.float16, torch.bfloat16):
                    check(kind, *values, dtype=narrow)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [7, 32000, 400001])
def test_target_beyond_int32(vocab, kind):
    """Not taken for the class that its lower half is; in rows of every kernel."""
    with compiled() as device:
        student, teacher, target, weight = make(5, vocab, device, torch.bfloat16)
        target[2] = 2**32 + 5
        found = torch.empty_like(student)
        _, hard = OP(student, teacher, target, weight, kind, BETA, 1.0, RATIO, -100, found)
        nan = hard.isnan()
        assert nan.nonzero().flatten().tolist() == [2]
        assert found[2].isnan().any() and not found[~nan].isnan().any()


def test_bad_input(device):
    student, teacher, target, weight = make(5, 7, device, torch.float32)

    place = torch.empty_like(student)

    def refuses(match, *arguments, temperature=1.0, hard=RATIO, gradient=place, of=student):
        with pytest.raises(RuntimeError, match=match):
            OP(of, *arguments, temperature, hard, -100, gradient)

    good = (teacher, target, weight, "jsd", 0.5)
    refuses("divergence_ce_forward_: teacher has shape", teacher[:, 1:], *good[1:])
    refuses("divergence_ce_forward_: target has shape", teacher, target[1:], weight, "jsd", 0.5)
    refuses("divergence_ce_forward_: divergence is 'cosine'", teacher, target, weight, "cosine", 0.5)
    refuses("divergence_ce_forward_: beta is 2", teacher, target, weight, "jsd", 2.0)
    refuses("divergence_ce_forward_: row_weight has shape", teacher, target, weight[1:], "jsd", 0.5)
    refuses("divergence_ce_forward_: no target", teacher, None, weight, "jsd", 0.5)
    refuses("temperature is 2 with cross entropy, expected 1", *good, temperature=2.0)
    refuses("cross_entropy is -1", *good, hard=-1.0)
    refuses("gradient has shape", *good, gradient=place[1:])
    refuses("gradient has dtype float64", *good, gradient=place.double())
    half = student.half()
    refuses("gradient has dtype float32, expected the dtype of student", teacher.half(), *good[1:], of=half)
    student = student.requires_grad_()
    refuses("not differentiable", *good, of=student, gradient=torch.empty_like(teacher))
