# SPDX-License-Identifier: BSD-3-Clause
"""qk_norm_rope against float64, in every backend that runs here."""

import pytest
import torch
from cases import DTYPES, check_op, far_apart, forward_backward

import liger
from liger._core.runtime.environment import triton_interpreted

MODES = ["llama", "gemma", "none"]
# (batch, q heads, k heads, tokens, head_dim, rotary). Full and partial rotation, one head left over, idle
# lanes (head_dim 96), an odd number of copied vectors (of 40 elements in float32), a head of a warp (512 of a
# half type, more than that in float32); odd sizes, without 16-byte vectors; more heads than the persistent
# blocks of the backward have at a time.
SHAPES = [
    (2, 4, 2, 5, 64, 64),
    (2, 5, 1, 7, 128, 128),
    (1, 3, 3, 4, 128, 32),
    (2, 2, 1, 3, 96, 96),
    (1, 2, 2, 3, 72, 32),
    (1, 3, 2, 2, 512, 512),
    (2, 3, 1, 4, 36, 20),
    (1, 2, 1, 3, 7, 6),
    (1, 2, 2, 3, 5, 0),
    (1, 1, 2, 3, 640, 640),
    (1, 8, 2, 40 if triton_interpreted() else 600, 64, 64),
]


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def reference(q, k, q_weight, k_weight, cos, sin, eps, offset, mode, interleaved=False):
    """The norm with the casts of transformers; the rotation in float32 of the rounded heads, rounded once."""
    turn, rotary = (rotate_pairs if interleaved else rotate_half), cos.shape[-1]

    def apply(x, weight):
        wide = x.float() if x.dtype != torch.float64 else x
        eager = x if mode == "none" else wide
        y = eager * torch.rsqrt(eager.pow(2).mean(-1, keepdim=True) + eps)
        if mode == "llama":
            y = y.to(x.dtype)
        if weight is not None:
            y = y * (weight.to(y.dtype) + offset)
        y = y.to(x.dtype).to(wide.dtype)
        c, s = cos.to(wide.dtype).unsqueeze(-3), sin.to(wide.dtype).unsqueeze(-3)
        turned = y[..., :rotary] * c + turn(y[..., :rotary]) * s
        return torch.cat((turned, y[..., rotary:]), -1).to(x.dtype)

    return apply(q, q_weight), apply(k, k_weight)


def random(device, dtype, *shape):
    return torch.randn(shape, device=device, dtype=dtype)


