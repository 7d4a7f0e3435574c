# SPDX-License-Identifier: BSD-3-Clause
"""Entries to C++ (csrc/autograd), where liger._C is loaded.

An entry takes the arguments of an op, or of the public function of its name, and serves plain eager calls:
it runs the op, and records a node in C++ where autograd needs one. It returns NotImplemented for all other
calls, which Python serves. A node calls back into Python for what the schemas of its op do not say: graphs of
a backward (``create_graph``), transforms, missing gradients.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.compiler import is_dynamo_compiling

from ..runtime import load

_Callable = TypeVar("_Callable", bound=Callable[..., Any])
# Name of a public function -> its formula in liger._C.
_FORMULAS: dict[str, Any] = {}


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


def entry_of_op(op, setup_context, backward):
    """The entry of an op by position, with all its results; None if liger._C is not loaded, or if the
    backward of the op does not follow from its schemas."""
    if load.C is None or op.namespace != "liger":
        return None

    def backward_in_python(inputs, outputs, grads, needs_input_grad):
        ctx = _Context(needs_input_grad)
        setup_context(ctx, inputs, outputs if len(outputs) > 1 else outputs[0])
        return backward(ctx, *grads)

    formula = load.C.formula_of_schemas(op._opname, backward_in_python)
    if formula is None:
        return None
    _FORMULAS[op._opname] = formula
    parameters = [
        (a.name, a.default_value) if a.has_default_value() else (a.name,) for a in op._schema.arguments
    ]
    return formula.entry(parameters, formula.results, len(parameters), False)


def register_cross_entropy(backward):
    """The formula of cross_entropy. ``backward(ctx, grad_loss, grad_of_gradient)`` gets the gradient of the
    forward as the only saved tensor."""
    if load.C is None:
        return

    def backward_in_python(_inputs, outputs, grads, needs_input_grad):
        ctx = _Context(needs_input_grad)
        ctx.save_for_backward(*outputs)
        return backward(ctx, *grads)

    _FORMULAS["cross_entropy"] = load.C.formula_of_cross_entropy(backward_in_python)


def entry_of_function(function, casts=False):
    """The entry of a public function with a formula, or None.

    Its parameters have the names of the arguments of the op. The entry does not serve calls in which a
    parameter that the op does not have is not the default, nor, with ``casts``, calls under autocast on a
    GPU.
    """
    if function.__name__ not in _FORMULAS:
        return None
    formula = _FORMULAS[function.__name__]
    known = inspect.signature(function).parameters.values()
    parameters = [(p.name,) if p.default is p.empty else (p.name, p.default) for p in known]
    positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in known)
    return formula.entry(parameters, formula.public_results, positional, casts)


def entered_by(enter, function):
    """The function, whose plain eager calls an entry serves; itself if the entry is None."""
    if enter is None:
        return function

    @functools.wraps(function)
    def entered(*args, **keywords):
        if not is_dynamo_compiling() and (results := enter(*args, **keywords)) is not NotImplemented:
            return results
        return function(*args, **keywords)

    return entered


def entering(function: _Callable) -> _Callable:
    """Decorator of a public function: plain eager calls enter C++ where liger._C is loaded."""
    return cast(_Callable, entered_by(entry_of_function(function), function))
