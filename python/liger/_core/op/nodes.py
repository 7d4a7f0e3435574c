# SPDX-License-Identifier: BSD-3-Clause
"""Autograd nodes in C++ (csrc/autograd/nodes.cpp), where their library is loaded.

An op of ``torch.ops.liger_autograd`` records the node that autograd.py would record in Python. It needs less
host time, and calls back into Python for what its schemas do not say: graphs of a backward
(``create_graph``), transforms, missing gradients.
"""

import functools

import torch

from ..runtime import load

# Name of an op -> (setup_context, backward, the function that records the node in Python).
_FORMULAS: dict[str, tuple] = {}


class _Context:
    """The context of a formula in the backward of a C++ node, which has saved the tensors."""

    def __init__(self, needs_input_grad):
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors):
        pass

    def set_materialize_grads(self, value):
        pass


def _backward(name, inputs, outputs, grads, needs_input_grad):
    setup_context, backward, _record = _FORMULAS[name]
    ctx = _Context(needs_input_grad)
    setup_context(ctx, inputs, outputs if len(outputs) > 1 else outputs[0])
    return list(backward(ctx, *grads))


def _record(name, args):
    outputs = _FORMULAS[name][2](*args)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


@functools.lru_cache(None)
def _library():
    library = torch.library.Library("liger_autograd", "IMPL")
    library.impl("backward", _backward, "CPU")
    library.impl("record", _record, "CPU")
    return library


def compiled_recorder(op, setup_context, backward, record):
    """The op that records a node in C++, if there is one for ``op``, else ``record``."""
    if not load.NODES_LOADED or op.namespace != "liger" or not hasattr(torch.ops.liger_autograd, op._opname):
        return record
    _library()
    _FORMULAS[op._opname] = setup_context, backward, record
    return getattr(torch.ops.liger_autograd, op._opname).default
