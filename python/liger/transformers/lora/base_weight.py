# SPDX-License-Identifier: BSD-3-Clause
"""Frozen weights of linear layers and of experts: plain, or quantised and read through a dense copy at each
use.

bitsandbytes and torchao are not imported. Whether a quantised layer computes the linear operation with the
dense weight, a trial tells: torchao also has layers that quantise their input.
"""

import sys

import torch
from torch import nn

from ..._core.modules.quantised import is_quantised
from ..recipe import trials

QUANTISED = "its base layer does not compute the linear operation with its dense weight"
NO_VALUES = "its quantised weight has no values for a trial"


def is_four_bit(base):
    """True for a layer of bitsandbytes with a 4-bit weight on a GPU, or one in the GPU's format."""
    package = sys.modules.get("bitsandbytes")
    return package is not None and trials.original(base) is package.nn.Linear4bit


def state_of_four_bits(base):
    """The quantisation state of a 4-bit weight; None if it is not quantised yet, or packed for a CPU."""
    weight = base._parameters.get("weight")
    state = getattr(weight, "quant_state", None) or base.__dict__.get("quant_state")
    packed = state is None or getattr(state, "packing_format_for_cpu", False)
    return None if packed or weight.dtype.is_floating_point else state


def dtype_of_four_bits(base, x):
    """The dtype in which a 4-bit layer multiplies x; decided at its first call, as by its forward."""
    if not base.compute_type_is_set:
        base.set_compute_type(x)
        base.compute_type_is_set = True
    return x.dtype if base.compute_dtype is None else base.compute_dtype


def state_of_parameter(module, name):
    """The quantisation state of a parameter that ``bitsandbytes.nn.parametrize.replace_parameter_4bit`` has
    replaced, and nothing else has; else None."""
    all_steps = module._modules.get("parametrizations")
    if all_steps is None or name not in all_steps:
        return None
    package, steps = sys.modules.get("bitsandbytes.nn.parametrize"), list(all_steps[name])
    is_four_bit = package is not None and [type(s) for s in steps] == [package.Bnb4bitParametrization]
    return steps[0].quant_state if is_four_bit else None


def stored(module, name):
    """(a parameter of a module as it is stored, its :func:`state_of_parameter`)"""
    state = state_of_parameter(module, name)
    return (getattr(module, name) if state is None else module.parametrizations[name].original), state


def dense(weight, state, dtype):
    """The weight in a dtype: itself if it is plain and has the dtype, else a new tensor.

    ``state``: the quantisation state of a 4-bit weight, else None.
    """
    if state is not None:
        return sys.modules["bitsandbytes"].functional.dequantize_4bit(weight.detach(), state).to(dtype)
    if is_quantised(weight):
        weight = weight.dequantize()
    return weight if weight.dtype == dtype else weight.to(dtype)


def why_not_dense_experts(weight):
    """Why products with the matrices of a quantised weight, (E, outputs, inputs), are not products with the
    dense ones; None if they are, or if the weight is not quantised."""
    if not is_quantised(weight):
        return None
    if weight.device.type == "meta":
        return NO_VALUES
    return trials.remembered(lambda: _try_matrix(weight), why_not_dense_experts, type(weight), weight.shape)


def _try_matrix(weight):
    try:
        matrix = weight[0]
        x = trials.Random()(len(trials.SCALES), 3, matrix.shape[1]).to(weight.device, weight.dtype)
        expected, found = (nn.functional.linear(x, m) for m in (matrix, dense(matrix, None, x.dtype)))
    except trials.ERRORS as error:
        return (
            f"its {type(weight).__name__} has no product with a matrix of an expert: {type(error).__name__}"
        )
    return None if trials.error(found, expected) <= 4 else QUANTISED


def why_not_dense(base):
    """Why a layer is not ``x W^T + bias`` with its dense weight, or None; only quantised ones get a trial."""
    weight = base._parameters.get("weight")
    if not (is_four_bit(base) or is_quantised(weight)):
        return None
    if weight.device.type == "meta":
        return NO_VALUES
    key = (why_not_dense, type(base), type(weight), repr(getattr(base, "quant_type", "")), weight.shape)
    return trials.remembered(lambda: _try_dense(base, weight), *key)


def _try_dense(base, weight):
    state = state_of_four_bits(base) if is_four_bit(base) else None
    dtype = weight.dtype if weight.dtype.is_floating_point else getattr(base, "compute_dtype", None)
    x = trials.Random()(len(trials.SCALES), 3, base.in_features).to(weight.device, dtype or torch.float32)
    before = {name: base.__dict__.get(name) for name in ("compute_dtype", "compute_type_is_set")}
    try:
        expected = type(base).forward(base, x)
        found = nn.functional.linear(x, dense(weight, state, x.dtype), base.bias)
    except trials.ERRORS as error:
        return trials.no_trial(base, error)
    finally:
        base.__dict__.update({name: value for name, value in before.items() if name in base.__dict__})
    # Kernels of four bits round sums in another order.
    return None if trials.error(found, expected) <= 4 else QUANTISED
