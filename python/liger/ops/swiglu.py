"""SwiGLU, ``silu(gate) * up`` (Shazeer, arXiv 2002.05202): reference kernels, fakes, autograd, API.

Nothing is saved but the inputs: the backward computes the sigmoid again. The packed form has gate and up side by side
in the last dimension of one tensor, as one GEMM of a merged projection writes them.
"""

import torch

from ..backend import register_family
from ._autograd import (
    check_given_up,
    differentiable,
    differentiable_once,
    forbid_autograd,
    graph_is_kept,
    is_traced,
    own_their_memory,
    to_front,
)
from .rms_norm import accumulate_dtype


def _halves(packed):
    """Views of the gate half and the up half of the last dimension."""
    half = packed.shape[-1] // 2
    return packed[..., :half], packed[..., half:]


def _product_like(gate_up):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _product(gate, up):
    wide = accumulate_dtype(gate.dtype)
    return torch.nn.functional.silu(gate.to(wide)) * up.to(wide)


def _grads(grad_out, gate, up):
    """(grad_gate, grad_up, product), not yet rounded."""
    wide = accumulate_dtype(gate.dtype)
    grad_out, gate, up = grad_out.to(wide), gate.to(wide), up.to(wide)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return grad_out * up * (sigmoid + silu * (1 - sigmoid)), grad_out * silu, silu * up


# --- torch backend ----------------------------------------------------------------------------------------------


def swiglu_torch(gate, up):
    torch.ops.liger.check_swiglu("swiglu", gate, up, None)
    return torch.empty_like(gate).copy_(_product(gate, up))


def swiglu_backward_torch(grad_out, gate, up, emit_product=False):
    torch.ops.liger.check_swiglu("swiglu_backward", gate, up, grad_out)
    grad_gate, grad_up, product = _grads(grad_out, gate, up)
    return (
        torch.empty_like(gate).copy_(grad_gate),
        torch.empty_like(up).copy_(grad_up),
        torch.empty_like(gate).copy_(product) if emit_product else gate.new_empty(0),
    )


def swiglu_backward__torch(grad_out, gate, up):
    torch.ops.liger.check_swiglu("swiglu_backward_", gate, up, grad_out)
    grad_gate, grad_up, _ = _grads(grad_out, gate, up)
    gate.copy_(grad_gate)
    up.copy_(grad_up)


def swiglu_backward_product__torch(grad_out, gate, up):
    torch.ops.liger.check_swiglu("swiglu_backward_product_", gate, up, grad_out)
    for written, value in zip((gate, up, grad_out), _grads(grad_out, gate, up), strict=True):
        written.copy_(value)


def swiglu_packed_torch(gate_up):
    torch.ops.liger.check_swiglu("swiglu_packed", gate_up, None, None)
    return _product_like(gate_up).copy_(_product(*_halves(gate_up)))


def swiglu_packed_backward_torch(grad_out, gate_up, emit_product=False):
    torch.ops.liger.check_swiglu("swiglu_packed_backward", gate_up, None, grad_out)
    *grads, product = _grads(grad_out, *_halves(gate_up))
    product = _product_like(gate_up).copy_(product) if emit_product else gate_up.new_empty(0)
    return torch.empty_like(gate_up).copy_(torch.cat(grads, -1)), product


def swiglu_packed_backward__torch(grad_out, gate_up):
    torch.ops.liger.check_swiglu("swiglu_packed_backward_", gate_up, None, grad_out)
    *grads, _ = _grads(grad_out, *_halves(gate_up))
    gate_up.copy_(torch.cat(grads, -1))


register_family(
    "swiglu",
    {
        "swiglu": swiglu_torch,
        "swiglu_backward": swiglu_backward_torch,
        "swiglu_backward_": swiglu_backward__torch,
        "swiglu_backward_product_": swiglu_backward_product__torch,
        "swiglu_packed": swiglu_packed_torch,
        "swiglu_packed_backward": swiglu_packed_backward_torch,
        "swiglu_packed_backward_": swiglu_packed_backward__torch,
    },
    "liger.triton_kernels.swiglu",
)


# --- fakes --------------------------------------------------------------------------------------------------------


@torch.library.register_fake("liger::swiglu")
def _(gate, up):
    return torch.empty_like(gate)


@torch.library.register_fake("liger::swiglu_backward")
def _(grad_out, gate, up, emit_product=False):
    product = torch.empty_like(gate) if emit_product else gate.new_empty(0)
    return torch.empty_like(gate), torch.empty_like(up), product


@torch.library.register_fake("liger::swiglu_packed")
def _(gate_up):
    return _product_like(gate_up)


@torch.library.register_fake("liger::swiglu_packed_backward")
def _(grad_out, gate_up, emit_product=False):
    return torch.empty_like(gate_up), _product_like(gate_up) if emit_product else gate_up.new_empty(0)


@torch.library.register_fake("liger::swiglu_backward_")
def _(grad_out, gate, up):
    return None


@torch.library.register_fake("liger::swiglu_backward_product_")
def _(grad_out, gate, up):
    return None


@torch.library.register_fake("liger::swiglu_packed_backward_")
def _(grad_out, gate_up):
    return None


