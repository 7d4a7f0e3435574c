# SPDX-License-Identifier: BSD-3-Clause
"""``liger_kernel.functional``: the functions with a choice of implementation.

liger chooses backends by ``LIGER_BACKEND`` and :func:`liger.use_backend`, so ``impl``, ``mode`` and
``backend`` must be None.
"""

import functools
from collections.abc import Callable
from typing import Any

from .layers.rope import liger_rope
from .layers.rows import (
    _apply_fused_add_rms_norm,
    _apply_rms_norm,
    _apply_silu_mul,
    liger_geglu,
    liger_layer_norm,
    liger_softmax,
)
from .losses.cross_entropy import _apply_cross_entropy, _apply_fused_linear_cross_entropy
from .losses.divergence import _apply_kl_div, liger_fused_linear_jsd, liger_jsd


def _with_choice(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def chosen(*args, impl=None, mode=None, backend=None, **kwargs):
        for option, value in (("impl", impl), ("mode", mode), ("backend", backend)):
            if value is not None:
                raise ValueError(
                    f"liger_kernel.functional.{name}: {option} is {value!r}, expected None: liger.use_backend or "
                    "LIGER_BACKEND chooses the implementation"
                )
        return function(*args, **kwargs)

    chosen.__module__, chosen.__name__, chosen.__qualname__ = __name__, name, name
    return chosen


# The arguments have the names of liger_kernel.functional.


def _layer_norm(x, weight, bias=None, eps=1e-6):
    return liger_layer_norm(x, weight, bias, eps)


def _rms_norm(x, weight, eps=1e-6, offset=0.0, casting_mode="llama", in_place=False, row_mode=None):
    return _apply_rms_norm(x, weight, eps, offset, casting_mode)


def _jsd(_input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    return liger_jsd(_input, target, shift_labels, beta, ignore_index)


def _cross_entropy(input, *args, **kwargs):
    return _apply_cross_entropy(input, *args, **kwargs)


rms_norm = _with_choice("rms_norm", _rms_norm)
fused_add_rms_norm = _with_choice("fused_add_rms_norm", _apply_fused_add_rms_norm)
layer_norm = _with_choice("layer_norm", _layer_norm)
softmax = _with_choice("softmax", liger_softmax)
swiglu = _with_choice("swiglu", _apply_silu_mul)
geglu = _with_choice("geglu", liger_geglu)
rope = _with_choice("rope", liger_rope)
jsd = _with_choice("jsd", _jsd)
kl_div = _with_choice("kl_div", _apply_kl_div)
cross_entropy = _with_choice("cross_entropy", _cross_entropy)
fused_linear_cross_entropy = _with_choice("fused_linear_cross_entropy", _apply_fused_linear_cross_entropy)
fused_linear_jsd = _with_choice("fused_linear_jsd", liger_fused_linear_jsd)
