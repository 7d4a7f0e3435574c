# SPDX-License-Identifier: BSD-3-Clause
"""Norms, gated units, MLPs, rotary embeddings."""

import torch
from torch import nn
from torch.nn import functional as F

from .case import Config, compare, random

X, R, W, B = random(2, 5, 8), random(2, 5, 8, seed=1), random(8, seed=2), random(8, seed=3)


def rms(x, w, eps=1e-6, offset=0.0):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + w)


NORM = 1e-5, 1.0, "gemma"


def gemma(x, w):
    return rms(x, w, 1e-5, 1.0)


def added(x, r, w):
    return rms(x + r, w, 1e-5, 1.0), x + r


compare("layers.rows", "LigerRMSNormFunction", lambda f, x, w: f.apply(x, w, *NORM), gemma, X, W)
compare("layers.rows", "liger_rms_norm", lambda f, x, w: f(x, w, *NORM), gemma, X, W)


def rms_forward(x, w):
    y = gemma(x, w).detach()
    rstd = torch.rsqrt(x.detach().square().mean(-1) + 1e-5).flatten()
    return y, x.detach().flatten(0, 1), rstd


def rms_backward(grad, x, w, rstd):
    return torch.autograd.grad(gemma(x, w), (x, w), grad)


GRADIENT = random(2, 5, 8, seed=4, grad=False)
RSTD = torch.rsqrt(X.detach().square().mean(-1) + 1e-5).flatten()
compare("layers.rows", "rms_norm_forward", lambda f, x, w: f(x, w, *NORM, None), rms_forward, X, W)
compare(
    "layers.rows",
    "rms_norm_backward",
    lambda f, grad, x, w, rstd: f(grad, x.flatten(0, 1), w, rstd, *NORM[1:], 8, 4, True, None),
    rms_backward,
    GRADIENT,
    X,
    W,
    RSTD,
)
compare("functional", "rms_norm", lambda f, x, w: f(x, w, *NORM[:1], offset=1.0), gemma, X, W)
compare(
    "layers.rows", "LigerFusedAddRMSNormFunction", lambda f, x, r, w: f.apply(x, r, w, *NORM), added, X, R, W
)
compare("layers.rows", "liger_fused_add_rms_norm", lambda f, x, r, w: f(x, r, w, *NORM), added, X, R, W)
compare("functional", "fused_add_rms_norm", lambda f, x, r, w: f(x, r, w, *NORM), added, X, R, W)


def layer(x, w, b):
    return F.layer_norm(x, (8,), w, b, 1e-5)


compare("layers.rows", "LigerLayerNormFunction", lambda f, x, w, b: f.apply(x, w, b, 1e-5), layer, X, W, B)
compare("layers.rows", "liger_layer_norm", lambda f, x, w, b: f(x, w, b, 1e-5), layer, X, W, B)
compare("functional", "layer_norm", lambda f, x, w, b: f(x, w, b, 1e-5), layer, X, W, B)


def group(x, w, b):
    return F.group_norm(x, 4, w, b, 1e-5)


IMAGE = random(2, 8, 3)
compare(
    "layers.rows",
    "LigerGroupNormFunction",
    lambda f, x, w, b: f.apply(x, w, b, 8, 4, 1e-5),
    group,
    IMAGE,
    W,
    B,
)
compare("layers.rows", "liger_group_norm", lambda f, x, w, b: f(x, w, b, 8, 4, 1e-5), group, IMAGE, W, B)


def silu_mul(a, b):
    return F.silu(a) * b


def gelu_mul(a, b):
    return F.gelu(a, approximate="tanh") * b


def multiplied(a, b):
    return F.silu(0.5 * a) * b * 3


