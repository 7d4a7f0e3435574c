# SPDX-License-Identifier: BSD-3-Clause
"""GeGLU, ``gelu(gate) * up`` with the exact GELU or its tanh approximation: kernels and grid of
:mod:`.gated`."""

from ..ops.gated import GELU_NAMES
from . import gated


def geglu(gate, up, approximate="none"):
    return gated.product("geglu", gate, up, GELU_NAMES[approximate])


def geglu_backward(grad_out, gate, up, emit_product=False, approximate="none"):
    return gated.backward("geglu_backward", grad_out, gate, up, emit_product, GELU_NAMES[approximate])


def geglu_backward_(grad_out, gate, up, approximate="none"):
    gated.backward_("geglu_backward_", grad_out, gate, up, GELU_NAMES[approximate])


def geglu_backward_product_(grad_out, gate, up, approximate="none"):
    gated.backward_product_("geglu_backward_product_", grad_out, gate, up, GELU_NAMES[approximate])


def geglu_packed(gate_up, approximate="none"):
    return gated.packed_product("geglu_packed", gate_up, GELU_NAMES[approximate])


def geglu_packed_backward(grad_out, gate_up, emit_product=False, approximate="none"):
    return gated.packed_backward(
        "geglu_packed_backward", grad_out, gate_up, emit_product, GELU_NAMES[approximate]
    )


def geglu_packed_backward_(grad_out, gate_up, approximate="none"):
    gated.packed_backward_("geglu_packed_backward_", grad_out, gate_up, GELU_NAMES[approximate])
