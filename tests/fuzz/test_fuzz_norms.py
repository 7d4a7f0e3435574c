# SPDX-License-Identifier: BSD-3-Clause
"""The norm with a gate, and the norm of heads before the rotation, on random shapes, layouts, dtypes and
options."""

import formulas
import torch
from engine import Numbers, compare, dtypes, fuzz, leading, one_of, sizes
from hypothesis import strategies as st
from test_fuzz_rows import pairs_of, parameters, queries

import liger

ACTIVATIONS = {"silu": formulas.silu, "sigmoid": torch.sigmoid}


def rounded(t, dtype, when):
    return formulas.up(t.to(dtype)) if when else t


def with_roundings(x, gate, weight, group_size, eps, offset, casting_mode, norm_before_gate, activation):
    """``formulas.rms_norm_gated`` in plain torch, with the roundings of the casting mode."""
    none, cast = casting_mode == "none", casting_mode != "gemma"
    a = rounded(ACTIVATIONS[activation](formulas.up(gate)), x.dtype, none)
    h = formulas.up(x) if norm_before_gate else rounded(formulas.up(x) * a, x.dtype, none)
    rows = h.unflatten(-1, (-1, group_size))
    rstd = rounded((rows.square().mean(-1, keepdim=True) + eps).rsqrt(), x.dtype, none)
    n = rounded((rows * rstd).flatten(-2), x.dtype, cast)
    if weight is not None:
        n = rounded(n * (formulas.up(weight) + offset), x.dtype, cast and weight.dtype == x.dtype)
    return (n * a if norm_before_gate else n).to(x.dtype)


@fuzz(4)
def test_rms_norm_gated(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    group_size, groups = draw(sizes), one_of(draw, 1, 1, 2, 3, 7)
    x = numbers.normal(*leading(draw), groups * group_size, scale=one_of(draw, 0.03, 1.0, 30.0))
    given = {
        "x": x,
        "gate": numbers.normal(*x.shape, scale=one_of(draw, 0.1, 1.0, 5.0)),
        **parameters(draw, numbers, "weight", length=groups * group_size),
    }
    options = {
        "eps": one_of(draw, 1e-6, 1e-3, 0.5),
        "offset": one_of(draw, 0.0, 1.0, -0.3),
        "casting_mode": one_of(draw, "llama", "gemma", "none"),
        "norm_before_gate": draw(st.booleans()),
        "activation": one_of(draw, *ACTIVATIONS),
    }

    def ours(x, gate, weight=None):
        size = None if groups == 1 and one_of(draw, True, False) else group_size
        return liger.rms_norm_gated(x, gate, weight, group_size=size, **options)

    def formula(x, gate, weight=None):
        wide = formulas.up(x), ACTIVATIONS[options["activation"]](formulas.up(gate))
        norm_before_gate, eps, offset = (options[name] for name in ("norm_before_gate", "eps", "offset"))
        return formulas.rms_norm_gated(*wide, weight, group_size, norm_before_gate, eps, offset).to(x.dtype)

    compare(ours, formula, given, list(given), lambda x, gate, weight=None: with_roundings(
        x, gate, weight, group_size, **options
    ))  # fmt: skip


@fuzz(4)
def test_qk_norm_rope(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    heads_dim, interleaved = one_of(draw, 1, 2), draw(st.booleans())
    q, k, rotary, batch, tokens = queries(draw, numbers, heads_dim)
    front = one_of(draw, (), (1,), (batch,))
    dtype = one_of(draw, numbers.dtype, torch.float64 if numbers.dtype == torch.float64 else torch.float32)
    tables = {n: numbers.normal(*front, tokens, rotary, dtype=dtype) for n in ("cos", "sin")}
    weights = parameters(draw, numbers, "q_weight", "k_weight", length=q.shape[-1])
    eps, offset = one_of(draw, 1e-6, 1e-3, 0.5), one_of(draw, 0.0, 1.0, -0.3)
    mode = one_of(draw, "llama", "gemma", "none")

    def ours(q, k, cos, sin, q_weight=None, k_weight=None):
        options = eps, offset, mode, heads_dim, interleaved
        return dict(zip("qk", liger.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, *options), strict=True))

    def applied(norm):
        def both(q, k, cos, sin, q_weight=None, k_weight=None):
            cos, sin = (t if t.dim() == 3 else t.unsqueeze(0) for t in (cos, sin))
            results = {}
            for name, x, weight in (("q", q, q_weight), ("k", k, k_weight)):
                heads = norm(x if heads_dim == 1 else x.transpose(1, 2), weight)
                y = formulas.rotated(heads, cos, sin, pairs_of(rotary, interleaved))
                results[name] = y if heads_dim == 1 else y.transpose(1, 2)
            return results

        return both

    def plain_norm(x, weight):
        rstd = (formulas.up(x).square().mean(-1, keepdim=True) + eps).rsqrt()
        n = formulas.up(x) * rounded(rstd, x.dtype, mode == "none")
        n = rounded(n, x.dtype, mode != "gemma")
        return (n if weight is None else n * (formulas.up(weight) + offset)).to(x.dtype)

    compare(
        ours,
        applied(lambda x, weight: formulas.rms_norm(x, weight, eps, offset)),
        {"q": q, "k": k, **tables, **weights},
        ["q", "k", *weights],
        applied(plain_norm),
    )
