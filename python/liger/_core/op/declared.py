# SPDX-License-Identifier: BSD-3-Clause
"""Fakes, autograd formulas and vmap rules that follow from the declarations of csrc/declarations.cpp.

The arguments of ``<op>_backward`` say by their names what they are: ``grad_<output>``, an argument or a
result of ``<op>``, ``need_grad_<input>``, ``emit_<result>``. Its results are ``grad_<input>``; x and
a residual share one gradient. The line of shapes, which csrc/declarations.h explains, says the rest.

Ops that this scheme does not cover keep formulas of their own: rope and qk_norm_rope, whose backward takes q
and k but may need one of them only; losses that compute their gradients in the forward
(forward_gradients.py); portable ops.
"""

import functools
from typing import NamedTuple

import torch

from ..math.dtypes import accumulate_dtype
from .autograd import differentiable, differentiable_once, forbid_autograd
from .fakes import register_fake
from .vmap import loop_rule, refuse_mapped_scalars, to_front


class Shape(NamedTuple):
    """The shape of one tensor.

    Attributes:
        like: the tensor that it has the shape and dtype of; else None.
        dims: ``"..."``, ``"H"``, ``"2I"``, ``"H/group_size"``, ``"num_groups"``.
        dtype: ``"f32"`` of a statistic, ``"or f32"`` of a parameter, else empty.
    """

    like: str | None
    dims: tuple[str, ...]
    dtype: str


