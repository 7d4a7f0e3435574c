"""The op behind every loss: a function of a linear layer's log-probabilities, with its gradient made in the forward.

The function is known to the op by a name. It runs as ordinary PyTorch inside the op, so that compilers see one opaque
op whatever the function is, and none is compiled for it.

Rows come as (parts, groups, length). What a group contributes to the loss depends on that group alone; so the logits of
as many groups as fit the memory budget are made, turned into log-probabilities and, by the derivative of the function,
into their own gradient: three products. Where not even one group fits, its log-probabilities come first and its logits
a second time: four. Which of the two is decided by sizes alone.
"""

import contextlib
import weakref

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
)

from .._core.arguments import check_classes
from .._core.autograd import differentiable, differentiable_once, refuse_gradient_outputs
from .._core.dtypes import accumulate_dtype
from .._core.fakes import register_fake
from .._core.forward_gradients import scaled_by_upstream
from .._core.lm_head import LMHead, check_head
from .._core.vmap import register_loops
from ..ops.fused_linear_logprobs import fused_linear_logprobs_backward, fused_linear_logprobs_forward
from ._chunks import Call, Layout, chunks_of

_OP = "fused_linear_loss"
_functions = weakref.WeakValueDictionary()
_library = torch.library.Library("liger_losses", "DEF")
# given: tensors (parts, groups, ...); shared: tensors that every group sees whole; names: theirs, in this order.
# use_entropy: the function sees the entropies; with_metrics: they and the most probable tokens are returned.
_library.define(
    "fused_linear_loss_forward(Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor[] given,"
    " Tensor[] shared, str function, str[] names, SymInt parts, SymInt groups, float temperature, int ignore_index,"
    " float? softcap, ScalarType? accum_dtype, int? memory_budget, bool use_entropy, bool with_metrics,"
    " bool need_grad_input, bool need_grad_weight, bool need_grad_bias)"
    " -> (Tensor loss, Tensor logprobs, Tensor entropy, Tensor argmax, Tensor grad_input, Tensor grad_weight,"
    " Tensor grad_bias)"
)


def register_function(name, owner):
    """Makes ``owner.evaluate(logprobs, entropy, given, shared)`` known to the op for as long as the owner lives."""
    _functions[name] = owner


# What the dispatcher leaves out while it runs a kernel below autograd.
_AUTOGRAD = (
    DispatchKeySet(DispatchKey.AutogradFunctionality)
    | DispatchKeySet(DispatchKey.AutogradOther)
    | DispatchKeySet(DispatchKey.ADInplaceOrView)
)


@contextlib.contextmanager
def _autograd_as_outside():
    """Inside a kernel: autograd records again, as it does for code that no op has called."""
    include, exclude = _dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()
    with _ForceDispatchKeyGuard(include, exclude - _AUTOGRAD), torch.enable_grad():
        yield


class _Function:
    """A registered function with the tensors of a call."""

    def __init__(self, name, names, given, shared, layout, use_entropy):
        self.evaluate, self.layout, self.use_entropy = _functions[name].evaluate, layout, use_entropy
        self.given = dict(zip(names[: len(given)], given, strict=True))
        self.shared = dict(zip(names[len(given) :], shared, strict=True))

    def _call(self, logprobs, entropy, groups):
        given = {name: t[:, groups] for name, t in self.given.items()}
        return self.evaluate(logprobs, entropy, given, self.shared).sum()

    def value(self, logprobs, entropy):
        entropy = self.layout.cut(entropy) if self.use_entropy else None
        return self._call(self.layout.cut(logprobs), entropy, slice(None))

    def differentiate(self, logprobs, entropy, groups=slice(None)):
        """(value of these groups, its gradient by their log-probabilities, by entropies or None), each (parts, groups,
        length)."""
        wanted = [self.layout.cut(t, groups).detach() for t in (logprobs, entropy)[: 1 + self.use_entropy]]
        with _autograd_as_outside():
            wanted = [t.requires_grad_() for t in wanted]
            value = self._call(wanted[0], wanted[1] if self.use_entropy else None, groups)
            grads = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
        return value.detach(), grads[0], grads[1] if self.use_entropy else None


