# SPDX-License-Identifier: BSD-3-Clause
"""The op behind every loss: a function of the log-probabilities of a linear layer, with the gradient in the
forward.

The function is registered under a name, which the op takes as an argument. It runs in eager PyTorch inside
the op, so ``torch.compile`` sees one opaque op for every loss.

Rows are viewed as (parts, groups, length). The loss is a sum over groups, and each term depends on the rows
of one group. The op computes the logits of as many groups as fit the memory budget, reduces them to
log-probabilities, and overwrites them with their gradient from the derivative of the function: three GEMMs.
If the logits of a single group exceed the budget, log-probabilities are computed first and logits again for
the gradient: four GEMMs. Sizes alone decide between the two.
"""

import contextlib
import functools
import json
import sys
import uuid
import weakref

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
)

from .._core.head.cross_entropy import LogProbMetrics
from .._core.head.lm_head import HeadOptions
from .._core.head.results import LogProbRows, fake_gradients
from .._core.math.dtypes import accumulate_dtype
from .._core.op.autograd import differentiable, differentiable_once, graph_of_its_own, refuse_gradient_outputs
from .._core.op.by_name import arguments_type, by_name
from .._core.op.fakes import register_fake
from .._core.op.forward_gradients import rescale, scaled_by_upstream
from .._core.op.tensors import check_classes
from .._core.op.vmap import register_loops
from ..ops.fused_linear_logprobs.chunks import fused_linear_logprobs_backward, fused_linear_logprobs_forward
from ._chunks import ChunkArguments, Layout, make_chunks

_OP = "fused_linear_loss"
# The name of a shared tensor that the op multiplies the loss by; no argument of ``compute`` can have it.
FACTOR = "float16 factor"
_functions: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
_library = torch.library.Library("liger_losses", "DEF")
# tensors: those (parts, groups, ...) that are sliced with the chunk, then those that are passed whole; names:
# theirs, "a,b|c" of two and one, since torch.jit.trace takes no list of strings.
# use_entropy: the function reads the entropies; with_metrics: entropies and argmax are returned.
# need_row_grads: the gradients of the loss with respect to log-probabilities and entropies are returned.
_library.define(
    "fused_linear_loss_forward(Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor[] tensors,"
    " str function, str names, SymInt parts, SymInt groups, float temperature, int ignore_index,"
    " float? softcap, ScalarType? accum_dtype, int? memory_budget, bool use_entropy, bool with_metrics,"
    " bool need_grad_input, bool need_grad_weight, bool need_grad_bias, ScalarType? logits_dtype=None,"
    " bool need_row_grads=False)"
    " -> (Tensor loss, Tensor logprobs, Tensor entropy, Tensor argmax, Tensor grad_logprobs, Tensor grad_entropy,"
    " Tensor grad_input, Tensor grad_weight, Tensor grad_bias)"
)


def register_function(name, owner):
    """Registers ``owner.evaluate(logprobs, entropy, given, shared)`` under a name until the owner is
    deleted."""
    _functions[name] = owner


# Attributes of every module, and the name, which belongs to one object.
_NOT_STATE = {*vars(torch.nn.Module()), "_function"}
_DTYPE = "torch.dtype "


def portable_name(name):
    """The name of a registered function in a program that outlives its owner, or is loaded by another
    process.

    It is the class of the owner and its attributes as JSON, from which :func:`_owner` makes the owner again.
    Where these are not only numbers, strings and dtypes, it is a name that no other process has.
    """
    owner = _functions[name]
    cls = type(owner)

    def encode(value):
        if isinstance(value, torch.dtype):
            return f"{_DTYPE}{value}"
        raise TypeError(f"{type(value).__name__} in a portable name")

    state = {key: value for key, value in vars(owner).items() if key not in _NOT_STATE}
    has_tensors = owner._parameters or owner._buffers or owner._modules
    if not has_tensors and "<locals>" not in cls.__qualname__:
        try:
            return json.dumps({"loss": f"{cls.__module__}:{cls.__qualname__}", **state}, default=encode)
        except TypeError:
            pass  # An attribute of another type.
    unique = f"{name}.{uuid.uuid4().hex}"
    _functions[unique] = owner
    return unique


# The attribute that torch.compiler.assume_constant_result sets; calling it would import all of torch._dynamo.
portable_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(None)
def _made_again(name):
    state = json.loads(name)
    module, _, qualname = state.pop("loss").partition(":")
    if module not in sys.modules:
        raise RuntimeError(
            f"{_OP}: a program with the loss {qualname} needs an import of {module}, which defines it"
        )
    cls = functools.reduce(getattr, qualname.split("."), sys.modules[module])
    owner = cls.__new__(cls)
    torch.nn.Module.__init__(owner)
    for key, value in state.items():
        if isinstance(value, str) and value.startswith(_DTYPE):
            value = getattr(torch, value.removeprefix(f"{_DTYPE}torch."))
        setattr(owner, key, value)
    return owner


