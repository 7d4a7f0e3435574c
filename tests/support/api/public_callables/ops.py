# SPDX-License-Identifier: BSD-3-Clause
"""Ops of one tensor, elementwise ops, rotary embeddings and tiled functions."""

import torch
from declared_calls import DECLARED, is_of_batch, options, shapes

import liger

from .case import HIDDEN, X, add, normal, tensors, with_options

for _op in DECLARED:
    _shapes = shapes(_op, (2, HIDDEN, 5) if is_of_batch(_op) else X)
    add(_op, getattr(liger, _op), with_options(tensors(**_shapes), **options(_op)), " ".join(_shapes))

_gated_norm = tensors(x=X, gate=X, weight=(HIDDEN,))
add(
    "rms_norm_gated gate first",
    liger.rms_norm_gated,
    with_options(_gated_norm, group_size=4, norm_before_gate=False, activation="sigmoid"),
    "x gate weight",
    public="rms_norm_gated",
)
add(
    "swiglu inplace",
    lambda gate, up: liger.swiglu(gate * 1, up * 1, inplace=True),
    tensors(gate=X, up=X),
    "gate up",
    public="swiglu",
)
add(
    "swiglu_packed inplace",
    lambda gate_up: liger.swiglu_packed(gate_up * 1, inplace=True),
    tensors(gate_up=X),
    "gate_up",
    public="swiglu_packed",
)
add(
    "geglu tanh",
    liger.geglu,
    with_options(tensors(gate=X, up=X), approximate="tanh"),
    "gate up",
    public="geglu",
)


def rotary(device, dtype):
    q, k = normal(device, dtype, 2, 4, 3, HIDDEN), normal(device, dtype, 2, 2, 3, HIDDEN)
    angle = torch.rand(2, 3, HIDDEN // 2, dtype=torch.float64).repeat(1, 1, 2)
    return {"q": q, "k": k, "cos": angle.cos().to(device, dtype), "sin": angle.sin().to(device, dtype)}


def _mrope(device, dtype):
    made = rotary(device, dtype)
    tables = {name: made[name].unsqueeze(0).repeat(3, 1, 1, 1) for name in ("cos", "sin")}
    return made | tables | {"mrope_section": [2, 3, 3]}


def _complex_rope(device, dtype):
    angle = torch.rand(3, HIDDEN // 2, dtype=torch.float64)
    table = torch.polar(torch.ones_like(angle), angle)
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64
    q, k = normal(device, dtype, 2, 3, 4, HIDDEN), normal(device, dtype, 2, 3, 2, HIDDEN)
    return {"q": q, "k": k, "freqs_cis": table.to(device, wide)}


add("rope", liger.rope, rotary, "q k")
# In place, what is given up may not be a leaf.
add(
    "rope inplace",
    lambda q, k, cos, sin: liger.rope(q * 1, k * 1, cos, sin, inplace=True),
    rotary,
    "q k",
    public="rope",
)


def _normed_rotary(device, dtype):
    weights = {name: normal(device, dtype, HIDDEN) for name in ("q_weight", "k_weight")}
    return rotary(device, dtype) | weights


add("qk_norm_rope", liger.qk_norm_rope, _normed_rotary, "q k q_weight k_weight")
add("mrope", liger.mrope, _mrope, "q k")
add("complex_rope", liger.complex_rope, _complex_rope, "q k")

MLP = {"x": X, "gate_weight": (24, HIDDEN), "up_weight": (24, HIDDEN), "down_weight": (HIDDEN, 24)}
add("tiled_mlp", liger.tiled_mlp, with_options(tensors(**MLP), num_shards=2), " ".join(MLP))


def experts(device, dtype, num_experts=4, biased=False, transposed=False):
    """The arguments of grouped_experts: one expert without tokens, the last one with one, and a sentinel."""
    index = torch.randint(num_experts - 2, (7, 2))
    index[0, 0], index[1, 1] = num_experts - 1, num_experts
    shapes = {"gate_up_proj": (48, HIDDEN), "down_proj": (HIDDEN, 24)}
    made = {
        "x": normal(device, dtype, 7, HIDDEN),
        "top_k_index": index.to(device),
        "top_k_weights": torch.rand(7, 2).to(device),
    }
    for name, shape in shapes.items():
        made[name] = normal(device, dtype, num_experts, *(shape[::-1] if transposed else shape), scale=0.3)
    if biased:
        made["gate_up_proj_bias"] = normal(device, dtype, num_experts, 48, scale=0.5)
        made["down_proj_bias"] = normal(device, dtype, num_experts, HIDDEN, scale=0.5)
    return made


_EXPERTS = "x top_k_weights gate_up_proj down_proj"
add("grouped_experts", liger.grouped_experts, experts, _EXPERTS)
add(
    "grouped_experts recompute",
    liger.grouped_experts,
    with_options(experts, recompute=True, activation="gelu_tanh", limit=1.5),
    _EXPERTS,
    public="grouped_experts",
)
add(
    "grouped_experts gpt_oss",
    liger.grouped_experts,
    with_options(
        lambda device, dtype: experts(device, dtype, biased=True, transposed=True),
        activation="gpt_oss", is_transposed=True, is_interleaved=True, limit=1.0,
    ),
    f"{_EXPERTS} gate_up_proj_bias down_proj_bias",
    public="grouped_experts",
)  # fmt: skip


def _tiled(x, weight, num_shards):
    return liger.tiled(lambda part: torch.nn.functional.silu(part @ weight.t()), x,
                       num_shards=num_shards, parameters=(weight,))  # fmt: skip


add("tiled", _tiled, with_options(tensors(x=X, weight=(7, HIDDEN)), num_shards=2), "x weight")