compare("layers.rows", "LigerSiLUMulFunction", lambda f, a, b: f.apply(a, b, 0.5, 3.0), multiplied, X, R)
compare("functional", "swiglu", lambda f, a, b: f(a, b, 0.5, 3.0), multiplied, X, R)
compare("layers.rows", "liger_swiglu", lambda f, a, b: f(a, b), silu_mul, X, R)
compare(
    "layers.rows",
    "LigerFusedGateUpSiLUMulFunction",
    lambda f, x: f.apply(x),
    lambda x: silu_mul(*x.chunk(2, -1)),
    X,
)
compare("layers.rows", "LigerGELUMulFunction", lambda f, a, b: f.apply(a, b), gelu_mul, X, R)
compare("layers.rows", "liger_geglu", lambda f, a, b: f(a, b), gelu_mul, X, R)
compare("functional", "geglu", lambda f, a, b: f(a, b), gelu_mul, X, R)
compare("layers.rows", "LigerSoftmaxFunction", lambda f, x: f.apply(x), lambda x: x.softmax(-1), X)
compare("layers.rows", "liger_softmax", lambda f, x: f(x), lambda x: x.softmax(-1), X)
compare("functional", "softmax", lambda f, x: f(x), lambda x: x.softmax(-1), X)
compare("layers.rows", "LigerReLUSquaredFunction", lambda f, x: f.apply(x), lambda x: x.relu().square(), X)
compare("layers.rows", "liger_relu_squared", lambda f, x: f(x), lambda x: x.relu().square(), X)
LINEAR = nn.Linear(8, 8)
compare(
    "layers.rows", "LigerTiledMLPFunction", lambda f, x: f.apply(lambda m, x: m(x).tanh(), LINEAR, x, 3),
    lambda x: LINEAR(x).tanh(), X,
)  # fmt: skip
compare(
    "layers.rows",
    "apply_tiled_mlp",
    lambda f, x: f(lambda m, x: m(x).tanh(), LINEAR, x),
    lambda x: LINEAR(x).tanh(),
    X,
)


# --- modules ------------------------------------------------------------------------------------------------


def module_of(f, *arguments, weights=()):
    """A module whose parameters of these names are the given tensors: the arguments after the
    constructor's."""
    module = f(*arguments)
    for name, tensor in weights:
        owner = module.get_submodule(name.rpartition(".")[0])
        del owner._parameters[name.rpartition(".")[2]]
        setattr(owner, name.rpartition(".")[2], tensor)
    return module


def norm_case(name, offset, *arguments):
    compare(
        "layers.norms", name, lambda f, x, w: module_of(f, 8, 1e-5, *arguments, weights=[("weight", w)])(x),
        lambda x, w: rms(x, w, 1e-5, offset), X, W,
    )  # fmt: skip


norm_case("LigerRMSNorm", 0.5, 0.5, "none")
for _name in ("Gemma", "Gemma2", "Gemma3", "Qwen3Next", "MuseGlimmerTextCentered"):
    norm_case(f"LigerRMSNormFor{_name}", 1.0)
for _name in ("Gemma4", "Olmo2", "Glm4", "MuseGlimmer"):
    norm_case(f"LigerRMSNormFor{_name}", 0.0)
compare(
    "layers.norms", "LigerFusedAddRMSNorm",
    lambda f, x, r, w: module_of(f, 8, 1e-5, 1.0, "gemma", weights=[("weight", w)])(x, r), added, X, R, W,
)  # fmt: skip
compare(
    "layers.norms", "LigerLayerNorm",
    lambda f, x, w, b: module_of(f, 8, 1e-5, True, weights=[("weight", w), ("bias", b)])(x), layer, X, W, B,
)  # fmt: skip
compare(
    "layers.norms", "LigerGroupNorm",
    lambda f, x, w, b: module_of(f, 8, 4, 1e-5, True, weights=[("weight", w), ("bias", b)])(x), group, IMAGE, W, B,
)  # fmt: skip
compare("layers.norms", "LigerSoftmax", lambda f, x: f()(x), lambda x: x.softmax(-1), X)
compare("layers.norms", "LigerReLUSquared", lambda f, x: f()(x), lambda x: x.relu().square(), X)

GATE, UP, DOWN, PACKED = random(12, 8), random(12, 8, seed=4), random(8, 12), random(24, 8)


