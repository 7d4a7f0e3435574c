# SPDX-License-Identifier: BSD-3-Clause
"""Offsets beyond 2^31 elements, more than 2^32 rows, rows of nearly 2^31 classes."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import assert_as_exact_as_torch, compiled

import liger

pytestmark = [pytest.mark.gpu, pytest.mark.large]
GB = 1 << 30


@pytest.fixture(autouse=True)
def _compiled_kernels():
    with compiled():
        yield
    torch.cuda.empty_cache()


def need(gigabytes):
    free = torch.cuda.mem_get_info()[0]
    if free < gigabytes * GB:
        pytest.skip(f"needs {gigabytes} GB of device memory, {free / GB:.0f} are free")


def test_rows_of_nearly_2_to_the_31_classes():
    need(10)
    classes = 2**31 - 2
    loss = liger.cross_entropy(
        torch.zeros(1, classes, device="cuda", dtype=torch.float16),
        torch.tensor([classes - 1], device="cuda"),
    )
    assert loss.item() == pytest.approx(math.log(classes), rel=1e-6)


@pytest.mark.parametrize("function", [liger.softmax, liger.rms_norm])
def test_more_rows_than_32_bits_count(function):
    need(40)
    rows = 2**32 + 300
    y = function(torch.ones(rows, 1, device="cuda", dtype=torch.float16))
    for part in (y[:100], y[2**31 - 50 : 2**31 + 50], y[-200:]):
        assert torch.equal(part, torch.ones_like(part))


def test_more_batches_than_a_grid_has_in_its_second_dimension():
    q = torch.randn(70000, 1, 1, 8, device="cuda").bfloat16()
    rotated, _ = liger.rope(q, q.clone(), torch.ones(1, 8, device="cuda"), torch.zeros(1, 8, device="cuda"))
    assert torch.equal(rotated, q)
    x = torch.randn(70000, 16, 9, device="cuda")
    normalised = liger.group_norm(x, 4)[-5:]
    assert_as_exact_as_torch(normalised, F.group_norm(x[-5:], 4), F.group_norm(x[-5:].double(), 4))
    logits, target = torch.randn(2**20 + 3, 4, device="cuda"), torch.randint(4, (2**20 + 3,), device="cuda")
    assert_as_exact_as_torch(
        liger.cross_entropy(logits, target),
        F.cross_entropy(logits, target),
        F.cross_entropy(logits.double(), target),
    )


@pytest.fixture
def wide():
    """(70001, 32768): more than 2^31 elements and 2^32 bytes."""
    need(24)
    return torch.randn(70001, 32768, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("function", "plain"),
    [
        (liger.rms_norm, lambda x: F.rms_norm(x, x.shape[-1:], None, 1e-6)),
        (liger.softmax, lambda x: x.softmax(-1)),
        (liger.swiglu_packed, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
    ],
)
def test_offsets_beyond_31_bits(wide, function, plain):
    last = wide[-3:]
    assert_as_exact_as_torch(function(wide)[-3:], plain(last), plain(last.double()))


def test_offsets_of_cross_entropy_beyond_31_bits(wide):
    target = torch.randint(32768, (70001,), device="cuda")
    z = wide.requires_grad_()
    losses = liger.cross_entropy(z, target, reduction="none")
    plain, exact = (
        F.cross_entropy(t[-9:].detach(), target[-9:], reduction="none") for t in (z, z[-9:].double())
    )
    assert_as_exact_as_torch(losses[-9:].detach(), plain.float(), exact)
    (grad,) = torch.autograd.grad(liger.cross_entropy(z, target, reduction="sum"), z)
    one_hot = F.one_hot(target[-3:], 32768)
    rows = z[-3:].detach()
    assert_as_exact_as_torch(
        grad[-3:], rows.softmax(-1) - one_hot.bfloat16(), rows.double().softmax(-1) - one_hot
    )
