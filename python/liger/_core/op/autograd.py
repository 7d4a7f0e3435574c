# SPDX-License-Identifier: BSD-3-Clause
"""Autograd formulas of ops, and helpers that these formulas share.

A formula that is registered in Python serves every caller of an op, but on a small tensor the dispatcher
takes longer to run it than the op itself takes. Plain eager calls therefore bypass the dispatcher and run the
same formula directly (:func:`differentiable`, :func:`forbid_autograd`); all other calls go through the
dispatcher. docs/lab/host_time.md has the figures.
"""

import contextlib
import functools

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _any_requires_grad,
    _are_functorch_transforms_active,
    _AutoDispatchBelowADInplaceOrView,
    _AutoDispatchBelowAutograd,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_is_dispatch_key_included,
    _dispatch_tls_local_include_set,
    _functorch,
    _len_torch_function_stack,
)
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from .fakes import register_fake
from .nodes import entered_by, entry_of_op


@functools.lru_cache(None)
def _impl_library(namespace):
    """The library that holds the registrations of a namespace: destroying it would remove them."""
    return torch.library.Library(namespace, "IMPL")


# Types of arguments without ``__torch_function__`` and ``__torch_dispatch__``.
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_PLAIN = _TENSORS | {bool, int, float, str, torch.dtype}
# The dispatch keys that every thread starts with. Modes, transforms and tracers add their own.
_DEFAULT_INCLUDE_SET = DispatchKeySet(DispatchKey.BackendSelect) | DispatchKeySet(DispatchKey.ADInplaceOrView)
# The key of is_grads_batched, which uses its own vmap.
_BATCHED_GRAD_KEY = torch._C._parse_dispatch_key("VmapMode")


def is_plain_eager_call(args):
    """True if autograd is the only dispatch key between a call with these arguments and the backend.

    False for compilers, tensor subclasses, modes, transforms (vmap, grad), forward mode, tracers, and calls
    from inside another op, where autograd is off. ``is_compiling`` must come first: Dynamo evaluates it as a
    constant and does not trace the other terms.
    """
    return (
        not is_compiling()
        and _PLAIN.issuperset(map(type, args))
        and _dispatch_tls_local_include_set() == _DEFAULT_INCLUDE_SET
        and not _len_torch_function_stack()
        and forward_ad._current_level < 0
        and not _dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality)
    )


def differentiable(op, setup_context, backward):
    """Registers the autograd formula of an op and returns a faster entry point of the op.

    ``setup_context(ctx, inputs, output)`` and ``backward(ctx, *grads)`` are as in
    ``torch.library.register_autograd``, except that ``backward`` returns a tuple with one entry per argument.
    The registered formula also serves the transforms of torch.func, where each records its own graph, and
    refuses forward mode.

    The returned function takes all arguments of the op by position. Plain eager calls bypass the dispatcher.
    """

    def forward(ctx, *args):
        with _AutoDispatchBelowAutograd():
            output = op(*args)
        setup_context(ctx, args, output)
        return output

    _register_formula(op, setup_context, backward)
    record = _recorder(op, forward, backward)

    def call(*args):
        if not is_plain_eager_call(args):
            return op(*args)
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            return record(*args)
        with _AutoDispatchBelowAutograd():
            return op(*args)

    return entered_by(entry_of_op(op, setup_context, backward), call)


def _recorder(op, forward, backward):
    def jvp(ctx, *tangents):
        refuse_tangents(op._opname)

    methods = {
        name: staticmethod(f) for name, f in (("forward", forward), ("backward", backward), ("jvp", jvp))
    }
    # Not torch.autograd.Function: its apply checks for transforms again: either there are none, or the
    # dispatcher has already handled them.
    return type(op._opname, (_SingleLevelFunction,), methods).apply


