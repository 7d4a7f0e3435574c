"""How ops meet autograd, and small helpers shared by their autograd rules.

A formula in Python serves every caller of an op, but the dispatcher takes longer to run it on a small tensor than the
op itself takes. Eager calls, between which and the backend there is nothing but autograd, therefore go around it with
the same formula (:func:`differentiable`, :func:`forbid_autograd`); everything else goes through the dispatcher.
docs/performance/host_time.md has the figures.
"""

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


@functools.lru_cache(None)
def _libraries(namespace):
    """For implementations of ops of this namespace; they last as long as it does."""
    return torch.library.Library(namespace, "IMPL")


# What an op takes, in the types that no one has overridden.
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_PLAIN = _TENSORS | {bool, int, float, str, torch.dtype}
# The dispatch keys that every thread starts with. Modes, transforms and tracers add theirs.
_NOTHING_ADDED = DispatchKeySet(DispatchKey.BackendSelect) | DispatchKeySet(DispatchKey.ADInplaceOrView)
# That of is_grads_batched, which has a vmap of its own.
_VMAP_OF_BACKWARDS = torch._C._parse_dispatch_key("VmapMode")


def meets_only_autograd(args):
    """Whether nothing but autograd would see a call of an op with these arguments before its backend does.

    That excludes compilers, tensor subclasses, modes, transforms (vmap, grad), forward mode, tracers, and calls from
    the inside of another op, where autograd is off. The order matters: a compiler follows the first term and no other.
    """
    return (
        not is_compiling()
        and _PLAIN.issuperset(map(type, args))
        and _dispatch_tls_local_include_set() == _NOTHING_ADDED
        and not _len_torch_function_stack()
        and forward_ad._current_level < 0
        and not _dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality)
    )


def differentiable(op, setup_context, backward):
    """Registers the autograd formula of an op and returns a function.

    ``setup_context(ctx, inputs, output)`` and ``backward(ctx, *grads)`` are those that
    ``torch.library.register_autograd`` takes, except that ``backward`` returns a tuple with one entry per argument.
    What is registered also serves the transforms of torch.func, each of which records a graph of its own, and refuses
    forward mode.

    The function takes all arguments of the op, by position. It is the op, with less work for the host in eager code.
    """

    def forward(ctx, *args):
        with _AutoDispatchBelowAutograd():
            output = op(*args)
        setup_context(ctx, args, output)
        return output

    _register_formula(op, setup_context, backward)
    record = _recorder(op, forward, backward)

    def call(*args):
        if not meets_only_autograd(args):
            return op(*args)
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            return record(*args)
        with _AutoDispatchBelowAutograd():
            return op(*args)

    return call


def _recorder(op, forward, backward):
    def jvp(ctx, *tangents):
        refuse_tangents(op._opname)

    methods = {
        name: staticmethod(f) for name, f in (("forward", forward), ("backward", backward), ("jvp", jvp))
    }
    # Not Function, whose apply looks for transforms first: here there are none, or the dispatcher has found them.
    return type(op._opname, (_SingleLevelFunction,), methods).apply


def _register_formula(op, setup_context, backward):
    """The kernel of an op for the dispatch key of autograd, which runs once per transform of torch.func and once below
    them all, with the tensors of its level."""
    # The dispatcher leaves out trailing arguments that have their defaults.
    defaults = tuple(argument.default_value for argument in op._schema.arguments)

    def below(keyset, args):
        with _AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def forward(ctx, *args):
        *args, keyset = args
        # Nodes run with both modes off; that is of their own level, and not of those of torch.func below it.
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

    _libraries(op.namespace).impl(op._opname, autograd_kernel, "Autograd", with_keyset=True)


def _refuse_forward_mode(op, args):
    """Raises where the derivative of a result would be taken for zero."""
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
    """For each tensor, whether a gradient will be asked for: skipped work is decided before the op runs."""
    enabled = torch.is_grad_enabled()
    return tuple(enabled and t is not None and _requires_grad(t) for t in tensors)


def _requires_grad(tensor):
    """Whether a tensor requires grad, be it at a level below that of the innermost transform of torch.func."""
    if not is_compiling() and _are_functorch_transforms_active():
        while not tensor.requires_grad and _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def is_transformed():
    """Whether the call is transformed: by torch.func, by forward-mode differentiation, or by a backward over a batch
    of upstream gradients (is_grads_batched), which has a vmap of its own."""
    return (
        _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _dispatch_tls_is_dispatch_key_included(_VMAP_OF_BACKWARDS)
    )


def is_traced(*tensors):
    """Whether something looks at these tensors that must see functional code and decides itself what is kept: a
    compiler (torch.compile, or stand-ins of a direct AOT trace) or a transform."""
    return is_compiling() or is_transformed() or not _TENSORS.issuperset(map(type, tensors))


def may_write_saved(ctx, *tensors):
    """Inside a backward: whether these saved tensors die with it and may be overwritten.

    Never while the graph may run again (retain_graph), is differentiated itself (create_graph), or is traced.
    """
    return (
        type(ctx) is not _Differentiated
        and not is_traced(*tensors)
        and not torch._C._autograd._get_current_graph_task_keep_graph()
    )


class _Differentiated:
    """The context of a backward whose result is to be differentiated, with saved tensors that were unpacked before:
    checkpointing allows that once."""

    def __init__(self, ctx, saved_tensors):
        self._ctx, self.saved_tensors = ctx, saved_tensors

    def __getattr__(self, name):
        return getattr(self._ctx, name)


class _Once(torch.autograd.Function):
    """A backward formula as a function of all that it depends on, whose own backward raises.

    What the formula saved has the history of the inputs; so every path from the gradients to an input or to an upstream
    gradient leads through here.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(op, backward, ctx, saved, grads, *tensors):
        """``tensors``: as many saved ones, then as many upstream gradients, then what else the result depends on."""
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


def differentiable_once(op, also=None):
    """Decorates the backward formula of an op: differentiating its results again raises, naming the op.

    Backward ops have no formula of their own. Without this, ``create_graph=True`` would give gradients that look like
    constants, and a gradient penalty would silently miss a term. For every input that gets a gradient, the formula must
    have saved something with its history: the input, or an output that counts as differentiable. ``also(ctx)`` returns
    tensors that the gradients depend on and that were not saved.
    """

    def decorate(backward):
        @functools.wraps(backward)
        def formula(ctx, *grads):
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            saved = ctx.saved_tensors
            others = () if also is None else also(ctx)
            return _Once.apply(op, backward, ctx, len(saved), len(grads), *saved, *grads, *others)

        return formula

    return decorate


def refuse_made(op, grads):
    """In the backward of an op that returns gradients made by its forward: raises where those are differentiated.

    The first of them counts as a differentiable output: saved, it has the history that :func:`differentiable_once`
    asks for, without a byte of the inputs.
    """
    if any(grad is not None for grad in grads):
        refuse_second_derivative(op)


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

    library = _libraries("liger")
    library.impl(op_name, refuse, "Autograd", with_keyset=True)
    library.impl(op_name, count, "ADInplaceOrView", with_keyset=True)

    def call(*args):
        if torch.is_grad_enabled() or not meets_only_autograd(args):
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