# --- autograd -----------------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@differentiable_once("swiglu")
def _backward(ctx, grad_out):
    grad_gate, grad_up, _ = torch.ops.liger.swiglu_backward.default(grad_out, *ctx.saved_tensors)
    need_gate, need_up = ctx.needs_input_grad
    return grad_gate if need_gate else None, grad_up if need_up else None


@differentiable_once("swiglu_packed")
def _backward_packed(ctx, grad_out):
    return torch.ops.liger.swiglu_packed_backward.default(grad_out, *ctx.saved_tensors)[:1]


_swiglu = differentiable(torch.ops.liger.swiglu.default, _setup, _backward)
_swiglu_packed = differentiable(torch.ops.liger.swiglu_packed.default, _setup, _backward_packed)
_swiglu_backward_ = forbid_autograd("swiglu_backward_")
forbid_autograd("swiglu_backward_product_")
_swiglu_packed_backward_ = forbid_autograd("swiglu_packed_backward_")


class _Inplace(torch.autograd.Function):
    """swiglu or swiglu_packed whose backward writes the gradients over the inputs, unless the graph is kept."""

    @staticmethod
    def forward(ctx, op, backward_op, inplace_backward_op, *inputs):
        ctx.backward_op, ctx.inplace_backward_op = backward_op, inplace_backward_op
        ctx.save_for_backward(*inputs)
        return op(*inputs)

    @staticmethod
    def backward(ctx, grad_out):
        if graph_is_kept():
            grads = _backward_of_kept_graph(ctx, grad_out)
            return None, None, None, *((grads,) if isinstance(grads, torch.Tensor) else grads)
        # Detached, because the tensors of the forward would carry their own history into the gradients.
        inputs = [t.detach() for t in ctx.saved_tensors]
        ctx.inplace_backward_op(grad_out, *inputs)
        return None, None, None, *inputs


@differentiable_once("swiglu")
def _backward_of_kept_graph(ctx, grad_out):
    inputs = ctx.saved_tensors
    return ctx.backward_op(grad_out, *inputs)[: len(inputs)]


def _inplace_applies(op, names, tensors):
    """Whether the in-place form runs; raises where it would destroy a parameter.

    Compiled code takes the functional form, whose buffers the compiler places itself.
    """
    if is_traced(*tensors) or not torch.is_grad_enabled():
        return False
    check_given_up(op, names, tensors)
    return all(t.requires_grad for t in tensors) and own_their_memory(tensors)


# --- vmap ---------------------------------------------------------------------------------------------------------


def _elementwise(op, tensors):
    """vmap rule of an op whose first ``tensors`` arguments keep any leading dimensions."""

    def rule(info, in_dims, *args):
        mapped = [to_front(args[i], in_dims[i], info.batch_size) for i in range(tensors)]
        outputs = op(*mapped, *args[tensors:])
        return outputs, 0 if isinstance(outputs, torch.Tensor) else (0,) * len(outputs)

    return rule


torch.library.register_vmap("liger::swiglu", _elementwise(torch.ops.liger.swiglu, 2))
torch.library.register_vmap("liger::swiglu_packed", _elementwise(torch.ops.liger.swiglu_packed, 1))


# --- public API ---------------------------------------------------------------------------------------------------


def swiglu(gate, up, inplace=False):
    """``silu(gate) * up``, elementwise.

    Args:
        gate: any shape of at least one dimension, float16, bfloat16 or float32 (float64 on the torch backend), any
            strides.
        up: the shape, dtype and device of gate.
        inplace: lets the backward write its gradients over gate and up, which saves the memory of both. They must not
            be used afterwards: autograd raises where it needs their old values. Has no effect in compiled code, or
            where gate or up needs no gradient, shares memory with the other, or overlaps itself, or where the graph
            is kept for another backward.

    Returns:
        A tensor of the shape, dtype and, where dense, strides of gate. Differentiable in gate and up.

    Raises:
        RuntimeError: mismatched shapes, dtypes or devices. With ``inplace``: gate or up is a leaf that requires grad.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """
    if inplace and _inplace_applies("swiglu", ("gate", "up"), (gate, up)):
        return _Inplace.apply(_swiglu, torch.ops.liger.swiglu_backward, _swiglu_backward_, gate, up)
    return _swiglu(gate, up)


def swiglu_packed(gate_up, inplace=False):
    """``silu(gate) * up`` of one tensor that holds gate and up side by side.

    Args:
        gate_up: (..., 2I), gate first; dtypes and strides as in :func:`swiglu`.
        inplace: lets the backward write its gradient over gate_up, as in :func:`swiglu`.

    Returns:
        (..., I), contiguous, of the dtype of gate_up. Differentiable in gate_up.

    Raises:
        RuntimeError: an odd last dimension or a dtype that is not floating, and with ``inplace`` as in :func:`swiglu`.
    """
    if inplace and _inplace_applies("swiglu_packed", ("gate_up",), (gate_up,)):
        return _Inplace.apply(
            _swiglu_packed, torch.ops.liger.swiglu_packed_backward, _swiglu_packed_backward_, gate_up
        )
    return _swiglu_packed(gate_up)