def _owner(name):
    """The loss that the function of this name belongs to."""
    owner = _functions.get(name)
    if owner is not None:
        return owner
    if name.startswith("{"):
        return _made_again(name)
    raise RuntimeError(
        f"{_OP}: the loss {name} of this program is not in this process: it was deleted, or has attributes other than "
        "numbers, strings and dtypes, which a saved program does not contain"
    )


# The keys that the dispatcher excludes while it runs a kernel below autograd.
_AUTOGRAD = (
    DispatchKeySet(DispatchKey.AutogradFunctionality)
    | DispatchKeySet(DispatchKey.AutogradOther)
    | DispatchKeySet(DispatchKey.ADInplaceOrView)
)


@contextlib.contextmanager
def _enable_autograd_in_kernel():
    """Inside a kernel: includes the autograd keys again, so that autograd records as outside of any op."""
    include, exclude = _dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()
    with _ForceDispatchKeyGuard(include, exclude - _AUTOGRAD), torch.enable_grad(), graph_of_its_own():
        yield


class _BoundFunction:
    """A registered function, bound to the tensors of one call."""

    def __init__(self, name, names, tensors, layout, use_entropy):
        self.evaluate, self.layout, self.use_entropy = _owner(name).evaluate, layout, use_entropy
        given, shared = (part.split(",") if part else [] for part in names.split("|"))
        self.given = dict(zip(given, tensors, strict=False))
        self.shared = dict(zip(shared, tensors[len(given) :], strict=False))
        self.factor = self.shared.pop(FACTOR, None)

    def _call(self, logprobs, entropy, groups):
        given = {name: t[:, groups] for name, t in self.given.items()}
        value = self.evaluate(logprobs, entropy, given, self.shared).sum()
        return value if self.factor is None else value * self.factor

    def value(self, logprobs, entropy):
        entropy = self.layout.view(entropy) if self.use_entropy else None
        return self._call(self.layout.view(logprobs), entropy, slice(None))

    def differentiate(self, logprobs, entropy, groups=slice(None)):
        """(scalar loss of these groups, its gradient with respect to their log-probabilities, and to their
        entropies or None); gradients are (parts, groups, length)."""
        inputs = [self.layout.view(t, groups).detach() for t in (logprobs, entropy)[: 1 + self.use_entropy]]
        with _enable_autograd_in_kernel():
            inputs = [t.requires_grad_() for t in inputs]
            value = self._call(inputs[0], inputs[1] if self.use_entropy else None, groups)
            grads = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)
        return value.detach(), grads[0], grads[1] if self.use_entropy else None


def _no_gradients(input, weight, bias):
    return input.new_empty(0), weight.new_empty(0), (weight if bias is None else bias).new_empty(0)


