# SPDX-License-Identifier: BSD-3-Clause
"""rope against float64, in every backend that runs here."""

import re

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch, check_op, far_apart

import liger

# batch, heads of q, heads of k, tokens, head_dim, rotary_dim. A thread rotates two heads: odd numbers leave
# one over. 16-byte vectors need a rotary_dim of whole pairs of them, 16 elements in half types: 24, 6, 4 and
# 2 go one by one. head_dim > rotary_dim has entries that are only copied.
SHAPES = [
    (2, 4, 4, 7, 64, 64),
    (1, 8, 2, 9, 128, 128),
    (2, 6, 1, 5, 80, 32),
    (3, 3, 2, 4, 6, 6),
    (1, 2, 1, 9, 6, 2),
    (2, 5, 3, 1, 96, 24),
    (1, 1, 1, 12, 256, 64),
    (1, 2, 2, 3, 7, 4),
]
TABLES = {
    "shared": lambda batch, tokens, rotary: (tokens, rotary),
    "one": lambda batch, tokens, rotary: (1, tokens, rotary),
    "per_sequence": lambda batch, tokens, rotary: (batch, tokens, rotary),
}


def reference(q, k, cos, sin, interleaved=False):
    """Hugging Face's formula in the dtype of q, with partial rotary and interleaved pairs."""
    rotary = cos.shape[-1]
    cos, sin = (t.to(q.dtype).unsqueeze(1) if t.dim() == 3 else t.to(q.dtype) for t in (cos, sin))

    def rotate(x):
        x, rest = x[..., :rotary], x[..., rotary:]
        if interleaved:
            turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
        else:
            turned = torch.cat((-x[..., rotary // 2 :], x[..., : rotary // 2]), -1)
        return torch.cat((x * cos + turned * sin, rest), -1)

    return rotate(q), rotate(k)


def make(device, shape=(2, 4, 2, 5, 16, 16), dtype=torch.float32, table="shared", table_dtype=torch.float32):
    """q, k, cos, sin. The tables are random, so that the two halves of a row differ."""
    batch, q_heads, k_heads, tokens, head_dim, rotary = shape
    q = torch.randn(batch, q_heads, tokens, head_dim, device=device, dtype=dtype)
    k = torch.randn(batch, k_heads, tokens, head_dim, device=device, dtype=dtype)
    cos, sin = torch.randn(2, *TABLES[table](batch, tokens, rotary), device=device).to(table_dtype)
    return q, k, cos, sin


def leaves(*tensors):
    return [t.detach().requires_grad_() for t in tensors]


@pytest.mark.covering(2)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope(device, shape, dtype, table, interleaved):
    q, k, cos, sin = make(device, shape, dtype, table)
    check_op(
        lambda q, k: liger.rope(q, k, cos, sin, interleaved=interleaved),
        lambda q, k: reference(q, k, cos, sin, interleaved),
        [q, k],
    )


@pytest.mark.parametrize("table_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_of_tables(device, dtype, table_dtype):
    q, k, cos, sin = make(device, (2, 3, 1, 9, 32, 32), dtype, "per_sequence", table_dtype)
    check_op(lambda q, k: liger.rope(q, k, cos, sin), lambda q, k: reference(q, k, cos, sin), [q, k])


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_float32_tables_are_not_rounded(device, dtype):
    q, k, cos, sin = make(device, dtype=dtype)
    outputs = liger.rope(q, k, cos, sin)
    for output, exact in zip(outputs, reference(q.float(), k.float(), cos, sin), strict=True):
        assert_as_exact_as_torch(output, exact.to(dtype), exact)


def test_heads_in_the_third_dimension(device):
    q, k, cos, sin = make(device, (2, 4, 2, 5, 16, 8), table="per_sequence")
    heads_second = leaves(q, k)
    heads_third = leaves(q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous())
    expected = liger.rope(*heads_second, cos, sin)
    outputs = liger.rope(*heads_third, cos, sin, unsqueeze_dim=2)
    grads = [torch.randn_like(t) for t in outputs]
    got = torch.autograd.grad(outputs, heads_third, grads)
    want = torch.autograd.grad(expected, heads_second, [g.transpose(1, 2) for g in grads])
    for output, leaf, other in zip((*outputs, *got), 2 * heads_third, (*expected, *want), strict=True):
        assert torch.equal(output.transpose(1, 2), other)
        assert output.shape == leaf.shape and output.stride() == leaf.stride()


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("rotary", [4, 2])
def test_heads_that_span_more_than_32_bits(device, rotary, interleaved):
    q, k, cos, sin = make(device, (1, 2, 2, 1, 4, rotary), torch.float16)
    expected = liger.rope(q, k, cos, sin, interleaved=interleaved)
    results = liger.rope(far_apart(q), k, cos, sin, interleaved=interleaved)
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)


@pytest.mark.parametrize(
    "shape",
    [(0, 2, 1, 3, 8, 8), (2, 2, 1, 0, 8, 8), (2, 2, 0, 3, 8, 4), (2, 0, 1, 3, 8, 4), (2, 2, 1, 3, 0, 0)],
    ids=str,
)
def test_empty(device, shape):
    q, k, cos, sin = make(device, shape)
    inputs = leaves(q, k)
    outputs = liger.rope(*inputs, cos, sin)
    sum(t.sum() for t in outputs).backward()
    for output, leaf, expected in zip(outputs, inputs, reference(q, k, cos, sin), strict=True):
        assert output.shape == leaf.grad.shape == leaf.shape
        torch.testing.assert_close(output, expected)


def test_no_rotary_entries_copies(device):
    q, k, cos, sin = make(device, (2, 4, 2, 5, 16, 0))
    for output, source in zip(liger.rope(q, k, cos, sin), (q, k), strict=True):
        assert torch.equal(output, source) and output.data_ptr() != source.data_ptr()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            (4, 16),
            "shape (4, 16), expected (tokens, rotary_dim), (1, tokens, rotary_dim) or (batch, tokens, rotary_dim)",
        ),
        ((3, 5, 16), "shape (3, 5, 16), expected (tokens, "),
        ((5, 18), "a rotary_dim of 18, expected an even number of at most head_dim, 16"),
        ((5, 7), "a rotary_dim of 7, expected an even number"),
    ],
)
def test_tables_that_do_not_fit(device, shape, words):
    q, k, *_ = make(device)
    with pytest.raises(RuntimeError, match=re.escape(f"rope: cos has {words}")):
        liger.rope(q, k, *torch.ones(2, *shape, device=device))