def gated(product, names="gate_proj up_proj down_proj"):
    weights = [f"{name}.weight" for name in names.split()]

    def ours(config, f, x, *tensors):
        return module_of(f, config, weights=list(zip(weights, tensors, strict=True)))(x)

    def formula(x, gate, up, down):
        return product(x @ gate.T, x @ up.T) @ down.T

    return ours, formula


def mlp_case(names, config, product, projections="gate_proj up_proj down_proj"):
    ours, formula = gated(product, projections)
    compare(
        "layers.mlps", names, lambda f, *tensors: ours(config, f, *tensors), formula, X, GATE, UP, DOWN
    )  # fmt: skip


SILU, GELU = Config(), Config(hidden_act="gelu_pytorch_tanh")
mlp_case("LigerSwiGLUMLP LigerQwen3MoeSwiGLUMLP LigerHunyuanV1SwiGLUMLP LigerTiledSwiGLUMLP", SILU, silu_mul)
mlp_case("LigerSwiGLUMLPForMuseGlimmer", Config(hidden_activation="silu"), silu_mul)
mlp_case("LigerFalconH1SwiGLUMLP", Config(mlp_multipliers=(0.5, 3.0)), multiplied)
mlp_case("LigerGEGLUMLP LigerGEGLUMLPForGemma4 LigerTiledGEGLUMLP", GELU, gelu_mul)
mlp_case("LigerBlockSparseTop2MLP", SILU, silu_mul, "w1 w3 w2")
compare(
    "layers.mlps", "LigerPhi3SwiGLUMLP",
    lambda f, x, p, d: module_of(f, SILU, weights=[("gate_up_proj.weight", p), ("down_proj.weight", d)])(x),
    lambda x, p, d: silu_mul(*(x @ p.T).chunk(2, -1)) @ d.T, X, PACKED, DOWN,
)  # fmt: skip

# Five tokens with two of four experts each; one expert has no token.
TOKENS, EXPERTS = random(5, 8), torch.tensor([[0, 1], [3, 0], [1, 3], [0, 3], [1, 0]])
STACKED = random(4, 24, 8), random(4, 8, 12)
SHARES = random(5, 2)


def mixture(x, gate_up, down, shares):
    """Every expert of every token, of which the chosen ones are weighted and added."""
    products = silu_mul(*torch.einsum("th,eih->tei", x, gate_up).chunk(2, -1))
    outputs = torch.einsum("tei,ehi->teh", products, down)
    return sum(s[:, None] * outputs[torch.arange(5), e] for s, e in zip(shares.T, EXPERTS.T, strict=True))


compare(
    "layers.experts", "LigerFusedMoEFunction", lambda f, x, g, d, s: f.apply(x, g, d, EXPERTS.int(), s), mixture,
    TOKENS, *STACKED, SHARES,
)  # fmt: skip


def experts(f, x, gate_up, down, shares):
    """A sequence of tokens, whose choices have no dimension for the sequences."""
    config = Config(num_local_experts=4, intermediate_size=99, moe_intermediate_size=12)
    module = module_of(f, config, weights=[("gate_up_proj", gate_up), ("down_proj", down)])
    return module(x[None], EXPERTS, shares)[0]


compare("layers.experts", "LigerExperts", experts, mixture, TOKENS, *STACKED, SHARES)


# --- rotary embeddings --------------------------------------------------------------------------------------

Q, K = random(2, 3, 5, 8), random(2, 1, 5, 8)
ANGLES = random(2, 5, 4, grad=False)
COS, SIN = (torch.cat((t, t), -1) for t in (ANGLES.cos(), ANGLES.sin()))


def rotate(x, cos, sin):
    half = cos.shape[-1] // 2
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    turned = torch.cat((-rotated[..., half:], rotated[..., :half]), -1)
    return torch.cat((rotated * cos + turned * sin, rest), -1)


def both(q, k, cos, sin):
    return rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])


