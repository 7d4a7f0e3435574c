# SPDX-License-Identifier: BSD-3-Clause
"""Kernels whose code exists for some architectures only, in sizes that choose them.

They are chosen by the code that the device runs, so a build for an older capability is right, too: through
PTX, as ``make gpu-test-archs`` builds it.
"""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_as_exact_as_torch, check_op, compiled

import liger

pytestmark = pytest.mark.gpu


def _normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [9000, 20000, 50000, 131072])
def test_softmax(dtype, columns):
    with compiled():
        check_op(liger.softmax, lambda x: x.softmax(-1), [_normal(5, columns, dtype=dtype)], intermediate=8.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1000, 32000, 131072])
def test_cross_entropy(dtype, vocab):
    target = torch.randint(vocab, (9,), device="cuda")
    with compiled():
        check_op(
            lambda logits: liger.cross_entropy(logits, target),
            lambda logits: F.cross_entropy(logits, target),
            [_normal(9, vocab, dtype=dtype)],
            intermediate=20.0,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [8192, 32000, 131072])
def test_kl_div(dtype, vocab):
    teacher = _normal(6, vocab, dtype=dtype)

    def plain(student):
        logs = student.log_softmax(-1), teacher.to(student.dtype).log_softmax(-1)
        return F.kl_div(*logs, reduction="batchmean", log_target=True)

    with compiled():
        check_op(
            lambda s: liger.kl_div(s, teacher), plain, [_normal(6, vocab, dtype=dtype)], intermediate=20.0
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 64, 32, 32), (4, 320, 64, 64), (1, 32, 512, 512)], ids=str)
def test_group_norm(dtype, shape):
    inputs = [_normal(*shape, dtype=dtype), _normal(shape[1], dtype=dtype), _normal(shape[1], dtype=dtype)]
    with compiled():
        check_op(
            lambda x, w, b: liger.group_norm(x, 32, w, b), lambda x, w, b: F.group_norm(x, 32, w, b), inputs
        )


@pytest.mark.parametrize("hidden", [512, 4096, 8192])
def test_parameter_gradients_wait_for_their_parts(hidden):
    """The kernel that sums them may begin before the one that makes them has ended, where both are compiled
    for it."""
    x, weight = _normal(16384, hidden, dtype=torch.bfloat16), torch.ones(hidden, device="cuda").bfloat16()
    with compiled():
        rstd = torch.ops.liger.rms_norm(x, weight, 1e-6, 0.0, "llama")[1]
        grads = [
            torch.ops.liger.rms_norm_backward(x, x, weight, rstd, 0.0, "llama", True, True)[1]
            for _ in range(50)
        ]
    with compiled():
        _, mean, rstd = torch.ops.liger.layer_norm(x, weight, weight)
        pairs = [
            torch.stack(
                torch.ops.liger.layer_norm_backward(x, x, weight, weight, mean, rstd, True, True, True)[1:]
            )
            for _ in range(50)
        ]
    assert all(torch.equal(g, grads[0]) for g in grads) and all(torch.equal(p, pairs[0]) for p in pairs)
    exact, plain = x.double(), x.float()
    of_rms = [(y * F.rms_norm(y, (hidden,), None, 1e-6)).sum(0) for y in (plain, exact)]
    of_layer = [torch.stack([(y * F.layer_norm(y, (hidden,))).sum(0), y.sum(0)]) for y in (plain, exact)]
    assert_as_exact_as_torch(grads[0], of_rms[0].bfloat16(), of_rms[1], "rms_norm")
    assert_as_exact_as_torch(pairs[0], of_layer[0].bfloat16(), of_layer[1], "layer_norm")
