# SPDX-License-Identifier: BSD-3-Clause
"""vmap rules: a helper for hand-written rules, and a loop for every op without a rule."""

import torch


def to_front(tensor, dim, size):
    """The tensor with the mapped dimension first, repeated ``size`` times if it is not mapped."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def refuse_mapped_scalars(op, name, tensor):
    """Raises RuntimeError if the elements of a mapped tensor have no dimension: the op would take the mapped
    one."""
    if tensor.dim() < 2:
        raise RuntimeError(f"{op}: {name} has shape (), expected at least one dimension")


def loop_rule(op):
    """A vmap rule that runs the op once per element of the mapped dimension."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]

    def rule(info, in_dims, *args):
        for argument, write, dim in zip(op._schema.arguments, written, in_dims, strict=False):
            if write and dim is None:
                raise RuntimeError(
                    f"{op._opname}: {argument.name} is written and the same for all elements of a vmap, expected "
                    "one that is mapped"
                )
        if info.batch_size == 0:
            raise RuntimeError(f"{op._opname}: vmap over a dimension without elements")

        def element(i):
            def selected(value, dim):
                if isinstance(value, (list, tuple)):
                    dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(value)
                    return [selected(v, d) for v, d in zip(value, dims, strict=True)]
                return value if dim is None else value.select(dim, i)

            return op(*(selected(value, dim) for value, dim in zip(args, in_dims, strict=True)))

        results = [element(i) for i in range(info.batch_size)]
        if results[0] is None:
            return None, None
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        stacked = tuple(map(torch.stack, zip(*results, strict=True)))
        return stacked, (0,) * len(stacked)

    return rule


def register_loops(*namespaces):
    """Registers the loop for every op of these namespaces without a vmap rule.

    torch's own fallback loop warns for every op, and refuses ops without results or with lists of tensors.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace not in namespaces or "." in name:
            continue
        if has_kernel(full_name, "FuncTorchBatched") or has_kernel(full_name, "CompositeImplicitAutograd"):
            continue
        op = getattr(getattr(torch.ops, namespace), name).default
        if any("Tensor" in str(argument.type) for argument in op._schema.arguments):
            torch.library.register_vmap(full_name, loop_rule(op))
