# SPDX-License-Identifier: BSD-3-Clause
"""The gated experts of a mixture, on random shapes, layouts, dtypes, routings and options."""

import formulas
import torch
import torch.nn.functional as F
from engine import Numbers, compare, dtypes, fuzz, leading, maybe, one_of
from hypothesis import strategies as st

import liger

ALPHA = 1.702
ACTIVATIONS = {
    "silu": lambda gate, up: gate / (1 + (-gate).exp()) * up,
    "gelu": lambda gate, up: 0.5 * gate * (1 + torch.erf(gate * 0.5**0.5)) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "gpt_oss": lambda gate, up: gate / (1 + (-ALPHA * gate).exp()) * (up + 1),
}


@fuzz(4)
def test_grouped_experts(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    experts, hidden, inner = one_of(draw, 1, 2, 5, 9), one_of(draw, 1, 7, 8, 24), one_of(draw, 1, 5, 8, 16)
    choices, front = min(one_of(draw, 1, 2, 3), experts), leading(draw)
    transposed, interleaved = draw(st.booleans()), draw(st.booleans())
    activation = one_of(draw, *ACTIVATIONS)
    # Some experts get no token, and an index of ``experts`` or more is of another rank.
    some = one_of(draw, experts, experts, max(experts // 2, choices), experts + 2)
    scores = torch.rand(*front, max(some, choices), generator=numbers.generator)
    index = numbers.lay(scores.topk(choices, -1).indices.to(one_of(draw, torch.int64, torch.int32)))
    first, second = (2 * inner, hidden), (hidden, inner)
    if transposed:
        first, second = first[::-1], second[::-1]
    given = {
        "x": numbers.normal(*front, hidden),
        "weights": numbers.uniform(*front, choices, dtype=one_of(draw, numbers.dtype, torch.float32)),
        "gate_up": numbers.normal(experts, *first, scale=hidden**-0.5, alike=False),
        "down": numbers.normal(experts, *second, scale=inner**-0.5, alike=False),
    }
    if draw(st.booleans()):
        given["gate_up_bias"] = numbers.normal(experts, 2 * inner, scale=0.5)
        given["down_bias"] = numbers.normal(experts, hidden, scale=0.5)
    # Beyond the numbers of a case: where the clamp begins, one rounding decides about a gradient.
    options = {"limit": maybe(draw, 100.0), "recompute": draw(st.booleans())}

    def ours(x, weights, gate_up, down, gate_up_bias=None, down_bias=None):
        return liger.grouped_experts(
            x, index, weights, gate_up, down, gate_up_bias, down_bias, activation, transposed, interleaved, ALPHA,
            **options,
        )  # fmt: skip

    def activate(both):
        halves = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        return ACTIVATIONS[activation](*halves)

    def formula(x, weights, gate_up, down, gate_up_bias=None, down_bias=None):
        if transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return formulas.experts(x, index, weights, gate_up, down, gate_up_bias, down_bias, activate)

    compare(ours, formula, given, list(given))