def test_bad_unsqueeze_dim(device):
    q, k, cos, sin = make(device)
    with pytest.raises(ValueError, match="rope: unsqueeze_dim is 3, expected 1 or 2"):
        liger.rope(q, k, cos, sin, unsqueeze_dim=3)
    with pytest.raises(
        RuntimeError, match=r"q has shape \(4, 5, 16\), expected \(batch, tokens, heads, head_dim\)"
    ):
        liger.rope(q[0], k, cos, sin, unsqueeze_dim=2)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_many_tokens(device, interleaved):
    q, k, cos, sin = make(device, (3, 32, 8, 4099, 128, 128), torch.bfloat16, "per_sequence")
    views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k)]
    exact = reference(*(t.double() for t in (q, k)), cos, sin, interleaved)
    plain = reference(q, k, cos, sin, interleaved)
    for inputs in ((q, k), views):
        for values in zip(liger.rope(*inputs, cos, sin, interleaved=interleaved), plain, exact, strict=True):
            assert_as_exact_as_torch(*values)


# --- in place -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_inplace_takes_the_memory_and_gives_the_same(device, unsqueeze_dim):
    start = [torch.randn(2, 5, heads, 8, device=device, requires_grad=True) for heads in (4, 2)]
    cos, sin = torch.randn(2, 5, 8, device=device)

    def run(inplace):
        q, k = (t * 1 for t in start)
        if unsqueeze_dim == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        outputs = liger.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, inplace=inplace)
        assert [o.data_ptr() == t.data_ptr() for o, t in zip(outputs, (q, k), strict=True)] == [inplace] * 2
        assert [o.stride() for o in outputs] == [t.stride() for t in (q, k)]
        return [*outputs, *torch.autograd.grad([o.square().sum() for o in outputs], start)]

    for got, want in zip(run(True), run(False), strict=True):
        assert torch.equal(got, want)


def test_inplace_is_noticed_by_who_saved_the_old_values(device):
    q, k = (torch.randn(1, 2, 3, 8, device=device, requires_grad=True) * 1 for _ in range(2))
    cos, sin = torch.randn(2, 3, 8, device=device)
    saved = q.square().sum()
    liger.rope(q, k, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_inplace_over_a_leaf_raises(device):
    q = torch.randn(1, 2, 3, 8, device=device, requires_grad=True)
    cos, sin = torch.randn(2, 3, 8, device=device)
    with pytest.raises(RuntimeError, match="rope: q is a leaf that requires grad"):
        liger.rope(q, torch.randn_like(q), cos, sin, inplace=True)


def test_inplace_leaves_shared_memory_alone(device):
    both = torch.randn(1, 4, 3, 8, device=device)
    kept = both.clone()
    cos, sin = torch.randn(2, 3, 8, device=device)
    outputs = liger.rope(both[:, :2], both[:, 2:], cos, sin, inplace=True)
    assert torch.equal(both, kept)
    for got, want in zip(outputs, liger.rope(both[:, :2], both[:, 2:], cos, sin), strict=True):
        assert torch.equal(got, want)
