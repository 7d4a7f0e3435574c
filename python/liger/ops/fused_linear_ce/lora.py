# SPDX-License-Identifier: BSD-3-Clause
"""fused_linear_ce and fused_linear_logprobs for an lm_head with a low-rank term (LoRA): fakes, autograd, and
the calls of the public functions with ``lora_a`` and ``lora_b``.

The logits are ``hidden @ weight.T + bias + lora_scale * (hidden @ lora_a.T) @ lora_b.T``.
"""

from functools import partial

import torch

from ..._core.head.cross_entropy import Metrics
from ..._core.head.lm_head import HeadOptions
from ..._core.head.low_rank import check_factors, refuse_one_factor
from ..._core.head.results import fake_gradients, fake_logprobs, fake_results
from ..._core.op.autograd import differentiable, wants_grad
from ..._core.op.by_name import arguments_type, by_name
from ..._core.op.fakes import register_fake
from ..._core.op.forward_gradients import backward_of_logprobs, gradients_in_forward
from . import lora_chunks  # noqa: F401  registers the kernels

_LOGPROBS = "fused_linear_logprobs"
# The arguments with a gradient.
_DIFFERENTIATED = ("input", "weight", "bias", "lora_a", "lora_b", "down")
_LOGPROBS_FORWARD = torch.ops.liger.fused_linear_logprobs_lora_forward.default


# --- fakes --------------------------------------------------------------------------------------------------


@register_fake("liger::fused_linear_ce_lora_forward")
@by_name(torch.ops.liger.fused_linear_ce_lora_forward.default)
def _(a):
    results = fake_results(a.input, a.input.shape[0], a.reduction, Metrics.of_op(a))
    return *results, *fake_gradients(a)


@register_fake("liger::fused_linear_logprobs_lora_forward")
@by_name(torch.ops.liger.fused_linear_logprobs_lora_forward.default)
def _(a):
    return fake_logprobs(a)


register_fake("liger::fused_linear_logprobs_lora_backward")(
    by_name(torch.ops.liger.fused_linear_logprobs_lora_backward.default)(fake_gradients)
)


# --- autograd -----------------------------------------------------------------------------------------------

# For ops with the arguments of fused_linear_ce_forward, and possibly more.
differentiable_ce = partial(
    gradients_in_forward,
    refused=("ce_weight", "token_weight", "denominator"),
    row_weight="token_weight",
    per_row=("reduction", "none", "sum"),
)

_ce_op = differentiable_ce(
    torch.ops.liger.fused_linear_ce_lora_forward.default, "fused_linear_ce", differentiated=_DIFFERENTIATED
)


def _setup(ctx, inputs, output):
    a = arguments_type(_LOGPROBS_FORWARD)(*inputs)
    ctx.save_for_backward(*inputs[:7])
    ctx.scale, ctx.options = a.lora_scale, HeadOptions.of_op(a)
    ctx.mark_non_differentiable(*(output[2:] if a.return_entropy else output[1:]))
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_logprobs, grad_entropy, needed):
    options = ctx.options
    head = *options.of_logits, options.memory_budget, *needed, options.logits_dtype, options.accum_dtype
    backward = torch.ops.liger.fused_linear_logprobs_lora_backward.default
    return backward(grad_logprobs, grad_entropy, *ctx.saved_tensors, ctx.scale, *head)


_backward = backward_of_logprobs(_LOGPROBS_FORWARD, _LOGPROBS, _DIFFERENTIATED, _gradients)
_logprobs_op = differentiable(_LOGPROBS_FORWARD, _setup, _backward)


# --- calls of public functions ------------------------------------------------------------------------------


def check_lora(op, input, weight, lora_a, lora_b, **refused):
    """Raises RuntimeError for factors that do not fit, ValueError for options that a low-rank term does not
    have.

    Args:
        op: the public function.
        input, weight: (..., H), (V, H).
        lora_a, lora_b: the factors; not both None.
        refused: such options, by name, with the value that is expected.
    """
    refuse_one_factor(op, lora_a, lora_b)
    for name, (value, expected) in refused.items():
        if value not in expected:
            choice = " or ".join(map(str, expected))
            raise ValueError(f"{op}: {name} is {value}, expected {choice} with lora_a and lora_b")
    if weight.dim() == 2 and input.dim() > 0:
        check_factors(op, input, weight, lora_a, lora_b)


def lora_ce(rows, weight, target, bias, factors, scale, options, metrics):
    """The results of ``fused_linear_ce_lora_forward`` but its gradients, differentiable.

    ``factors``: (lora_a or None, lora_b, down or None). ``options``: :class:`CEOptions`.
    """
    tensors = rows, weight, bias, *factors
    needs = (False,) * 6 if options.reduction == "none" else wants_grad(*tensors)
    weights, numbers = options[:3], options[3:]
    arguments = rows, weight, target, bias, *factors, *weights, float(scale), *numbers
    return _ce_op(*arguments, *metrics, *needs)[:6]


def lora_logprobs(rows, weight, target, bias, factors, scale, options, metrics):
    """(log-probabilities, entropies, most probable classes, log_sum_sq_probs, mean_logits); empty unless
    requested. ``options``: :class:`HeadOptions`."""
    # No property of options: torch.compile of torch 2.10 traces none of a named tuple.
    numbers = options.temperature, options.ignore_index, options.softcap, options.memory_budget
    arguments = rows, weight, target, bias, *factors, float(scale), *numbers
    return _logprobs_op(*arguments, *metrics, options.logits_dtype, options.accum_dtype)
