# SPDX-License-Identifier: BSD-3-Clause
"""Norms, softmax, gated products and rotary embeddings on random shapes, layouts, dtypes and options."""

import formulas
import torch
import torch.nn.functional as F
from engine import Numbers, compare, dtypes, fuzz, leading, maybe, one_of, sizes, wide_dtypes
from hypothesis import strategies as st

import liger


def parameters(draw, numbers, *names, length):
    """Weights in the dtype of x or in float32, in one dtype; each may be None."""
    dtype = one_of(draw, numbers.dtype, torch.float64 if numbers.dtype == torch.float64 else torch.float32)
    return {n: numbers.normal(length, dtype=dtype) for n in names if draw(st.booleans())}


def check(ours, formula, plain, tensors, **options):
    """Of a norm; ``formula`` and ``plain``, which is torch's own, take (x, weight, bias)."""
    absent = {"weight": None, "bias": None}

    def cast(x, weight, bias, **rest):
        # Torch has parameters of the dtype of x.
        return plain(x, *(None if p is None else p.to(x.dtype) for p in (weight, bias)), **rest)

    compare(
        lambda **given: ours(**given, **options),
        lambda **given: formula(**{**absent, **given}),
        tensors,
        list(tensors),
        lambda **given: cast(**{**absent, **given}),
    )


