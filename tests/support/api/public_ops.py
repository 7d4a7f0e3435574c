# SPDX-License-Identifier: BSD-3-Clause
"""The public ops as data: how to call each one, and the same in plain torch. Declared ops need no entry."""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from declared_calls import DECLARED, call, is_of_batch, shapes

import liger

HIDDEN, VOCAB = 16, 11


@dataclass
class Case:
    """One op.

    Attributes:
        function: takes the tensors of the op by position.
        plain: the same in plain torch; None: the torch backend, which is the reference formula of a declared
            op.
        make: (tokens) -> inputs.
        token_dims: per input, the dimension of the tokens, or None.
        alike: how many of the first inputs have the shape of the first one.
    """

    function: object
    plain: object
    make: object
    token_dims: tuple
    alike: int = 1

    def reference(self, *inputs):
        if self.plain is not None:
            return self.plain(*inputs)
        with liger.use_backend("torch"):
            return self.function(*inputs)


def _declared(op):
    """The case of a declared op: its tensors, and the options that have no default."""

    def make(tokens):
        of_op = shapes(op, (tokens, HIDDEN, 5) if is_of_batch(op) else (2, tokens, HIDDEN))
        return tuple(_randn(*shape) for shape in of_op.values())

    tokens = 0 if is_of_batch(op) else 1
    dims = tuple(None if DECLARED[op].is_parameter(name) else tokens for name in shapes(op, (1, 1, 1)))
    return Case(functools.wraps(getattr(liger, op))(call(op)), None, make, dims, dims.count(tokens))


def _randn(*shape):
    return torch.randn(shape)


def target_of(tokens):
    target = torch.randint(VOCAB, (tokens,))
    target[0] = -100
    return target


def _plain_rms_norm(x, weight):
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), 1e-6).to(x.dtype)


def _plain_rope(q, k, cos, sin):
    def turned(x):
        return torch.cat((-x[..., HIDDEN // 2 :], x[..., : HIDDEN // 2]), -1)

    return q * cos.to(q.dtype) + turned(q) * sin.to(q.dtype), k * cos.to(k.dtype) + turned(k) * sin.to(
        k.dtype
    )


EXPERTS = 3


def _plain_experts(x, index, weights, gate_up, down):
    """Every expert for every token, with weights that are zero for experts that a token has not chosen."""
    gate, up = torch.einsum("btd,ehd->bteh", x, gate_up).chunk(2, -1)
    outputs = torch.einsum("bteh,edh->bted", F.silu(gate) * up, down)
    chosen = F.one_hot(index, EXPERTS).to(weights.dtype)
    return torch.einsum("btke,btk,bted->btd", chosen, weights, outputs.to(weights.dtype)).to(x.dtype)


CASES = {op: _declared(op) for op in DECLARED}
CASES |= {
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
    """True if this input of the op gets a gradient: all that floats but the tables of rope."""
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
