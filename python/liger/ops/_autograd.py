"""How ops meet autograd, and small helpers shared by their autograd and vmap rules.

A registered formula serves every caller of an op, but the dispatcher runs it as Python: on a small tensor that takes
longer than the op itself. Eager calls, between which and the backend there is nothing but autograd, therefore go around
it with the same formula (:func:`differentiable`, :func:`forbid_autograd`); everything else goes through the dispatcher.
docs/performance/host_time.md has the figures.
"""

import functools

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _any_requires_grad,
    _AutoDispatchBelowADInplaceOrView,
    _AutoDispatchBelowAutograd,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_local_include_set,
    _len_torch_function_stack,
)
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

_library = torch.library.Library("liger", "IMPL")

# What an op takes, in the types that no one has overridden.
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_PLAIN = _TENSORS | {bool, int, float, str, torch.dtype}
# The dispatch keys that every thread starts with. Modes, transforms and tracers add theirs.
_NOTHING_ADDED = DispatchKeySet(DispatchKey.BackendSelect) | DispatchKeySet(DispatchKey.ADInplaceOrView)


def _meets_only_autograd(args):
    """Whether nothing but autograd would see a call of an op with these arguments before its backend does.

    That excludes compilers, tensor subclasses, modes, transforms (vmap, grad), tracers, and calls from the inside of
    another op, where autograd is off. The order matters: a compiler follows the first term and no other.
    """
    return (
        not is_compiling()
        and _PLAIN.issuperset(map(type, args))
        and _dispatch_tls_local_include_set() == _NOTHING_ADDED
        and not _len_torch_function_stack()
        and not _dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality)
    )


def differentiable(op, setup_context, backward):
    """Registers the autograd formula of an op, as ``torch.library.register_autograd`` does, and returns a function.

    The function takes all arguments of the op, by position. It is the op, with less work for the host in eager code.
    """
    torch.library.register_autograd(op, backward, setup_context=setup_context)

    def forward(ctx, *args):
        with _AutoDispatchBelowAutograd():
            output = op(*args)
        setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    node = type(op._opname, (torch.autograd.Function,), methods)
    # Past Function.apply, which looks for transforms first: there are none where this is called.
    record = super(torch.autograd.Function, node).apply

    def call(*args):
        if not _meets_only_autograd(args):
            return op(*args)
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            return record(*args)
        with _AutoDispatchBelowAutograd():
            return op(*args)

    return call


def wants_grad(*tensors):
    """For each tensor, whether a gradient will be asked for: skipped work is decided before the op runs."""
    enabled = torch.is_grad_enabled()
    return tuple(enabled and t is not None and t.requires_grad for t in tensors)


def graph_is_kept():
    """Inside a backward: whether it may run again (retain_graph), so that what was saved must stay as it is."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_traced(*tensors):
    """Whether a compiler is looking at these tensors: under torch.compile, or stand-ins of a direct AOT trace."""
    return is_compiling() or not _TENSORS.issuperset(map(type, tensors))


def may_write_saved(*tensors):
    """Inside a backward: whether these saved tensors die with it and may be overwritten. Never while tracing."""
    return not is_traced(*tensors) and not graph_is_kept()


def differentiable_once(op):
    """Decorates the backward formula of an op: differentiating its results again raises, naming the op.

    Backward ops have no formula of their own. Without this, ``create_graph=True`` would give gradients that look like
    constants, and a gradient penalty would silently miss a term.
    """

    def decorate(backward):
        @functools.wraps(backward)
        def formula(ctx, *grads):
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                results = backward(ctx, *grads)
            message = f"liger: the backward of {op} is not differentiable, so {op} has no second derivative"
            refuse = torch._C._functions.DelayedError(message.encode(), len(results))
            return refuse(*(None if r is None else r.detach().requires_grad_() for r in results))

        return formula

    return decorate


def forbid_autograd(op_name):
    """For an op that writes its arguments, such as ``"swiglu_backward_"``: refuses autograd, counts the writes.

    Autograd would take the written tensor for the one it had before and return wrong gradients, so a call in grad mode
    with an argument that requires grad raises. Every call adds to the version counters of what it writes, whichever
    backend serves it, so that autograd notices a later use of the old value.

    Returns a function of all arguments of the op, by position: the op, with less work for the host in eager code.
    """
    op = getattr(torch.ops.liger, op_name).default
    written = [
        i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]

    def count_in(args):
        increment_version([args[i] for i in written])

    def refuse(keyset, *args):
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            raise RuntimeError(
                f"liger::{op_name} writes over its arguments and is not differentiable: "
                "call it under torch.no_grad(), or use the form without the trailing underscore"
            )
        with _AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def count(keyset, *args):
        result = op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        count_in(args)
        return result

    _library.impl(op_name, refuse, "Autograd", with_keyset=True)
    _library.impl(op_name, count, "ADInplaceOrView", with_keyset=True)

    def call(*args):
        if torch.is_grad_enabled() or not _meets_only_autograd(args):
            return op(*args)
        with _AutoDispatchBelowADInplaceOrView():
            result = op(*args)
        count_in(args)
        return result

    return call


def check_given_up(op, names, tensors):
    """For ``inplace=True``: raises where the backward would write over a leaf, that is, a parameter."""
    for name, tensor in zip(names, tensors, strict=True):
        owner = tensor._base if tensor._is_view() else tensor
        if owner.is_leaf and owner.requires_grad:
            raise RuntimeError(
                f"{op}: {name} is a leaf that requires grad (or a view of one), and inplace=True would overwrite it"
            )


def own_their_memory(tensors):
    """Whether every element of every tensor has a place of its own, so that each can be overwritten alone."""
    storages = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    if len(set(storages)) < len(storages):
        return False
    for tensor in tensors:
        if tensor.is_contiguous():
            continue
        span = 1
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1 and stride < span:
                return False
            span += stride * (size - 1)
    return True


def to_front(tensor, dim, size):
    """For a vmap rule: the tensor with the mapped dimension first, repeated ``size`` times if it is not mapped."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
