# SPDX-License-Identifier: BSD-3-Clause
"""mrope and complex_rope against the formulas of the models that use them, in float64."""

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch, forward_backward

import liger

B, HEADS, KV_HEADS, T, D = 2, 4, 2, 7, 32


def queries(device, dtype, heads_at=1):
    shapes = [(B, heads, T, D) if heads_at == 1 else (B, T, heads, D) for heads in (HEADS, KV_HEADS)]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def check(ours, plain, inputs):
    """Outputs and gradients of q and k."""
    upstream = [torch.randn_like(t) for t in inputs]
    runs = [
        forward_backward(function, tensors, upstream)
        for function, tensors in ((ours, inputs), (plain, inputs), (plain, [t.double() for t in inputs]))
    ]
    for kind in (0, 1):
        for i, values in enumerate(zip(*(run[kind] for run in runs), strict=True)):
            assert_as_exact_as_torch(*values, f"{'gradient' if kind else 'output'} {i}")


# --- mrope --------------------------------------------------------------------------------------------------


def tables(device, rotary=D, dtype=torch.float64):
    """cos and sin of three positions, as Hugging Face makes them: both halves alike."""
    angles = torch.rand(3, B, T, rotary // 2, device=device, dtype=torch.float64) * 6
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def axis_of_pair(pair, section, interleaved):
    if interleaved:
        axis = pair % 3
        return axis if axis and pair < 3 * section[axis] else 0
    return 0 if pair < section[0] else 1 if pair < section[0] + section[1] else 2


def plain_mrope(q, k, cos, sin, section, interleaved, unsqueeze_dim):
    rotary = cos.shape[-1]
    axes = [axis_of_pair(i % (rotary // 2), section, interleaved) for i in range(rotary)]
    cos, sin = (torch.stack([t[axis, ..., i] for i, axis in enumerate(axes)], -1) for t in (cos, sin))
    cos, sin = (t.unsqueeze(unsqueeze_dim) for t in (cos, sin))

    def rotate(x):
        part, rest = x[..., :rotary], x[..., rotary:]
        a, b = part.chunk(2, -1)
        wide = part if x.dtype == torch.float64 else part.float()
        rotated = wide * cos.to(wide.dtype) + torch.cat((-b, a), -1).to(wide.dtype) * sin.to(wide.dtype)
        return torch.cat((rotated.to(x.dtype), rest), -1)

    return rotate(q), rotate(k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize(
    ("section", "interleaved"),
    [([8, 4, 4], False), ([6, 5, 5], True), ([16, 0, 0], True), ([3, 13, 0], False)],
)
def test_mrope(device, dtype, unsqueeze_dim, section, interleaved):
    cos, sin = tables(device, dtype=torch.float32)
    inputs = queries(device, dtype, unsqueeze_dim)
    check(
        lambda q, k: liger.mrope(q, k, cos, sin, section, unsqueeze_dim, interleaved),
        lambda q, k: plain_mrope(q, k, cos, sin, section, interleaved, unsqueeze_dim),
        inputs,
    )


def test_mrope_of_a_part_and_in_place(device):
    cos, sin = tables(device, rotary=16, dtype=torch.float32)
    q, k = queries(device, torch.float32)
    expected = plain_mrope(q, k, cos, sin, [4, 2, 2], False, 1)
    given = q.clone(), k.clone()
    actual = liger.mrope(*given, cos, sin, [4, 2, 2], inplace=True)
    for a, e, g in zip(actual, expected, given, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)
        assert a.data_ptr() == g.data_ptr()


def test_equal_positions_are_plain_rope(device):
    cos, sin = tables(device, dtype=torch.float32)
    cos, sin = (t[:1].expand(3, -1, -1, -1) for t in (cos, sin))
    q, k = queries(device, torch.float32)
    expected = liger.rope(q, k, cos[0], sin[0])
    for interleaved in (False, True):
        actual = liger.mrope(q, k, cos, sin, [6, 5, 5], interleaved_sections=interleaved)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_mrope_bad_input(device):
    q, k = queries(device, torch.float32)
    cos, sin = tables(device, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"mrope: cos has shape \(2, 2, 7, 32\), expected \(3, batch"):
        liger.mrope(q, k, cos[:2], sin, [8, 4, 4])
    for section in ([8, 4, 5], [8, 8], [20, -2, -2]):
        with pytest.raises(ValueError, match="expected three sizes that add up to half of rotary_dim, 16"):
            liger.mrope(q, k, cos, sin, section)
    with pytest.raises(ValueError, match="which 16 interleaved pairs do not hold"):
        liger.mrope(q, k, cos, sin, [4, 8, 4], interleaved_sections=True)


# --- complex numbers ----------------------------------------------------------------------------------------


def plain_complex_rope(q, k, freqs_cis, unsqueeze_dim):
    freqs = freqs_cis.unsqueeze(unsqueeze_dim if freqs_cis.dim() == 3 else unsqueeze_dim - 1)

    def rotate(x):
        rotary = 2 * freqs.shape[-1]
        part = x[..., :rotary] if x.dtype == torch.float64 else x[..., :rotary].float()
        numbers = torch.view_as_complex(part.reshape(*part.shape[:-1], -1, 2)) * freqs.to(
            torch.complex128 if x.dtype == torch.float64 else torch.complex64
        )
        return torch.cat((torch.view_as_real(numbers).flatten(-2).to(x.dtype), x[..., rotary:]), -1)

    return rotate(q), rotate(k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("shape", [(T, D // 2), (B, T, D // 2), (B, T, 5)], ids=str)
def test_complex_rope(device, dtype, unsqueeze_dim, shape):
    angles = torch.rand(shape, device=device) * 6
    freqs_cis = torch.polar(torch.full_like(angles, 1.25), angles)
    check(
        lambda q, k: liger.complex_rope(q, k, freqs_cis, unsqueeze_dim),
        lambda q, k: plain_complex_rope(q, k, freqs_cis, unsqueeze_dim),
        queries(device, dtype, unsqueeze_dim),
    )


def test_complex_rope_backwards(device):
    q, k = queries(device, torch.float32, 2)
    freqs_cis = torch.polar(torch.ones(T, D // 2, device=device), torch.rand(T, D // 2, device=device))
    turned = liger.complex_rope(*liger.complex_rope(q, k, freqs_cis), freqs_cis.conj())
    for actual, expected in zip(turned, (q, k), strict=True):
        torch.testing.assert_close(actual, expected)


def test_complex_rope_bad_input(device):
    q, k = queries(device, torch.float32, 2)
    with pytest.raises(
        RuntimeError, match=r"complex_rope: freqs_cis has dtype float32, expected a complex one"
    ):
        liger.complex_rope(q, k, torch.ones(T, D // 2, device=device))
    with pytest.raises(RuntimeError, match="complex_rope: freqs_cis has shape"):
        liger.complex_rope(q, k, torch.ones(T + 1, D // 2, device=device, dtype=torch.complex64))
    freqs = torch.ones(T, D // 2, device=device, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(RuntimeError, match="complex_rope is differentiable in q and k only"):
        liger.complex_rope(q, k, freqs)