def _register_formula(op, setup_context, backward):
    """Registers the Autograd kernel of an op. It runs once per transform of torch.func, with the tensors of
    that level, and once below all transforms."""
    # The dispatcher omits trailing arguments that are equal to their defaults.
    defaults = tuple(argument.default_value for argument in op._schema.arguments)

    def below(keyset, args):
        with _AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def forward(ctx, *args):
        *args, keyset = args
        # A node's forward runs with grad mode and forward mode off. That applies to its own level only: the
        # levels of torch.func below it need both modes.
        transformed = _are_functorch_transforms_active()
        with torch.set_grad_enabled(transformed), forward_ad._set_fwd_grad_enabled(transformed):
            output = below(keyset, args)
        with _AutoDispatchBelowAutograd():
            setup_context(ctx, tuple(args), output)
        return output

    def backward_of_arguments(ctx, *grads):
        needed = ctx.needs_input_grad
        ctx.needs_input_grad = needed[:-1]
        try:
            return *backward(ctx, *grads), None
        finally:
            ctx.needs_input_grad = needed

    record = _recorder(op, forward, backward_of_arguments)

    def autograd_kernel(keyset, *args):
        args += defaults[len(args) :]
        _refuse_forward_mode(op, args)
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            with enable_single_level_autograd_function():
                return record(*args, keyset)
        return below(keyset, args)

    _impl_library(op.namespace).impl(op._opname, autograd_kernel, "Autograd", with_keyset=True)


def _refuse_forward_mode(op, args):
    """Raises NotImplementedError if an argument has a tangent: without a formula it would be dropped
    silently."""
    if forward_ad._current_level < 0:
        return
    for tensor in args:
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            refuse_tangents(op._opname)


def refuse_tangents(op):
    raise NotImplementedError(
        f"{op}: forward-mode differentiation (jvp, jacfwd, forward_ad) is not implemented, "
        "use reverse mode (grad, vjp, jacrev)"
    )


def wants_grad(*tensors):
    """For each tensor, whether autograd will need its gradient. Ops skip the work of the others."""
    enabled = torch.is_grad_enabled()
    return tuple(enabled and t is not None and _requires_grad(t) for t in tensors)


def _requires_grad(tensor):
    """True if a tensor requires grad at any level of the active torch.func transforms."""
    if not is_compiling() and _are_functorch_transforms_active():
        while not tensor.requires_grad and _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def is_transformed():
    """True if torch.func, forward-mode differentiation or a backward with ``is_grads_batched`` transforms the
    call."""
    return (
        _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _dispatch_tls_is_dispatch_key_included(_BATCHED_GRAD_KEY)
    )


def is_traced(*tensors):
    """True if a compiler (torch.compile, or a direct AOT trace with tensor subclasses) or a transform
    processes these tensors. Both need functional code and decide themselves what is saved."""
    return is_compiling() or is_transformed() or not _TENSORS.issuperset(map(type, tensors))


def recording_tracer():
    """The tracer that records this call into a program of its own, or None. Such a program repeats ops, no
    Python code. torch.compile is not meant: it guards what it has read, and breaks the graph at what it
    cannot trace."""
    # Not torch.compiler.is_exporting(), which torch.compile of torch 2.10 takes for True.
    if torch.compiler._is_exporting_flag:
        return "torch.export"
    if is_compiling():
        return None
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return "make_fx"
    return None


def may_write_inputs(*tensors):
    """True if an in-place form may run.

    Compilers and transforms (:func:`is_traced`), dispatch modes and torch.jit.trace need functional code:
    selective checkpointing, for example, does not repeat the write of an op if it saved the result.
    """
    return (
        not is_traced(*tensors)
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
    )


