"""The public ops as data: how to call each one, and the same in plain torch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import liger

HIDDEN, VOCAB = 16, 11


@dataclass
class Case:
    function: object
    plain: object  # the same in plain torch
    make: object  # (tokens) -> inputs
    token_dims: tuple  # per input, the dimension of the tokens or None


def _randn(*shape):
    return torch.randn(shape)


def target_of(tokens):
    target = torch.randint(VOCAB, (tokens,))
    target[0] = -100
    return target


def _plain_rms_norm(x, weight):
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), 1e-6).to(x.dtype)


def _plain_fused_add_rms_norm(x, residual, weight):
    return _plain_rms_norm(x + residual, weight), x + residual


def _plain_rope(q, k, cos, sin):
    def turned(x):
        return torch.cat((-x[..., HIDDEN // 2 :], x[..., : HIDDEN // 2]), -1)

    return q * cos.to(q.dtype) + turned(q) * sin.to(q.dtype), k * cos.to(k.dtype) + turned(k) * sin.to(
        k.dtype
    )


def _plain_packed(activation):
    def plain(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up

    return plain


EXPERTS = 3


def _plain_experts(x, index, weights, gate_up, down):
    """Every expert for every token, with weights that are zero for experts that a token has not chosen."""
    gate, up = torch.einsum("btd,ehd->bteh", x, gate_up).chunk(2, -1)
    outputs = torch.einsum("bteh,edh->bted", F.silu(gate) * up, down)
    chosen = F.one_hot(index, EXPERTS).to(weights.dtype)
    return torch.einsum("btke,btk,bted->btd", chosen, weights, outputs.to(weights.dtype)).to(x.dtype)


CASES = {
    "rms_norm": Case(
        liger.rms_norm, _plain_rms_norm, lambda t: (_randn(2, t, HIDDEN), _randn(HIDDEN)), (1, None)
    ),
    "fused_add_rms_norm": Case(
        liger.fused_add_rms_norm,
        _plain_fused_add_rms_norm,
        lambda t: (_randn(2, t, HIDDEN), _randn(2, t, HIDDEN), _randn(HIDDEN)),
        (1, 1, None),
    ),
    "rms_norm_gated": Case(
        liger.rms_norm_gated,
        lambda x, gate, weight: _plain_rms_norm(x, weight) * F.silu(gate),
        lambda t: (_randn(2, t, HIDDEN), _randn(2, t, HIDDEN), _randn(HIDDEN)),
        (1, 1, None),
    ),
    "layer_norm": Case(
        liger.layer_norm,
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
        lambda t: (_randn(2, t, HIDDEN), _randn(HIDDEN), _randn(HIDDEN)),
        (1, None, None),
    ),
    "group_norm": Case(
        lambda x, weight, bias: liger.group_norm(x, 4, weight, bias),
        lambda x, weight, bias: F.group_norm(x, 4, weight, bias),
        lambda t: (_randn(t, HIDDEN, 5), _randn(HIDDEN), _randn(HIDDEN)),
        (0, None, None),
    ),
    "rope": Case(
        liger.rope,
        _plain_rope,
        lambda t: (_randn(2, 4, t, HIDDEN), _randn(2, 2, t, HIDDEN), *torch.rand(2, t, HIDDEN)),
        (2, 2, 0, 0),
    ),
    "qk_norm_rope": Case(
        liger.qk_norm_rope,
        lambda q, k, v, w, cos, sin: _plain_rope(_plain_rms_norm(q, v), _plain_rms_norm(k, w), cos, sin),
        lambda t: (
            _randn(2, 4, t, HIDDEN),
            _randn(2, 2, t, HIDDEN),
            _randn(HIDDEN),
            _randn(HIDDEN),
            *torch.rand(2, t, HIDDEN),
        ),
        (2, 2, None, None, 0, 0),
    ),
    "swiglu": Case(
        liger.swiglu,
        lambda gate, up: F.silu(gate) * up,
        lambda t: (_randn(2, t, HIDDEN), _randn(2, t, HIDDEN)),
        (1, 1),
    ),
    "swiglu_packed": Case(
        liger.swiglu_packed, _plain_packed(F.silu), lambda t: (_randn(2, t, HIDDEN),), (1,)
    ),
    "geglu": Case(
        liger.geglu,
        lambda gate, up: F.gelu(gate) * up,
        lambda t: (_randn(2, t, HIDDEN), _randn(2, t, HIDDEN)),
        (1, 1),
    ),
    "geglu_packed": Case(liger.geglu_packed, _plain_packed(F.gelu), lambda t: (_randn(2, t, HIDDEN),), (1,)),
    "relu_squared": Case(
        liger.relu_squared, lambda x: F.relu(x).square(), lambda t: (_randn(2, t, HIDDEN),), (1,)
    ),
    "softmax": Case(liger.softmax, lambda x: F.softmax(x, -1), lambda t: (_randn(2, t, HIDDEN),), (1,)),
    "tiled_mlp": Case(
        liger.tiled_mlp,
        lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
        lambda t: (_randn(2, t, HIDDEN), *torch.randn(2, 24, HIDDEN) / 4, _randn(HIDDEN, 24) / 5),
        (1, None, None, None),
    ),
    "grouped_experts": Case(
        liger.grouped_experts,
        _plain_experts,
        lambda t: (
            _randn(2, t, HIDDEN),
            torch.randint(EXPERTS, (2, t, 2)),
            torch.rand(2, t, 2),
            _randn(EXPERTS, 48, HIDDEN) / 4,
            _randn(EXPERTS, HIDDEN, 24) / 5,
        ),
        (1, 1, 1, None, None),
    ),
    "cross_entropy": Case(
        liger.cross_entropy, F.cross_entropy, lambda t: (_randn(t, VOCAB), target_of(t)), (0, 0)
    ),
    "fused_linear_ce": Case(
        liger.fused_linear_ce,
        lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
        lambda t: (_randn(t, HIDDEN), _randn(VOCAB, HIDDEN), target_of(t)),
        (0, None, 0),
    ),
    "fused_linear_logprobs": Case(
        liger.fused_linear_logprobs,
        lambda x, weight, target: -F.cross_entropy(F.linear(x, weight), target, reduction="none"),
        lambda t: (_randn(t, HIDDEN), _randn(VOCAB, HIDDEN), target_of(t)),
        (0, None, 0),
    ),
}


def differentiable(name, index, tensor):
    """Whether this input of the op gets a gradient: all that floats but the tables of rope."""
    tables_from = {"rope": 2, "qk_norm_rope": 4}
    return tensor.is_floating_point() and index < tables_from.get(name, index + 1)


def inputs_of(name, device, tokens=6):
    inputs = [t.to(device) for t in CASES[name].make(tokens)]
    return [t.requires_grad_(differentiable(name, i, t)) for i, t in enumerate(inputs)]


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def total(outputs):
    """A scalar whose gradient differs from element to element."""
    return sum(
        (o.float() * torch.linspace(1, 2, o.numel(), device=o.device).view(o.shape)).sum() for o in outputs
    )


def results(function, inputs):
    """[outputs, gradients] of a function."""
    outputs = as_tuple(function(*inputs))
    return [*outputs, *torch.autograd.grad(total(outputs), [t for t in inputs if t.requires_grad])]


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