def tables(device, dtype, *shape):
    angle = torch.rand(shape, dtype=torch.float64) * 7
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def inputs_of(device, dtype, batch, q_heads, k_heads, tokens, dim):
    """q and k as views of (batch, tokens, heads, head_dim), and the weights."""
    q, k = (random(device, dtype, batch, tokens, heads, dim).transpose(1, 2) for heads in (q_heads, k_heads))
    return [q, k, random(device, dtype, dim), random(device, dtype, dim)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_qk_norm_rope(device, shape, dtype, mode, interleaved):
    *sizes, rotary = shape
    table = tables(device, dtype, sizes[0], sizes[3], rotary)
    options = 1e-5, 1.0 if mode == "gemma" else 0.0, mode
    check_op(
        lambda *t: liger.qk_norm_rope(*t, *table, *options, interleaved=interleaved),
        lambda *t: reference(*t, *table, *options, interleaved),
        inputs_of(device, dtype, *sizes),
    )


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(4, 16), (1, 4, 16), (3, 4, 16)], ids=str)
def test_tables(device, shape, table_dtype):
    """All shapes and dtypes of the tables."""
    cos, sin = (t.to(table_dtype) for t in tables(device, torch.float32, *shape))
    check_op(
        lambda *t: liger.qk_norm_rope(*t, cos, sin),
        lambda *t: reference(*t, cos, sin, 1e-6, 0.0, "llama"),
        inputs_of(device, torch.float32, 3, 2, 1, 4, 24),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_norm_then_the_rotation(device, dtype, mode):
    """The same values as with two ops, up to the order of a sum."""
    q, k, *weights = inputs_of(device, dtype, 2, 4, 2, 9, 128)
    table = tables(device, dtype, 9, 128)
    fused = liger.qk_norm_rope(q, k, *weights, *table, 1e-6, 0.0, mode)
    normed = [liger.rms_norm(x, w, 1e-6, 0.0, mode) for x, w in zip((q, k), weights, strict=True)]
    for got, want in zip(fused, liger.rope(*normed, *table), strict=True):
        torch.testing.assert_close(got, want)
        if dtype != torch.float32:
            # A root that differs in its last bit moves a few results over a rounding boundary.
            assert (got == want).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_weights(device, dtype):
    q, k, _, weight = inputs_of(device, dtype, 2, 4, 2, 5, 64)
    table = tables(device, dtype, 5, 64)
    for weights in ((None, None), (None, weight), (weight, None)):
        check_op(
            lambda q, k, *w, weights=weights: liger.qk_norm_rope(q, k, *filled(weights, w), *table),
            lambda q, k, *w, weights=weights: reference(
                q, k, *filled(weights, w), *table, 1e-6, 0.0, "llama"
            ),
            [q, k, *(w for w in weights if w is not None)],
        )


def filled(pattern, given):
    given = iter(given)
    return [None if p is None else next(given) for p in pattern]


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
@pytest.mark.parametrize("dim", [128, 30])
def test_float32_weights_with_low_precision_heads(device, dtype, dim):
    q, k, *_ = inputs_of(device, dtype, 2, 4, 2, 5, dim)
    weights = [random(device, torch.float32, dim) for _ in range(2)]
    table = tables(device, torch.float32, 5, dim)
    check_op(
        lambda *t: liger.qk_norm_rope(*t, *table),
        lambda *t: reference(*t, *table, 1e-6, 0.0, "llama"),
        [q, k, *weights],
    )
    _, grads = forward_backward(lambda *t: liger.qk_norm_rope(*t, *table), [q, k, *weights])
    assert [g.dtype for g in grads] == [dtype, dtype, torch.float32, torch.float32]


def test_unsqueeze_dim_2(device):
    q, k, *weights = inputs_of(device, torch.float32, 2, 2, 1, 3, 32)
    table = tables(device, torch.float32, 2, 3, 16)
    heads_first, _ = forward_backward(lambda *t: liger.qk_norm_rope(*t, *table), [q, k, *weights])
    upstream = [torch.randn_like(x) for x in heads_first]
    _, want = forward_backward(lambda *t: liger.qk_norm_rope(*t, *table), [q, k, *weights], upstream)
    outputs, got = forward_backward(
        lambda q, k, *w: liger.qk_norm_rope(q, k, *w, *table, unsqueeze_dim=2),
        [q.transpose(1, 2), k.transpose(1, 2), *weights],
        [g.transpose(1, 2) for g in upstream],
    )
    for a, b in zip(outputs, heads_first, strict=True):
        assert torch.equal(a.transpose(1, 2), b)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a.transpose(1, 2) if i < 2 else a, b)
    with pytest.raises(ValueError, match="qk_norm_rope: unsqueeze_dim is 3, expected 1 or 2"):
        liger.qk_norm_rope(q, k, *weights, *table, unsqueeze_dim=3)


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((2, 0, 3, 8), (2, 2, 3, 8)),
        ((0, 2, 3, 8), (0, 1, 3, 8)),
        ((2, 2, 0, 8), (2, 1, 0, 8)),
        ((1, 2, 3, 0), (1, 1, 3, 0)),
    ],
    ids=str,
)
def test_empty(device, q_shape, k_shape):
    dim, tokens = q_shape[3], q_shape[2]
    q, k, w, v = (
        torch.randn(s, device=device, requires_grad=True) for s in (q_shape, k_shape, (dim,), (dim,))
    )
    outputs = liger.qk_norm_rope(q, k, w, v, *tables(device, torch.float32, tokens, dim))
    assert [o.shape for o in outputs] == [q.shape, k.shape]
    sum(o.square().sum() for o in outputs).backward()
    assert q.grad.shape == q.shape and k.grad.shape == k.shape
    assert torch.equal(w.grad, torch.zeros_like(w))
    assert (v.grad != 0).all() == (k.numel() > 0) or dim == 0


@pytest.mark.parametrize("rotary", [4, 2])
def test_heads_that_span_more_than_32_bits(device, rotary):
    dtype = torch.float16
    q, k = random(device, dtype, 1, 2, 1, 4), random(device, dtype, 1, 2, 1, 4)
    weights = random(device, dtype, 4), random(device, dtype, 4)
    cos, sin = tables(device, dtype, 1, rotary)
    expected = liger.qk_norm_rope(q, k, *weights, cos, sin)
    for result, other in zip(liger.qk_norm_rope(far_apart(q), k, *weights, cos, sin), expected, strict=True):
        assert torch.equal(result, other)


def test_saves_no_intermediate(device):
    kept = []
    leaves = [t.requires_grad_() for t in inputs_of(device, torch.float32, 1, 2, 1, 3, 16)]
    table = tables(device, torch.float32, 3, 16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        liger.qk_norm_rope(*leaves, *table)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (*leaves, *table)}


def test_tables_longer_than_a_head(device):
    q, k, *weights = inputs_of(device, torch.float16, 1, 2, 1, 3, 8)
    with pytest.raises(
        RuntimeError, match="cos has a rotary_dim of 12, expected an even number of at most head_dim, 8"
    ):
        liger.qk_norm_rope(q, k, *weights, *tables(device, torch.float32, 3, 12))