@fuzz(6)
def test_rms_norm(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    width = draw(sizes)
    x = numbers.normal(*leading(draw), width, scale=one_of(draw, 0.03, 1.0, 30.0))
    options = {
        "eps": one_of(draw, 1e-6, 1e-3, 0.5),
        "offset": one_of(draw, 0.0, 1.0, -0.3),
        "casting_mode": one_of(draw, "llama", "gemma", "none"),
    }
    eps, offset = options["eps"], options["offset"]

    def plain(x, weight, bias):
        if options["casting_mode"] == "gemma" or x.dtype.itemsize > 2:
            wide = None if weight is None else formulas.up(weight) + offset
            return F.rms_norm(formulas.up(x), x.shape[-1:], wide, eps).to(x.dtype)
        # With the roundings of the mode.
        rstd = (formulas.up(x).square().mean(-1, keepdim=True) + eps).rsqrt()
        y = x * rstd.to(x.dtype) if options["casting_mode"] == "none" else (formulas.up(x) * rstd).to(x.dtype)
        return y if weight is None else (y * (formulas.up(weight) + offset)).to(x.dtype)

    def plain_sum(x, weight, bias, residual):
        return {"y": plain(x + residual, weight, bias), "sum": x + residual}

    given = {"x": x, **parameters(draw, numbers, "weight", length=width)}
    if draw(st.booleans()):
        check(
            liger.rms_norm,
            lambda x, weight, bias: formulas.rms_norm(x, weight, eps, offset),
            plain,
            given,
            **options,
        )
        return
    given["residual"] = numbers.normal(*x.shape)

    def formula(x, residual, weight, bias):
        total = (formulas.up(x) + formulas.up(residual)).to(x.dtype)
        return {"y": formulas.rms_norm(total, weight, eps, offset), "sum": total}

    check(
        lambda **g: dict(zip(("y", "sum"), liger.fused_add_rms_norm(**g), strict=True)),
        formula,
        plain_sum,
        given,
        **options,
    )


@fuzz(5)
def test_layer_norm(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    # Of one element less its mean the gradient is 0, and what kernels have there is rounding of what cancels.
    width, eps = draw(sizes.filter(lambda n: n > 1)), one_of(draw, 1e-5, 1e-2)
    x = numbers.normal(*leading(draw), width, scale=one_of(draw, 0.1, 1.0, 30.0))
    given = {"x": x, **parameters(draw, numbers, "weight", "bias", length=width)}
    check(
        liger.layer_norm,
        lambda x, weight, bias: formulas.layer_norm(x, weight, bias, eps),
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
        given,
        eps=eps,
    )


@fuzz(4)
def test_group_norm(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    # Groups of one element: as in layer_norm.
    groups, per_group, eps = one_of(draw, 1, 2, 3), one_of(draw, 2, 3, 5), one_of(draw, 1e-5, 1e-2)
    positions = draw(st.lists(st.sampled_from([1, 2, 5]), min_size=0, max_size=3))
    x = numbers.normal(one_of(draw, 0, 1, 3), groups * per_group, *positions)
    given = {"x": x, **parameters(draw, numbers, "weight", "bias", length=groups * per_group)}

    def plain(x, weight, bias):
        if weight is None:
            # Torch fails in the backward with a bias alone.
            return formulas.group_norm(x, groups, weight, bias, eps)
        return F.group_norm(x, groups, weight, bias, eps)

    check(
        liger.group_norm, lambda x, weight, bias: formulas.group_norm(x, groups, weight, bias, eps), plain, given,
        num_groups=groups, eps=eps,
    )  # fmt: skip


@fuzz(3)
def test_softmax(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    x = numbers.normal(*leading(draw), draw(sizes), scale=one_of(draw, 0.1, 3.0, 30.0))
    if x.numel() > 1 and draw(st.booleans()):
        # Classes that are ruled out, but never all of a row.
        x = x.clone()
        x[..., 1:][torch.rand(x[..., 1:].shape, generator=numbers.generator).to(x.device) < 0.3] = -torch.inf
    compare(liger.softmax, formulas.softmax, {"x": x}, ["x"])


ACTIVATIONS = {"silu": formulas.silu, "gelu": formulas.gelu, "gelu_tanh": formulas.gelu_tanh}


@fuzz(6)
def test_gated(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    name, packed, inplace = one_of(draw, *ACTIVATIONS), draw(st.booleans()), draw(st.booleans())
    shape, scale = (*leading(draw), draw(sizes)), one_of(draw, 0.3, 1.0, 6.0)
    options = {"inplace": inplace}
    if name != "silu":
        options["approximate"] = "tanh" if name == "gelu_tanh" else "none"
    family = "swiglu" if name == "silu" else "geglu"
    # In place they may be no leaves.
    own = (lambda t: t * 1) if inplace else (lambda t: t)
    if packed:
        gate_up = numbers.normal(*shape[:-1], 2 * shape[-1], scale=scale)
        compare(
            lambda gate_up: getattr(liger, f"{family}_packed")(own(gate_up), **options),
            lambda gate_up: formulas.gated(ACTIVATIONS[name], *gate_up.chunk(2, -1)),
            {"gate_up": gate_up},
            ["gate_up"],
        )
        return
    compare(
        lambda gate, up: getattr(liger, family)(own(gate), own(up), **options),
        lambda gate, up: formulas.gated(ACTIVATIONS[name], gate, up),
        {"gate": numbers.normal(*shape, scale=scale), "up": numbers.normal(*shape)},
        ["gate", "up"],
    )


@fuzz(1)
def test_relu_squared(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    x = numbers.normal(*leading(draw), draw(sizes), scale=one_of(draw, 0.1, 1.0, 10.0))
    compare(liger.relu_squared, formulas.relu_squared, {"x": x}, ["x"])


# --- rotary embeddings --------------------------------------------------------------------------------------


def queries(draw, numbers, heads_dim):
    """(q, k, rotary size, batch, tokens)"""
    batch, tokens, head_dim = one_of(draw, 0, 1, 2, 3), one_of(draw, 0, 1, 2, 5), one_of(draw, 2, 4, 7, 16)
    made = []
    for heads in (one_of(draw, 1, 2, 5), one_of(draw, 0, 1, 2)):
        shape = [batch, tokens, head_dim]
        shape.insert(heads_dim, heads)
        made.append(numbers.normal(*shape))
    return *made, 2 * draw(st.integers(0 if heads_dim == 1 else 1, head_dim // 2)), batch, tokens


def turned(heads_dim, function):
    """A formula for (B, H, T, D) for heads at another place."""

    def call(q, k, **tables):
        results = (function(x if heads_dim == 1 else x.transpose(1, 2), **tables) for x in (q, k))
        return {n: r if heads_dim == 1 else r.transpose(1, 2) for n, r in zip("qk", results, strict=True)}

    return call


def pairs_of(rotary, interleaved):
    half = rotary // 2
    return [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]


@fuzz(5)
def test_rope(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    heads_dim, interleaved, inplace = one_of(draw, 1, 2), draw(st.booleans()), draw(st.booleans())
    q, k, rotary, batch, tokens = queries(draw, numbers, heads_dim)
    front = one_of(draw, (), (1,), (batch,))
    dtype = one_of(draw, numbers.dtype, torch.float64 if numbers.dtype == torch.float64 else torch.float32)
    # Not of one angle, nor alike in both halves: the op takes any tables.
    tables = {n: numbers.normal(*front, tokens, rotary, dtype=dtype) for n in ("cos", "sin")}
    pairs = pairs_of(rotary, interleaved)

    def ours(q, k, cos, sin):
        q, k = (q * 1, k * 1) if inplace else (q, k)
        result = liger.rope(q, k, cos, sin, heads_dim, interleaved, inplace)
        return dict(zip("qk", result, strict=True))

    def formula(x, cos, sin):
        cos, sin = (t if t.dim() == 3 else t.unsqueeze(0) for t in (cos, sin))
        return formulas.rotated(x, cos, sin, pairs)

    compare(ours, turned(heads_dim, formula), {"q": q, "k": k, **tables}, ["q", "k"])


@fuzz(3)
def test_mrope(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(wide_dtypes))
    heads_dim, interleaved = one_of(draw, 1, 2), draw(st.booleans())
    q, k, rotary, batch, tokens = queries(draw, numbers, heads_dim)
    half = rotary // 2
    if interleaved:
        height, width = (draw(st.integers(0, max((half - 1 - a) // 3 + 1, 0))) for a in (1, 2))
    else:
        height = draw(st.integers(0, half))
        width = draw(st.integers(0, half - height))
    sections = [half - height - width, height, width]
    if min(sections) < 0:
        return
    if interleaved:
        axes = [a if a and p < 3 * sections[a] else 0 for p, a in ((p, p % 3) for p in range(half))]
    else:
        axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
    angles = numbers.normal(3, batch, tokens, half).repeat(1, 1, 1, 2)
    tables = {"cos": numbers.lay(angles.cos()), "sin": numbers.lay(angles.sin())}
    if 0 in (tables["cos"].stride(0), tables["sin"].stride(0)):
        # Expanded, each would be of one axis.
        tables = {"cos": angles.cos(), "sin": angles.sin()}

    def ours(q, k, cos, sin):
        how = {"unsqueeze_dim": heads_dim, "interleaved_sections": interleaved}
        return dict(zip("qk", liger.mrope(q, k, cos, sin, sections, **how), strict=True))

    def formula(x, cos, sin):
        factors = [torch.complex(cos[a, ..., p], sin[a, ..., p]) for p, a in enumerate(axes)]
        if not factors:
            return x
        return formulas.times_complex(x, torch.stack(factors, -1), pairs_of(rotary, False))

    compare(ours, turned(heads_dim, formula), {"q": q, "k": k, **tables}, ["q", "k"])


@fuzz(3)
def test_complex_rope(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, one_of(draw, torch.float32, torch.float16))
    heads_dim = one_of(draw, 1, 2)
    q, k, rotary, batch, tokens = queries(draw, numbers, heads_dim)
    front = one_of(draw, (), (batch,))
    parts = numbers.normal(*front, tokens, rotary // 2, 2, dtype=torch.float32)
    parts = parts.clone(memory_format=torch.contiguous_format)

    def ours(q, k, parts):
        freqs_cis = torch.view_as_complex(parts)
        return dict(zip("qk", liger.complex_rope(q, k, freqs_cis, unsqueeze_dim=heads_dim), strict=True))

    def formula(x, parts):
        factors = torch.view_as_complex(parts)
        factors = factors if factors.dim() == 3 else factors.unsqueeze(0)
        return formulas.times_complex(x, factors, pairs_of(rotary, True))

    compare(ours, turned(heads_dim, formula), {"q": q, "k": k, "parts": parts}, ["q", "k"])


# --- gated MLPs ---------------------------------------------------------------------------------------------


@fuzz(4)
def test_tiled_mlp(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    hidden, inner, merged = one_of(draw, 1, 3, 8), one_of(draw, 1, 2, 7, 16), draw(st.booleans())
    x = numbers.normal(*leading(draw), hidden)
    tokens, name = x.shape[:-1].numel(), one_of(draw, *ACTIVATIONS)
    given = {
        "x": x,
        "gate_weight": numbers.normal((2 if merged else 1) * inner, hidden, scale=hidden**-0.5),
        "down_weight": numbers.normal(hidden, inner, scale=inner**-0.5),
    }
    absent = {"up_weight": None, "gate_bias": None, "up_bias": None, "down_bias": None}
    if not merged:
        given["up_weight"] = numbers.normal(inner, hidden, scale=hidden**-0.5)
    if draw(st.booleans()):
        given["gate_bias"], given["down_bias"] = (
            numbers.normal(len(given["gate_weight"])),
            numbers.normal(hidden),
        )
        if not merged:
            given["up_bias"] = numbers.normal(inner)
    options = {
        "num_shards": maybe(draw, draw(st.integers(1, max(tokens, 1)))),
        "memory_budget": maybe(draw, 1, 1 << 12, 1 << 20),
    }
    compare(
        lambda **g: liger.tiled_mlp(**{**absent, **g}, activation=name, **options),
        lambda **g: formulas.gated_mlp(ACTIVATIONS[name], **{**absent, **g}),
        given,
        list(given),
    )


@fuzz(2)
def test_tiled(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(wide_dtypes))
    x = numbers.normal(*leading(draw), one_of(draw, 1, 3, 8))
    weight, factor = numbers.normal(5, x.shape[-1]), numbers.normal(*x.shape)
    shards = draw(st.integers(1, max(x.shape[:-1].numel(), 1)))

    def function(x, factor, weight=None):
        return torch.tanh(F.linear(x * factor, weight))

    compare(
        lambda x, factor, weight: liger.tiled(function, x, factor, num_shards=shards, weight=weight),
        lambda x, factor, weight: function(x, factor, weight),
        {"x": x, "factor": factor, "weight": weight},
        ["x", "factor", "weight"],
    )