compare("layers.rope", "LigerRopeFunction", lambda f, q, k, c, s: f.apply(q, k, c, s), both, Q, K, COS, SIN)
for _name in ("liger_rotary_pos_emb", "liger_rope"):
    # Tables for a part of the head, with a dimension of size 1 for the heads.
    compare(
        "layers.rope", _name, lambda f, q, k, c, s: f(q, k, c[:, None], s[:, None]), both, Q, K,
        COS[..., [0, 1, 4, 5]], SIN[..., [0, 1, 4, 5]],
    )  # fmt: skip


def rope_forward(q, k, cos, sin):
    return *both(q.detach(), k.detach(), cos, sin), cos, sin


def rope_backward(dq, dk, cos, sin):
    return torch.autograd.grad(both(Q, K, cos, sin), (Q, K), (dq, dk)) * 2


def rope_backward_of_both_orders(f, dq, dk, cos, sin):
    tokens_first = f(dq.transpose(1, 2), dk.transpose(1, 2), cos, sin, None, 2)
    return *f(dq, dk, cos, sin), *(t.transpose(1, 2) for t in tokens_first)


compare(
    "layers.rope",
    "rope_forward",
    lambda f, q, k, c, s: f(q, k, c[:, None], s[:, None]),
    rope_forward,
    Q,
    K,
    COS,
    SIN,
)
compare(
    "layers.rope",
    "rope_backward",
    rope_backward_of_both_orders,
    rope_backward,
    random(2, 3, 5, 8, seed=1, grad=False),
    random(2, 1, 5, 8, seed=1, grad=False),
    COS,
    SIN,
)
compare("functional", "rope", lambda f, q, k, c, s: f(q, k, c, s, None, 1), both, Q, K, COS, SIN)
compare(
    "layers.rope",
    "liger_rotary_pos_emb_gpt_oss",
    lambda f, q, k, c, s: f(q, k, c[..., :4], s[..., :4]),
    both,
    Q,
    K,
    COS,
    SIN,
)
compare(
    "layers.rope", "liger_rotary_pos_emb_vision", lambda f, q, k, c, s: f(q, k, c, s),
    lambda q, k, c, s: (rotate(q, c[:, None], s[:, None]), rotate(k, c[:, None], s[:, None])),
    random(5, 3, 8), random(5, 3, 8, seed=1), COS[0], SIN[0],
)  # fmt: skip


def multimodal(q, k, cos, sin):
    sections = [2, 1, 1] * 2
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(t.split(sections, -1))], -1) for t in (cos, sin)
    )
    return both(q, k, cos, sin)


for _name, _ours in (
    ("LigerQwen2VLMRopeFunction", lambda f, *tensors: f.apply(*tensors, [2, 1, 1])),
    ("liger_multimodal_rotary_pos_emb", lambda f, *tensors: f(*tensors, [2, 1, 1])),
    ("liger_qwen2vl_mrope", lambda f, *tensors: f(*tensors, [2, 1, 1], 1)),
):
    compare(
        "layers.rope", _name, _ours, multimodal, Q, K, *(torch.stack((t, 2 * t, 3 * t)) for t in (COS, SIN))
    )  # fmt: skip


def complex_product(q, k, freqs):
    factor = freqs.reshape(-1, 1, 4)
    return tuple(
        torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * factor).flatten(-2)
        for x in (q, k)
    )


FREQS = torch.polar(torch.ones(5, 4), ANGLES[0])
HEADS_LAST = random(2, 5, 3, 8), random(2, 5, 1, 8)
compare(
    "layers.rope", "LigerLlama4RopeFunction", lambda f, *t: f.apply(*t), complex_product, *HEADS_LAST, FREQS
)
compare(
    "layers.rope",
    "liger_llama4_text_rotary_pos_emb",
    lambda f, *t: f(*t),
    complex_product,
    *HEADS_LAST,
    FREQS,
)
compare(
    "layers.rope", "liger_llama4_vision_rotary_pos_emb", lambda f, *t: f(*t), complex_product, *HEADS_LAST,
    FREQS.real.clone()[:, None],
)  # fmt: skip
