# SPDX-License-Identifier: BSD-3-Clause
"""Gated activations, ``activation(gate) * up``: the torch kernels of swiglu and geglu, and their in-place
forms.

Only the inputs are saved: the backward recomputes the activation. The packed form has gate and up side by
side in the last dimension of one tensor, the output of a merged projection. ``options`` are the arguments of
an op after its tensors, such as the approximation of GELU.
"""

import itertools

import torch

from .._core.math.dtypes import accumulate_dtype
from .._core.math.memory_format import laid_out_like
from .._core.op.arguments import FLAG, check
from .._core.op.autograd import (
    differentiable_once,
    forbid_autograd,
    may_write_inputs,
    may_write_saved,
    non_overlapping,
    refuse_inplace_leaf,
)
from .._core.op.by_name import by_name
from .._core.op.declared import derive
from .._core.op.registration import register_family
from .._core.op.types import Activation, Approximate

# --- formulas -----------------------------------------------------------------------------------------------


def _silu(gate):
    return torch.nn.functional.silu(gate)


def _silu_backward(grad, gate):
    return _silu(gate), torch.ops.aten.silu_backward(grad, gate)


def _gelu(approximate):
    def value(gate):
        return torch.nn.functional.gelu(gate, approximate=approximate)

    def backward(grad, gate):
        return value(gate), torch.ops.aten.gelu_backward(grad, gate, approximate=approximate)

    return value, backward


# Activation -> (value(gate), backward(grad, gate) -> (value, gradient of gate)).
_FORMULAS = {"silu": (_silu, _silu_backward), "gelu": _gelu("none"), "gelu_tanh": _gelu("tanh")}

# ``approximate`` of torch.nn.functional.gelu -> name of the activation.
GELU_NAMES: dict[Approximate, Activation] = {"none": "gelu", "tanh": "gelu_tanh"}
APPROXIMATIONS = {name: approximate for approximate, name in GELU_NAMES.items()}


def op_of(activation, form=""):
    """(op, its options) of the family that has an activation; ``form``: what follows the name of the
    family."""
    family, options = ("swiglu", ()) if activation == "silu" else ("geglu", (APPROXIMATIONS[activation],))
    return getattr(torch.ops.liger, family + form).default, options


def _product(gate, up, activation):
    wide = accumulate_dtype(gate.dtype)
    return _FORMULAS[activation][0](gate.to(wide)).mul_(up.to(wide))


def _grads(grad_out, gate, up, activation, with_product):
    """(grad_gate, grad_up, product or None) in the accumulation dtype."""
    wide = accumulate_dtype(gate.dtype)
    grad_out, gate, up = grad_out.to(wide), gate.to(wide), up.to(wide)
    value, grad_gate = _FORMULAS[activation][1](grad_out * up, gate)
    product = value * up if with_product else None
    return grad_gate, value.mul_(grad_out), product


def _halves(packed):
    """Views of the gate half and the up half of the last dimension."""
    half = packed.shape[-1] // 2
    return packed[..., :half], packed[..., half:]


def _product_like(gate_up):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


# --- torch backend: the ops of a family, with the name of the activation ------------------------------------


def _forward(a, activation):
    return laid_out_like(a.gate, _product(a.gate, a.up, activation))


def _backward(a, activation):
    grad_gate, grad_up, product = _grads(a.grad_out, a.gate, a.up, activation, a.emit_product)
    return (
        laid_out_like(a.gate, grad_gate),
        laid_out_like(a.up, grad_up),
        laid_out_like(a.gate, product) if a.emit_product else a.gate.new_empty(0),
    )


def _backward_(a, activation):
    grads = _grads(a.grad_out, a.gate, a.up, activation, False)
    a.gate.copy_(grads[0])
    a.up.copy_(grads[1])


def _backward_product_(a, activation):
    grads = _grads(a.grad_out, a.gate, a.up, activation, True)
    for written, value in zip((a.gate, a.up, a.grad_out), grads, strict=True):
        written.copy_(value)


def _packed_forward(a, activation):
    return _product_like(a.gate_up).copy_(_product(*_halves(a.gate_up), activation))


def _packed_backward(a, activation):
    *grads, product = _grads(a.grad_out, *_halves(a.gate_up), activation, a.emit_product)
    product = _product_like(a.gate_up).copy_(product) if a.emit_product else a.gate_up.new_empty(0)
    return torch.empty_like(a.gate_up).copy_(torch.cat(grads, -1)), product


def _packed_backward_(a, activation):
    *grads, _ = _grads(a.grad_out, *_halves(a.gate_up), activation, False)
    a.gate_up.copy_(torch.cat(grads, -1))


# Suffix of the name of an op -> its kernel.
_KERNELS = {
    "": _forward,
    "_backward": _backward,
    "_backward_": _backward_,
    "_backward_product_": _backward_product_,
    "_packed": _packed_forward,
    "_packed_backward": _packed_backward,
    "_packed_backward_": _packed_backward_,
}


def register_gated(name, activation_of):
    """Registers the torch kernels of a family. ``activation_of(arguments of an op)``: the name of the
    activation. Returns the two forms of the family: (gate and up, packed)."""

    def torch_kernel(suffix, kernel):
        op = getattr(torch.ops.liger, name + suffix).default
        return by_name(op)(lambda a: kernel(a, activation_of(a)))

    register_family(name, *itertools.starmap(torch_kernel, _KERNELS.items()))
    return _Form(name, ("gate", "up")), _Form(f"{name}_packed", ("gate_up",))


# --- the forms that write -----------------------------------------------------------------------------------


class _Form:
    """One form of a gated op, separate or packed, with its backward ops:
    ``form(tensors, inplace, *options)``."""

    def __init__(self, name, arguments):
        self.name, self.arguments = name, arguments
        count = len(arguments)
        self.backward_op = getattr(torch.ops.liger, f"{name}_backward").default
        self.backward_op_ = forbid_autograd(f"{name}_backward_")

        @differentiable_once(name)
        def inplace_backward(ctx, grad_out):
            inputs = ctx.saved_tensors
            if not may_write_saved(ctx, *inputs):
                return None, None, *self.backward_op(grad_out, *inputs, False, *ctx.options)[:count]
            # Detached: otherwise the gradients would have the history of the inputs.
            inputs = [t.detach() for t in inputs]
            self.backward_op_(grad_out, *inputs, *ctx.options)
            return None, None, *inputs

        self.inplace_backward = inplace_backward
        self.op = derive(name)

    def __call__(self, tensors, inplace, *options):
        if inplace is not False:
            check(self.name, "inplace", inplace, FLAG)
            if inplace and self._inplace_applies(tensors):
                return _Inplace.apply(self, options, *tensors)
        return self.op(*tensors, *options)

    def _inplace_applies(self, tensors):
        """True if the in-place form runs. Raises RuntimeError if it would overwrite a parameter.

        Compiled code takes the functional form; the compiler reuses buffers itself.
        """
        if not may_write_inputs(*tensors) or not torch.is_grad_enabled():
            return False
        refuse_inplace_leaf(self.name, self.arguments, tensors)
        return all(t.requires_grad for t in tensors) and non_overlapping(tensors)


class _Inplace(torch.autograd.Function):
    """The form with a backward that overwrites the inputs with their gradients, unless the graph is
    retained."""

    @staticmethod
    def forward(ctx, form, options, *inputs):
        ctx.form, ctx.options = form, options
        ctx.save_for_backward(*inputs)
        return form.op(*inputs, *options)

    @staticmethod
    def backward(ctx, grad_out):
        return ctx.form.inplace_backward(ctx, grad_out)
