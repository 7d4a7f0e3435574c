"""fused_linear_ce and fused_linear_logprobs for an lm_head with a low-rank term (LoRA): fakes, autograd, and the calls
of the public functions with ``lora_a`` and ``lora_b``.

The logits are ``hidden @ weight.T + bias + lora_scale * (hidden @ lora_a.T) @ lora_b.T``.
"""

from __future__ import annotations

import torch

from .._core.autograd import at_positions, differentiable, differentiable_once, wants_grad
from .._core.cross_entropy_math import Metrics
from .._core.cross_entropy_results import fake_results
from .._core.dtypes import accumulate_dtype
from .._core.fakes import register_fake
from .._core.forward_gradients import gradients_in_forward
from .._core.low_rank import check_factors, refuse_one_factor
from . import fused_linear_lora_kernel  # noqa: F401  registers the kernels

_LOGPROBS = "fused_linear_logprobs"
# The arguments with a gradient, and their positions in both forwards.
_DIFFERENTIATED = ("input", "weight", "bias", "lora_a", "lora_b", "down")
_POSITIONS = (0, 1, 3, 4, 5, 6)
# Of the forward of log-probabilities.
_ARGUMENTS = len(torch.ops.liger.fused_linear_logprobs_lora_forward.default._schema.arguments)


# --- fakes --------------------------------------------------------------------------------------------------------


def _fake_gradients(input, weight, target, bias, lora_a, lora_b, down, needs_grad):
    tensors = input, weight, bias, lora_a, lora_b, down
    # Of an argument that is None.
    likes = input, weight, weight, lora_b, lora_b, lora_b
    return tuple(
        like.new_empty(0) if t is None else t.new_empty(t.shape if need else 0)
        for t, like, need in zip(tensors, likes, needs_grad, strict=True)
    )


@register_fake("liger::fused_linear_ce_lora_forward")
def _(*arguments):
    tensors, options = arguments[:7], arguments[7:]
    reduction, flags, needs_grad = options[8], options[11:16], options[16:]
    input = tensors[0]
    return (
        *fake_results(input, input.shape[0], reduction, Metrics(*flags)),
        *_fake_gradients(*tensors, needs_grad),
    )


@register_fake("liger::fused_linear_logprobs_lora_forward")
def _(
    input, weight, target, bias, lora_a, lora_b, down, lora_scale, temperature, ignore_index, softcap, memory_budget,
    return_entropy, return_argmax, return_log_sum_sq_probs=False, return_mean_logits=False, logits_dtype=None,
    accum_dtype=None,
):  # fmt: skip
    rows, wide = input.shape[0], accumulate_dtype(input.dtype)

    def of_rows(flag, dtype=wide):
        return input.new_empty((rows,) if flag else (0,), dtype=dtype)

    return (
        of_rows(True), of_rows(return_entropy), of_rows(return_argmax, torch.int64), of_rows(return_log_sum_sq_probs),
        of_rows(return_mean_logits),
    )  # fmt: skip


@register_fake("liger::fused_linear_logprobs_lora_backward")
def _(grad_logprobs, grad_entropy, *arguments):
    return _fake_gradients(*arguments[:7], arguments[12:18])


# --- autograd -----------------------------------------------------------------------------------------------------

_ce_op = gradients_in_forward(
    torch.ops.liger.fused_linear_ce_lora_forward.default,
    "fused_linear_ce",
    refused=("ce_weight", "token_weight", "denominator"),
    row_weight="token_weight",
    per_row=("reduction", "none", "sum"),
    differentiated=_DIFFERENTIATED,
)


def _setup(ctx, inputs, output):
    tensors, (*options, return_entropy, _, _, _, logits_dtype, accum_dtype) = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors)
    ctx.options, ctx.dtypes = options, (logits_dtype, accum_dtype)
    ctx.mark_non_differentiable(*(output[2:] if return_entropy else output[1:]))
    ctx.set_materialize_grads(False)


@differentiable_once(_LOGPROBS)
def _backward(ctx, grad_logprobs, grad_entropy, *_grad_others):
    if grad_logprobs is None and grad_entropy is None:
        return (None,) * _ARGUMENTS
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(grad_entropy)
    needed = [ctx.needs_input_grad[i] for i in _POSITIONS]
    grads = torch.ops.liger.fused_linear_logprobs_lora_backward.default(
        grad_logprobs, grad_entropy, *ctx.saved_tensors, *ctx.options, *needed, *ctx.dtypes
    )
    return at_positions(_ARGUMENTS, _POSITIONS, grads, needed)


_logprobs_op = differentiable(torch.ops.liger.fused_linear_logprobs_lora_forward.default, _setup, _backward)


# --- calls of public functions ------------------------------------------------------------------------------------


def check_lora(op, names, input, weight, lora_a, lora_b, **refused):
    """Raises RuntimeError for factors that do not fit, ValueError for options that a low-rank term does not have.

    Args:
        op: the public function.
        names: of input and weight there.
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
        check_factors(op, names, input, weight, lora_a, lora_b)


def lora_ce(rows, weight, target, bias, factors, scale, options, accum_dtype, memory_budget, metrics):
    """The results of ``fused_linear_ce_lora_forward`` but its gradients, differentiable.

    ``factors``: (lora_a or None, lora_b, down or None).
    """
    tensors = rows, weight, bias, *factors
    needs = (False,) * 6 if options.reduction == "none" else wants_grad(*tensors)
    return _ce_op(
        rows, weight, target, bias, *factors, *options[:3], float(scale), *options[3:], accum_dtype, memory_budget,
        *metrics, *needs,
    )[:6]  # fmt: skip


def lora_logprobs(
    rows, weight, target, bias, factors, scale, temperature, ignore_index, softcap, memory_budget, metrics,
    logits_dtype, accum_dtype,
):  # fmt: skip
    """(log-probabilities, entropies, most probable classes, log_sum_sq_probs, mean_logits); empty unless requested."""
    return _logprobs_op(
        rows, weight, target, bias, *factors, float(scale), temperature, ignore_index, softcap, memory_budget,
        *metrics, logits_dtype, accum_dtype,
    )  # fmt: skip
