# SPDX-License-Identifier: BSD-3-Clause
"""SwiGLU, ``silu(gate) * up``: kernels and grid of :mod:`.gated`."""

from . import gated

_SILU = "silu"


def swiglu(gate, up):
    return gated.product("swiglu", gate, up, _SILU)


def swiglu_backward(grad_out, gate, up, emit_product=False):
    return gated.backward("swiglu_backward", grad_out, gate, up, emit_product, _SILU)


def swiglu_backward_(grad_out, gate, up):
    gated.backward_("swiglu_backward_", grad_out, gate, up, _SILU)


def swiglu_backward_product_(grad_out, gate, up):
    gated.backward_product_("swiglu_backward_product_", grad_out, gate, up, _SILU)


def swiglu_packed(gate_up):
    return gated.packed_product("swiglu_packed", gate_up, _SILU)


def swiglu_packed_backward(grad_out, gate_up, emit_product=False):
    return gated.packed_backward("swiglu_packed_backward", grad_out, gate_up, emit_product, _SILU)


def swiglu_packed_backward_(grad_out, gate_up):
    gated.packed_backward_("swiglu_packed_backward_", grad_out, gate_up, _SILU)
