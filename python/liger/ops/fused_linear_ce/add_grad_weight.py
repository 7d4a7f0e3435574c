# SPDX-License-Identifier: BSD-3-Clause
"""The gradient of an lm_head's weight, added to a float32 sum such as ``main_grad``:
``accumulate_grad_weight=True``.

The logits are computed a second time, in chunks that fit a memory budget, and the last product of each chunk
adds to the sum (beta = 1). The gradient therefore has no memory of its own, and is rounded only as a term of
a float32 sum.
"""

import torch

from ..._core.dtensor.inputs import is_dtensor
from ..._core.head.chunks import HeadChunks
from ..._core.head.cross_entropy import CEOptions, Metrics, make_rule
from ..._core.head.lm_head import HeadOptions, LMHead
from ..._core.math.dtypes import accumulate_dtype
from ..._core.op.arguments import dtype_name
from ..._core.op.autograd import forbid_autograd, recording_tracer, wants_grad
from ..._core.op.by_name import by_name
from ..._core.op.registration import register_portable
from ..._core.op.tensors import check_classes, wrong_shape

_WEIGHT_ONLY = False, True, False  # of the gradients of input, weight and bias


def _add_in_backward(*arguments):
    # Imported at the first use: torch.compiler.disable imports all of torch._dynamo when it decorates.
    from ..._core.head.main_grad import add_in_backward

    return add_in_backward(*arguments)


def _check_sum(op, grad_weight, weight):
    wide = accumulate_dtype(weight.dtype)
    if grad_weight.shape != weight.shape or grad_weight.dtype != wide:
        raise RuntimeError(
            f"{op}: grad_weight has shape {tuple(grad_weight.shape)} and dtype {dtype_name(grad_weight.dtype)}, "
            f"expected the shape of weight, {tuple(weight.shape)}, and {dtype_name(wide)}"
        )


def _check_upstream(op, name, tensor, expected):
    if tensor is not None and tensor.shape != expected:
        raise wrong_shape(op, name, tensor, expected)


# --- kernels ------------------------------------------------------------------------------------------------


@by_name(torch.ops.liger.fused_linear_ce_add_grad_weight_.default)
def fused_linear_ce_add_grad_weight_(a):
    op, options = "fused_linear_ce", CEOptions.of_op(a)
    input, weight, target, bias = a.input, a.weight, a.target, a.bias
    options.check_linear(input, weight, target, bias)
    _check_sum(op, a.grad_weight, weight)
    rows, rule = input.shape[0], make_rule(op, input.dtype, weight.shape[0], target, options)
    per_row = options.reduction == "none"
    _check_upstream(op, "grad_loss", a.grad_loss, (rows,) if per_row else ())
    used_denominator = None if per_row else rule.denominator(options.denominator, options.reduction)
    upstream = a.grad_loss.to(rule.wide).expand(rows)
    upstream = upstream if rule.token_weight is None else upstream * rule.token_weight
    head = LMHead(weight, bias, 1.0, options.ignore_index, options.softcap)
    chunks = HeadChunks.plan(
        input, target, head, _WEIGHT_ONLY, True, options.memory_budget, skip=True, total=a.grad_weight
    )
    options = options._replace(denominator=used_denominator, reduction="sum")
    for at, logits in chunks:
        used = options._replace(token_weight=upstream[at].contiguous())
        torch.ops.liger.cross_entropy_forward_.default(logits, target[at], *used.of_logits, *Metrics())
        chunks.add(at, logits)


@by_name(torch.ops.liger.fused_linear_logprobs_add_grad_weight_.default)
def fused_linear_logprobs_add_grad_weight_(a):
    op, options = "fused_linear_logprobs", HeadOptions.of_op(a)
    input, weight, target, bias = a.input, a.weight, a.target, a.bias
    options.check(op, input, weight, target, bias)
    check_classes(op, "target", target, weight.shape[0], options.ignore_index)
    _check_sum(op, a.grad_weight, weight)
    for name in ("grad_logprobs", "grad_entropy"):
        _check_upstream(op, name, getattr(a, name), (input.shape[0],))
    head = options.head(weight, bias)
    chunks = HeadChunks.plan(
        input, target, head, _WEIGHT_ONLY, True, options.memory_budget, skip=True, total=a.grad_weight
    )
    chunks.add_logprobs(target, a.grad_logprobs, a.grad_entropy)


register_portable(fused_linear_ce_add_grad_weight_, fused_linear_logprobs_add_grad_weight_)


# --- autograd -----------------------------------------------------------------------------------------------

_ce_op = forbid_autograd("fused_linear_ce_add_grad_weight_")
_logprobs_op = forbid_autograd("fused_linear_logprobs_add_grad_weight_")


def summed_weight(op, name, weight, accumulate_grad_weight):
    """The weight if its gradient is to be added to a sum, else None. ``op``, ``name``: of the public
    function, and of its argument."""
    if not accumulate_grad_weight:
        return None
    tracer = recording_tracer()
    # torch.jit.trace records the call of an autograd function as such, and its program adds the gradient.
    if tracer not in (None, "torch.jit.trace") and weight.requires_grad:
        raise RuntimeError(
            f"{op}: accumulate_grad_weight is True under {tracer}, expected False: the traced program would add no "
            f"gradient to {name}.main_grad or {name}.grad"
        )
    if not wants_grad(weight)[0]:
        return None
    if is_dtensor(weight):
        from ..._core.head.main_grad import refuse_dtensor

        refuse_dtensor(op, name, weight)
    return weight


def ce_adding_grad_weight(loss, weight, input, target, bias, options):
    """The loss of :func:`fused_linear_ce`; its backward also adds the gradient of the weight to its float32
    sum.

    Args:
        loss: of the detached weight.
        weight: the parameter.
        input, target, bias, options: in the form that the op takes.
    """

    ce_weight, token_weight, denominator, *others, _accum_dtype, memory_budget = options

    def add(total, weight, saved, grads):
        x, y, b, *weights = saved
        x_weight = weight.to(x.dtype)
        _ce_op(total, *grads, x, x_weight, y, b, *weights, *others, memory_budget)

    inputs = input, target, bias, ce_weight, token_weight, denominator
    names = "input", "target", "bias", "ce_weight", "token_weight", "denominator"
    return _add_in_backward("fused_linear_ce", "weight", weight, add, (loss,), inputs, names)[0]


def logprobs_adding_grad_weight(
    op, names, weight, outputs, input, target, bias, options, row_grads=(None, None)
):
    """``outputs``; their backward also adds the gradient of the weight to its float32 sum.

    Args:
        op, names: of the public function, and of its arguments.
        weight: the parameter.
        options: :class:`HeadOptions`.
        outputs: (log-probabilities,), (log-probabilities, entropies), or (a loss,) of the detached weight.
        row_grads: the gradients of the loss with respect to both, (rows,) or None.
    """

    def add(total, weight, saved, grads):
        x, y, b, of_logprobs, of_entropy = saved
        if of_logprobs is None:
            grad_logprobs, grad_entropy = (*grads, None)[:2]
        else:
            grad_logprobs, grad_entropy = (
                g if g is None else g * grads[0] for g in (of_logprobs, of_entropy)
            )
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(grad_entropy)
        x_weight = weight if options.float32 else weight.to(x.dtype)
        numbers = *options.of_logits, options.memory_budget, options.logits_dtype
        _logprobs_op(total, grad_logprobs, grad_entropy, x, x_weight, y, b, *numbers)

    saved = input, target, bias, *row_grads
    return _add_in_backward(
        op, names.weight, weight, add, outputs, saved, (names.input, names.target, names.bias)
    )