@by_name(torch.ops.liger_losses.fused_linear_loss_forward.default)
def _forward(a):
    options, layer = HeadOptions.of_op(a), (a.input, a.weight, a.target, a.bias)
    input, weight, target, bias = layer
    options.check(_OP, *layer)
    owner = _owner(a.function)
    check_classes(type(owner).__name__, "target", target, weight.shape[0], options.ignore_index)
    needs_grad, need_row_grads = a.needs_grad, a.need_row_grads
    use_entropy, with_metrics = a.use_entropy, a.with_metrics
    with_entropy, rows = use_entropy or with_metrics, input.shape[0]
    layout = Layout(a.parts, a.groups, rows // max(a.parts * a.groups, 1))
    function = _BoundFunction(a.function, a.names, a.tensors, layout, use_entropy)
    chunks = None
    if any(needs_grad):
        chunks = make_chunks(
            ChunkArguments(
                input=input,
                target=target,
                head=options.head(weight, bias),
                layout=layout,
                needs_grad=needs_grad,
                exact=options.exact,
                memory_budget=options.memory_budget,
                use_entropy=use_entropy,
                with_metrics=with_metrics,
            )
        )
    if chunks is None:
        logits_dtype = {"logits_dtype": options.logits_dtype}
        logprobs, entropy, argmax, *_ = fused_linear_logprobs_forward(
            *layer, *options.of_logits, options.memory_budget, with_entropy, with_metrics, **logits_dtype
        )
        if not (any(needs_grad) or need_row_grads):
            loss = function.value(logprobs, entropy)
            of_rows = logprobs.new_empty(0), logprobs.new_empty(0)
            return loss, logprobs, entropy, argmax, *of_rows, *_no_gradients(input, weight, bias)
        loss, *row_grads = function.differentiate(logprobs, entropy)
        row_grads = [g if g is None else g.reshape(-1) for g in row_grads]
        returned = [logprobs.new_empty(0) if g is None or not need_row_grads else g for g in row_grads]
        if not any(needs_grad):
            return loss, logprobs, entropy, argmax, *returned, *_no_gradients(input, weight, bias)
        head = *options.of_logits, options.accum_dtype, options.memory_budget
        grads = fused_linear_logprobs_backward(*row_grads, *layer, *head, *needs_grad, **logits_dtype)
        return loss, logprobs, entropy, argmax, *returned, *grads

    wide = accumulate_dtype(input.dtype)
    logprobs, entropy, argmax, *_ = LogProbRows(input, LogProbMetrics(with_entropy, with_metrics)).all
    loss = input.new_zeros((), dtype=wide)
    of_logprobs = input.new_empty(rows if need_row_grads else 0, dtype=wide)
    of_entropy = input.new_empty(rows if need_row_grads and use_entropy else 0, dtype=wide)
    for groups in chunks.slices:
        chunks.read(groups, logprobs, entropy, argmax)
        value, grad_logprobs, grad_entropy = function.differentiate(logprobs, entropy, groups)
        chunks.add(grad_logprobs, grad_entropy)
        for rows_of_batch, grad in ((of_logprobs, grad_logprobs), (of_entropy, grad_entropy)):
            if rows_of_batch.numel():
                layout.view(rows_of_batch, groups).copy_(grad)
        loss += value
    return loss, logprobs, entropy, argmax, of_logprobs, of_entropy, *chunks.finish()


_library.impl("fused_linear_loss_forward", _forward, "CompositeExplicitAutograd")


@register_fake("liger_losses::fused_linear_loss_forward")
@by_name(torch.ops.liger_losses.fused_linear_loss_forward.default)
def _(a):
    rows, wide = a.input.shape[0], accumulate_dtype(a.input.dtype)

    def of_rows(flag, dtype=wide):
        return a.input.new_empty((rows if flag else 0,), dtype=dtype)

    return (
        a.input.new_empty((), dtype=wide),
        of_rows(True),
        of_rows(a.use_entropy or a.with_metrics),
        of_rows(a.with_metrics, torch.int64),
        of_rows(a.need_row_grads),
        of_rows(a.need_row_grads and a.use_entropy),
        *fake_gradients(a),
    )


# --- autograd -----------------------------------------------------------------------------------------------

_DIFFERENTIABLE = (0, 1, 3)  # input, weight, bias
_Arguments = arguments_type(torch.ops.liger_losses.fused_linear_loss_forward.default)


def _gradients(ctx, grad_loss):
    if not ctx.recompute:
        return scaled_by_upstream(ctx, ctx.saved_tensors, grad_loss)
    layer, tensors = ctx.saved_tensors[:4], list(ctx.saved_tensors[4:])
    needed = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    names = "need_grad_input", "need_grad_weight", "need_grad_bias"
    arguments = _Arguments(*layer, tensors, *ctx.options)._replace(**dict(zip(names, needed, strict=True)))
    results = torch.ops.liger_losses.fused_linear_loss_forward.default(*arguments)
    return [rescale(g, grad_loss) if need else None for g, need in zip(results[-3:], needed, strict=True)]


def _setup(ctx, inputs, output):
    needs_grad = [inputs[i] is not None and inputs[i].requires_grad for i in _DIFFERENTIABLE]
    # Graphs that were traced without grad mode did not request the gradients: then the backward computes
    # them.
    ctx.recompute = any(
        need and not has for need, has in zip(needs_grad, _Arguments(*inputs).needs_grad, strict=True)
    )
    linked = None
    if ctx.recompute:
        ctx.options = inputs[5:]
        ctx.save_for_backward(*inputs[:4], *inputs[4])
    else:
        saved = [g if need else None for g, need in zip(output[-3:], needs_grad, strict=True)]
        ctx.save_for_backward(*saved)
        # The first saved gradient stays differentiable; refuse_gradient_outputs gives the reason.
        linked = next(g for g in saved if g is not None)
    ctx.mark_non_differentiable(*(o for o in output[1:] if o is not linked))
    ctx.set_materialize_grads(False)


@differentiable_once(_OP)
def _backward(ctx, grad_loss, *grad_others):
    refuse_gradient_outputs(_OP, grad_others)
    result = [None] * len(_Arguments._fields)
    if grad_loss is not None:
        for argument, grad in zip(_DIFFERENTIABLE, _gradients(ctx, grad_loss), strict=True):
            result[argument] = grad
    return tuple(result)


fused_linear_loss_forward = differentiable(
    torch.ops.liger_losses.fused_linear_loss_forward.default, _setup, _backward
)
register_loops("liger_losses")