def _forward(
    input, weight, target, bias, given, shared, function, names, parts, groups, temperature, ignore_index, softcap,
    accum_dtype, memory_budget, use_entropy, with_metrics, need_grad_input, need_grad_weight, need_grad_bias,
):  # fmt: skip
    check_head(_OP, input, weight, target, bias, temperature, softcap, accum_dtype, memory_budget)
    owner = _functions[function]
    check_classes(type(owner).__name__, owner.names.target, target, weight.shape[0], ignore_index)
    wanted = need_grad_input, need_grad_weight, need_grad_bias
    with_entropy = use_entropy or with_metrics
    rows, exact = input.shape[0], accum_dtype in (None, torch.float32)
    layout = Layout(parts, groups, rows // max(parts * groups, 1))
    function = _Function(function, names, given, shared, layout, use_entropy)
    head = LMHead(weight, bias, temperature, ignore_index, softcap)
    chunks = None
    if any(wanted):
        chunks = chunks_of(
            Call(input, target, head, layout, wanted, exact, memory_budget, use_entropy, with_metrics)
        )
    if chunks is None:
        logprobs, entropy, argmax = fused_linear_logprobs_forward(
            input, weight, target, bias, *head[2:], memory_budget, with_entropy, with_metrics
        )
        if not any(wanted):
            loss = function.value(logprobs, entropy)
            return loss, logprobs, entropy, argmax, *(input.new_empty(0) for _ in wanted)
        loss, *of_rows = function.differentiate(logprobs, entropy)
        grads = fused_linear_logprobs_backward(
            *(g if g is None else g.reshape(-1) for g in of_rows),
            input,
            weight,
            target,
            bias,
            *head[2:],
            accum_dtype,
            memory_budget,
            *wanted,
        )
        return loss, logprobs, entropy, argmax, *grads

    wide = accumulate_dtype(input.dtype)
    # What ignored rows have; chunks may leave them out.
    logprobs = input.new_zeros(rows, dtype=wide)
    entropy = input.new_zeros(rows if with_entropy else 0, dtype=wide)
    argmax = target.new_full((rows if with_metrics else 0,), -1, dtype=torch.int64)
    loss = input.new_zeros((), dtype=wide)
    for groups in chunks.slices:
        chunks.read(groups, logprobs, entropy, argmax)
        value, of_logprob, of_entropy = function.differentiate(logprobs, entropy, groups)
        chunks.add(of_logprob, of_entropy)
        loss += value
    return loss, logprobs, entropy, argmax, *chunks.finish()


_library.impl("fused_linear_loss_forward", _forward, "CompositeExplicitAutograd")


@register_fake("liger_losses::fused_linear_loss_forward")
def _(
    input, weight, target, bias, given, shared, function, names, parts, groups, temperature, ignore_index, softcap,
    accum_dtype, memory_budget, use_entropy, with_metrics, need_grad_input, need_grad_weight, need_grad_bias,
):  # fmt: skip
    wide = accumulate_dtype(input.dtype)
    return (
        input.new_empty((), dtype=wide),
        input.new_empty((input.shape[0],), dtype=wide),
        input.new_empty((input.shape[0] if use_entropy or with_metrics else 0,), dtype=wide),
        input.new_empty((input.shape[0] if with_metrics else 0,), dtype=torch.int64),
        input.new_empty(input.shape if need_grad_input else (0,)),
        input.new_empty(weight.shape if need_grad_weight else (0,)),
        input.new_empty((weight.shape[0],) if need_grad_bias and bias is not None else (0,)),
    )


# --- autograd -----------------------------------------------------------------------------------------------------

_DIFFERENTIABLE = (0, 1, 3)  # input, weight, bias


def _setup(ctx, inputs, output):
    made = inputs[-3:]
    wanted = [inputs[i] is not None and inputs[i].requires_grad for i in _DIFFERENTIABLE]
    if any(want and not is_made for want, is_made in zip(wanted, made, strict=True)):
        raise RuntimeError(
            f"{_OP}: a gradient is wanted that the call did not ask for: need_grad_input, need_grad_weight and "
            f"need_grad_bias are {made}, and input, weight and bias require grad: {tuple(wanted)}"
        )
    saved = [g if want else None for g, want in zip(output[-3:], wanted, strict=True)]
    ctx.save_for_backward(*saved)
    # The first of them counts as differentiable: refuse_gradient_outputs says why.
    linked = next(g for g in saved if g is not None)
    ctx.mark_non_differentiable(*(o for o in output[1:] if o is not linked))
    ctx.set_materialize_grads(False)


@differentiable_once(_OP)
def _backward(ctx, grad_loss, *grad_others):
    refuse_gradient_outputs(_OP, grad_others)
    result = [None] * 20
    if grad_loss is not None:
        grads = scaled_by_upstream(ctx, ctx.saved_tensors, grad_loss)
        for place, grad in zip(_DIFFERENTIABLE, grads, strict=True):
            result[place] = grad
    return tuple(result)


fused_linear_loss_forward = differentiable(
    torch.ops.liger_losses.fused_linear_loss_forward.default, _setup, _backward
)
register_loops("liger_losses")