class Declaration:
    """One entry of csrc/declarations.cpp.

    Attributes:
        ops: the forward, its backward, and the in-place forms of the backward.
        shapes: :class:`Shape` by the name of a tensor.
        options: the words of the condition on an option, such as ``["divides", "H"]``.
        main: the tensor that names the dimensions.
    """

    def __init__(self, line):
        names, _, text = line.partition(" : ")
        self.ops = names.split()
        self.shapes, self.options = {}, {}
        for entry in text.split(";"):
            tensors, colon, shape = entry.partition(":")
            words = (shape if colon else entry).split()
            if not colon:
                self.options[words[0]] = words[1:]
                continue
            dtype = ""
            if words[-1] == "f32":
                dtype = "or f32" if words[-2] == "or" else "f32"
                words = words[: -len(dtype.split())]
            is_like = words[0] == "like"
            for name in tensors.split(","):
                self.shapes[name.strip()] = Shape(
                    words[1] if is_like else None, () if is_like else tuple(words), dtype
                )
        self.main = next(iter(self.shapes))

    @property
    def dims(self):
        """The dimensions of the main tensor."""
        return self.shapes[self.main].dims

    def independent(self, tensor):
        """The number of leading dimensions of a main tensor whose elements do not depend on each other."""
        return tensor.dim() - len(self.dims) + 1 if self.dims[0] == "..." else 1

    def is_parameter(self, name):
        """True if a tensor has no independent dimensions: its gradient is a sum over them."""
        shape = self.shapes[name.removeprefix("grad_")]
        return shape.like is None and shape.dims[0] not in ("...", "batch")

    def main_of(self, values):
        """The name of the tensor among these arguments that has the shape of the main tensor."""
        return next(
            name
            for name in values
            if name in self.shapes
            and self.main in (name, self.shapes[name].like)
            and values[name] is not None
        )

    def sizes(self, name, main, options):
        """The shape of a tensor of a call with this main tensor."""
        lead = self.independent(main)
        known = dict(zip(self.dims[1:], main.shape[lead:], strict=False)) | options
        if self.dims[-1].startswith("2"):
            known[self.dims[-1][1:]] = main.shape[-1] // 2
        sizes = list(main.shape[:lead])
        for dim in self.shapes[name].dims[1:]:
            whole, _, part = dim.partition("/")
            if not part:
                sizes.append(known[whole])
            elif known[part] is not None:
                sizes.append(known[whole] // known[part])
        return sizes


@functools.lru_cache(None)
def declarations():
    """:class:`Declaration` by the names of all its ops."""
    found = map(Declaration, torch.ops.liger.declarations())
    return {op: declaration for declaration in found for op in declaration.ops}


def overload(op):
    return getattr(torch.ops.liger, op).default


def result_names(op):
    """Names of the results. A single one may have none in the schema: it is named by the backward or by its
    input."""
    schema = overload(op)._schema
    if len(schema.returns) != 1:
        return [result.name for result in schema.returns]
    if op.endswith("_backward"):
        return [f"grad_{overload(op.removesuffix('_backward'))._schema.arguments[0].name}"]
    return [overload(f"{op}_backward")._schema.arguments[0].name.removeprefix("grad_")]


def _is_tensor(argument):
    return "Tensor" in str(argument.type)


def derive(op):
    """Registers the fakes, the autograd formula and the vmap rule of a declared op, its backward and its
    writing forms.

    Returns a function that takes all arguments of the op by position. Plain eager calls bypass the
    dispatcher.
    """
    declaration = declarations()[op]
    for name in declaration.ops:
        if name.endswith("_"):
            forbid_autograd(name)
        else:
            _register_fake(declaration, name)
    torch.library.register_vmap(f"liger::{op}", _vmap_rule(declaration, overload(op)))
    return differentiable(overload(op), *_formula(op))


# --- fakes --------------------------------------------------------------------------------------------------


def _register_fake(declaration, op):
    arguments = overload(op)._schema.arguments
    results = result_names(op)

    @register_fake(f"liger::{op}")
    def _(*args):
        values = {a.name: a.default_value for a in arguments} | dict(
            zip((a.name for a in arguments), args, strict=False)
        )
        main = values[declaration.main_of(values)]

        def fake(result):
            name = result.removeprefix("grad_")
            is_gradient = name != result and name in declaration.shapes
            like = values.get(name, main) if is_gradient else main
            if like is None or not values.get(f"need_{result}", values.get(f"emit_{result}", True)):
                return (main if like is None else like).new_empty(0)
            shape = declaration.shapes[name]
            if shape.like or (is_gradient and not declaration.is_parameter(name)):
                return torch.empty_like(like)
            if is_gradient:
                return like.new_empty(like.shape)
            dtype = accumulate_dtype(main.dtype) if shape.dtype == "f32" else main.dtype
            return main.new_empty(declaration.sizes(name, main, values), dtype=dtype)

        made = tuple(map(fake, results))
        return made if len(made) > 1 else made[0]


# --- autograd -----------------------------------------------------------------------------------------------


def _formula(op):
    """(setup_context, backward) of an op, compiled from a text like a formula by hand, which is as fast."""
    backward_op = overload(f"{op}_backward")
    backward = backward_op._schema.arguments
    inputs, outputs = [a.name for a in overload(op)._schema.arguments], result_names(op)
    results, of_backward = result_names(f"{op}_backward"), [a.name for a in backward]
    saved = [a.name for a in backward if _is_tensor(a) and a.name in (*inputs, *outputs)]
    constants = [name for name in of_backward if name in inputs and name not in saved]
    # Upstream gradients that the backward takes. The first one may be missing only if there are several
    # outputs.
    upstream = [name for name in of_backward if name.removeprefix("grad_") in outputs and name not in saved]
    constant_outputs = [name for name in outputs if f"grad_{name}" not in upstream]
    # A further differentiable output, such as new_residual, is the sum of these inputs.
    summands = [i for i, name in enumerate(inputs) if name in ("x", "residual")]

    gradients = [f"grad_{'x' if name == 'residual' else name}" for name in inputs]
    passed = []
    for argument in backward:
        name = argument.name
        if name.removeprefix("need_") in results:
            needing = [f"need[{i}]" for i, gradient in enumerate(gradients) if name == f"need_{gradient}"]
            passed.append(" or ".join(needing))
        elif name in (*upstream, *saved, *constants):
            passed.append(name)
        else:
            passed.append(repr(argument.default_value))
    returned = [f"{g} if need[{i}] else None" if g in results else "None" for i, g in enumerate(gradients)]
    sums = [upstream[1] if len(upstream) > 1 and i in summands else "None" for i in range(len(inputs))]

    lines = [
        "def setup(ctx, inputs, output):",
        f"    {_listed(inputs)} = inputs",
        f"    {_listed(outputs) if len(outputs) > 1 else outputs[0]} = output",
        f"    ctx.save_for_backward({_listed(saved)})",
        *([f"    ctx.constants = {_listed(constants)}"] if constants else []),
    ]
    if len(outputs) > 1:
        lines += [
            f"    ctx.mark_non_differentiable({_listed(constant_outputs)})",
            "    ctx.set_materialize_grads(False)",
        ]
    if len(upstream) > 1:
        needed = " or ".join(f"ctx.needs_input_grad[{i}]" for i in summands)
        others = [name.removeprefix("grad_") for name in upstream[1:]]
        lines[-2:-1] = [
            f"    if {needed}:",
            f"    {lines[-2]}",
            "    else:",
            f"        ctx.mark_non_differentiable({_listed([*constant_outputs, *others])})",
        ]
    lines += [
        f"def backward(ctx, {', '.join(f'grad_{name}' for name in outputs)}):",
        *([f"    if {upstream[0]} is None:", f"        return {_listed(sums)}"] if len(outputs) > 1 else []),
        f"    {_listed(saved)} = ctx.saved_tensors",
        *([f"    {_listed(constants)} = ctx.constants"] if constants else []),
        "    need = ctx.needs_input_grad",
        f"    {_listed(results) if len(results) > 1 else results[0]} = backward_op({_listed(passed)})",
        f"    return {_listed(returned)}",
    ]
    namespace = {"backward_op": backward_op}
    exec(compile("\n".join(lines), f"<formula of {op}>", "exec"), namespace)
    return namespace["setup"], differentiable_once(op)(namespace["backward"])


def _listed(names):
    return "".join(f"{name}, " for name in names).rstrip()


# --- vmap ---------------------------------------------------------------------------------------------------


def _vmap_rule(declaration, op):
    """The mapped dimension becomes one more independent dimension or, in a batch, more of its elements. With
    mapped parameters the op runs once per element."""
    arguments = op._schema.arguments
    tensors = [i for i, a in enumerate(arguments) if a.name in declaration.shapes]
    parameters = [i for i in tensors if declaration.is_parameter(arguments[i].name)]
    rows = [i for i in tensors if i not in parameters]
    is_batch, each = declaration.dims[0] == "batch", loop_rule(op)

    def rule(info, in_dims, *args):
        if any(i < len(args) and in_dims[i] is not None for i in parameters):
            return each(info, in_dims, *args)
        args = list(args)
        for i in rows:
            args[i] = to_front(args[i], in_dims[i], info.batch_size)
            if len(declaration.dims) > 1:
                refuse_mapped_scalars(op._opname, arguments[i].name, args[i])
        sizes = args[rows[0]].shape[:2]
        if is_batch:
            for i in rows:
                args[i] = args[i].flatten(0, 1)
        outputs = op(*args)
        if isinstance(outputs, torch.Tensor):
            return outputs.unflatten(0, sizes) if is_batch else outputs, 0
        return tuple(o.unflatten(0, sizes) if is_batch else o for o in outputs), (0,) * len(outputs)

    return rule