@contextlib.contextmanager
def graph_of_its_own():
    """For a graph that is recorded and differentiated inside: the hooks on saved tensors of the caller
    (checkpointing, offloading) must not see its tensors. They would count them as tensors of the graph
    around, or keep them."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        # Under torch.func.grad: there are no hooks then, and setting some is an error.
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        yield


def _same(tensor):
    return tensor


def without_base(tensor):
    """A tensor with the same memory that is no view for autograd. Results of a node may be written in place
    then, which autograd refuses for views that were made inside of the node."""
    return tensor.new_empty(0).set_(tensor.detach())


def at_positions(count, positions, grads, needed):
    """The result of a backward: the gradients that are needed at their positions among ``count``
    arguments."""
    result = [None] * count
    for position, grad, need in zip(positions, grads, needed, strict=True):
        result[position] = grad if need else None
    return tuple(result)


def may_write_saved(ctx, *tensors):
    """Inside a backward: whether these saved tensors are freed after it, so that it may overwrite them.

    False if the graph may run again (retain_graph), is differentiated itself (create_graph), or is traced.
    """
    return (
        type(ctx) is not _Differentiated
        and not is_traced(*tensors)
        and not torch._C._autograd._get_current_graph_task_keep_graph()
    )


class _Differentiated:
    """The context of a backward under ``create_graph``, with saved tensors that are already unpacked:
    checkpointing allows only one unpacking."""

    def __init__(self, ctx, saved_tensors):
        self._ctx, self.saved_tensors = ctx, saved_tensors

    def __getattr__(self, name):
        return getattr(self._ctx, name)


class _OnceDifferentiable(torch.autograd.Function):
    """A backward formula as an autograd node over all tensors that it depends on; the backward of this node
    raises.

    The saved tensors carry the history of the inputs, so every path from the gradients to an input or to an
    upstream gradient passes through this node.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(op, backward, ctx, saved, grads, *tensors):
        """``tensors``: first ``saved`` saved tensors, then ``grads`` upstream gradients, then other
        dependencies."""
        return backward(_Differentiated(ctx, tensors[:saved]), *tensors[saved : saved + grads])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivative(ctx.op)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_tangents(ctx.op)


def refuse_second_derivative(op):
    raise RuntimeError(f"liger: the backward of {op} is not differentiable, so {op} has no second derivative")


def differentiable_once(op, dependencies=None):
    """Decorates the backward formula of an op: differentiating its results again raises RuntimeError naming
    the op.

    Backward ops have no formula. Without this decorator ``create_graph=True`` would return gradients without
    a history, and a gradient penalty would silently miss a term. For every input with a gradient the formula
    must save a tensor that carries its history: the input, or an output that is marked as differentiable.
    ``dependencies(ctx)`` returns further tensors that the gradients depend on and that were not saved.
    """

    def decorate(backward):
        @functools.wraps(backward)
        def formula(ctx, *grads):
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            saved = ctx.saved_tensors
            others = () if dependencies is None else dependencies(ctx)
            return _OnceDifferentiable.apply(
                op, backward, ctx, len(saved), len(grads), *saved, *grads, *others
            )

        return formula

    return decorate


def refuse_gradient_outputs(op, grads):
    """In the backward of an op that computes the gradients in its forward: raises if these outputs are
    differentiated.

    The first of them is marked as a differentiable output. The saved gradient then carries the history that
    :func:`differentiable_once` needs, and no input has to be saved.
    """
    if any(grad is not None for grad in grads):
        refuse_second_derivative(op)


@functools.lru_cache(None)
def forbid_autograd(op_name):
    """For an op that writes its arguments, such as ``"swiglu_backward_"``: refuses autograd, raises version
    counters.

    Autograd does not know of the write and would return wrong gradients, so a call in grad mode with an
    argument that requires grad raises RuntimeError. Every call increments the version counters of the written
    arguments, in every backend, so autograd detects a later use of the old value. An op without results gets
    its fake here.

    Returns a function that takes all arguments of the op by position. Plain eager calls bypass the
    dispatcher.
    """
    op = getattr(torch.ops.liger, op_name).default
    if not op._schema.returns:
        register_fake(f"liger::{op_name}")(lambda *args: None)
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

    library = _impl_library("liger")
    library.impl(op_name, refuse, "Autograd", with_keyset=True)
    library.impl(op_name, count, "ADInplaceOrView", with_keyset=True)

    def call(*args):
        if torch.is_grad_enabled() or not is_plain_eager_call(args):
            return op(*args)
        with _AutoDispatchBelowADInplaceOrView():
            result = op(*args)
        count_in(args)
        return result

    return call


def refuse_inplace_leaf(op, names, tensors):
    """For ``inplace=True``: raises RuntimeError if the op would overwrite a leaf that requires grad (a
    parameter)."""
    for name, tensor in zip(names, tensors, strict=True):
        owner = tensor._base if tensor._is_view() else tensor
        if owner.is_leaf and owner.requires_grad:
            raise RuntimeError(
                f"{op}: {name} is a leaf that requires grad (or a view of one), and inplace=True would overwrite it"
            )


def non_overlapping(tensors):
    """True if no two elements of these tensors share memory, so that each can be overwritten on its own."""
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
