"""The kernels of fused_linear_ce and fused_linear_logprobs for an lm_head with a low-rank term (LoRA): Python for every
device, over GEMMs and the row kernels of cross entropy.

:mod:`liger._core.low_rank` has the term. Ignored rows are left out of all products; for their number the host waits for
the device, except under CUDA graph capture.
"""

import torch

from .._core.arguments import check_classes
from .._core.computed_rows import computed_rows
from .._core.cross_entropy_math import CEOptions, make_rule
from .._core.dtypes import accumulate_dtype
from .._core.lm_head import LMHead, LMHeadGradients, check_head, planned_rows
from .._core.lm_head_float32 import Float32LMHeadGradients, float32_chunk_rows
from .._core.low_rank import LowRank, LowRankGradients, check_low_rank
from ..backend import register_portable

_CE, _LOGPROBS = "fused_linear_ce", "fused_linear_logprobs"


class _Chunks:
    """The chunks of rows of a call, their logits, and their gradients.

    Args:
        needs_grad: of input, weight, bias, lora_a, lora_b and down.
        head: :class:`LMHead`.
        exact: the weight gradient must be as exact as one float32 sum.
    """

    def __init__(self, x, target, head, factors, scale, needs_grad, exact, memory_budget):
        weight, bias, float32 = head.weight, head.bias, head.float32_logits
        self._x, self._head, self._factor = x, head, 1.0 / head.temperature
        self._needs_grad = needs_grad
        self._low_rank = LowRank.of(x, *factors, scale, float32)
        self._computed = computed_rows(target, head.ignore_index, skip=True)
        if float32:
            chunk_rows, chunks = float32_chunk_rows(x, weight, any(needs_grad), memory_budget)
        else:
            chunk_rows, chunks = planned_rows(x, weight, needs_grad[1], exact, memory_budget)
        kind = Float32LMHeadGradients if float32 else LMHeadGradients
        self._gradients = kind(x, weight, bias, needs_grad[:3], chunks, exact)
        self._low_rank_gradients = LowRankGradients(self._low_rank, factors, x.shape[0], needs_grad[3:])
        self._computed.clear(self._gradients.input)
        self._chunk_rows = chunk_rows

    def __iter__(self):
        """Of each chunk: (what selects its rows, its logits divided by the temperature). :meth:`add` comes before the
        next chunk."""
        memory = self._gradients.new_logits(min(self._chunk_rows, max(self._computed.count, 1)))
        for at, logits in self._computed.chunks(self._chunk_rows, memory):
            self._rows = self._x[at]
            self._down = self._low_rank.down_of(at, self._rows)
            self._head.write_logits(self._rows, logits)
            self._low_rank.add_logits(self._down, logits, self._factor)
            yield at, logits

    def add(self, at, dlogits):
        """Adds the gradients of the chunk, from that of ``x @ weight.T``."""
        ignored, need_input = self._computed.ignored(at), self._needs_grad[0]
        grad_down = self._low_rank_gradients.add(at, self._rows, dlogits, self._down, ignored, need_input)

        def add_to_grad_x(grad_x):
            self._low_rank_gradients.add_grad_input(grad_x, grad_down)

        adds = None if grad_down is None else add_to_grad_x
        self._computed.add(self._gradients, at, self._rows, dlogits, adds)

    def finish(self):
        """The gradients of input, weight, bias, lora_a, lora_b and down; empty unless needed."""
        return *self._gradients.finish(), *self._low_rank_gradients.finish()


def fused_linear_ce_lora_forward(
    input, weight, target, bias, lora_a, lora_b, down, ce_weight, token_weight, denominator, lora_scale, ignore_index,
    label_smoothing, lse_square_scale, softcap, reduction, accum_dtype, memory_budget, return_z_loss,
    return_token_accuracy, return_argmax, return_logprobs, return_entropy, need_grad_input, need_grad_weight,
    need_grad_bias, need_grad_lora_a, need_grad_lora_b, need_grad_down,
):  # fmt: skip
    options = CEOptions(
        ce_weight, token_weight, denominator, ignore_index, label_smoothing, lse_square_scale, softcap, reduction
    )  # fmt: skip
    options.check_linear(input, weight, target, bias, accum_dtype, memory_budget)
    check_low_rank(_CE, input, weight, lora_a, lora_b, down)
    rows, rule = input.shape[0], make_rule(_CE, input.dtype, weight.shape[0], target, options)
    per_row, wide = reduction == "none", rule.wide
    used_denominator = rule.denominator(denominator, reduction)
    divisor = None if per_row else used_denominator
    needs_grad = (
        need_grad_input, need_grad_weight, need_grad_bias, need_grad_lora_a, need_grad_lora_b, need_grad_down
    )  # fmt: skip
    exact = accum_dtype in (None, torch.float32)
    head = LMHead(weight, bias, 1.0, ignore_index, softcap)
    chunks = _Chunks(
        input, target, head, (lora_a, lora_b, down), lora_scale, needs_grad, exact, memory_budget
    )

    def reduced(requested):
        """A sum over no rows yet."""
        if not requested:
            return input.new_empty(0, dtype=wide)
        return input.new_zeros(rows, dtype=wide) if per_row else input.new_zeros((), dtype=wide) / divisor

    def of_rows(requested, value=0.0, dtype=wide):
        return input.new_full((rows if requested else 0,), value, dtype=dtype)

    need_predicted = return_argmax or return_token_accuracy
    loss, z_loss = reduced(True), reduced(return_z_loss)
    predicted = of_rows(need_predicted, -1, torch.int64)
    logprobs, entropy = of_rows(return_logprobs), of_rows(return_entropy)
    flags = return_z_loss, False, need_predicted, return_logprobs, return_entropy
    for at, logits in chunks:
        arguments = (
            logits, target[at], ce_weight, None if token_weight is None else token_weight[at].contiguous(), divisor,
            ignore_index, label_smoothing, lse_square_scale, softcap, "none" if per_row else "sum", *flags,
        )  # fmt: skip
        if any(needs_grad):
            results = torch.ops.liger.cross_entropy_forward_.default(*arguments)
            chunks.add(at, logits)
        else:
            results = torch.ops.liger.cross_entropy_forward.default(*arguments, False)
        for total, value in ((loss, results[0]), (z_loss, results[1])):
            if per_row and total.numel():
                total[at] = value
            elif total.numel():
                total += value
        for every, values in ((predicted, results[3]), (logprobs, results[4]), (entropy, results[5])):
            if every.numel():
                every[at] = values
    accuracy = input.new_empty(0, dtype=wide)
    if return_token_accuracy:
        hits = (predicted == rule.class_index) & rule.has_class
        accuracy = hits.sum(dtype=wide) / rule.valid.sum(dtype=wide)
    predicted = predicted if return_argmax else predicted.new_empty(0)
    return loss, z_loss, accuracy, predicted, logprobs, entropy, *chunks.finish()


def fused_linear_logprobs_lora_forward(
    input, weight, target, bias, lora_a, lora_b, down, lora_scale, temperature, ignore_index, softcap, memory_budget,
    return_entropy, return_argmax, return_log_sum_sq_probs=False, return_mean_logits=False, logits_dtype=None,
    accum_dtype=None,
):  # fmt: skip
    head = _checked_head(
        input, weight, target, bias, lora_a, lora_b, down, temperature, ignore_index, softcap, accum_dtype,
        memory_budget, logits_dtype,
    )  # fmt: skip
    factors, rows, wide = (lora_a, lora_b, down), input.shape[0], accumulate_dtype(input.dtype)
    chunks = _Chunks(input, target, head, factors, lora_scale, (False,) * 6, True, memory_budget)
    flags = True, return_entropy, return_log_sum_sq_probs, return_mean_logits
    logprobs, entropy, *metrics = (input.new_zeros(rows if flag else 0, dtype=wide) for flag in flags)
    argmax = target.new_full((rows if return_argmax else 0,), -1, dtype=torch.int64)
    for at, logits in chunks:
        y = target[at]
        statistics = head.statistics(logits, y, return_entropy, return_argmax)
        results = [
            (logprobs, statistics.logprobs),
            (entropy, statistics.entropy),
            (argmax, statistics.argmax),
        ]
        if any(flags[2:]):
            results += zip(metrics, head.metrics(logits, y, *flags[2:]), strict=True)
        for every, values in results:
            if every.numel():
                every[at] = values
    return logprobs, entropy, argmax, *metrics


def fused_linear_logprobs_lora_backward(
    grad_logprobs, grad_entropy, input, weight, target, bias, lora_a, lora_b, down, lora_scale, temperature,
    ignore_index, softcap, memory_budget, need_grad_input, need_grad_weight, need_grad_bias, need_grad_lora_a,
    need_grad_lora_b, need_grad_down, logits_dtype=None, accum_dtype=None,
):  # fmt: skip
    head = _checked_head(
        input, weight, target, bias, lora_a, lora_b, down, temperature, ignore_index, softcap, accum_dtype,
        memory_budget, logits_dtype,
    )  # fmt: skip
    needs_grad = (
        need_grad_input, need_grad_weight, need_grad_bias, need_grad_lora_a, need_grad_lora_b, need_grad_down
    )  # fmt: skip
    factors = lora_a, lora_b, down
    exact = accum_dtype in (None, torch.float32)
    chunks = _Chunks(input, target, head, factors, lora_scale, needs_grad, exact, memory_budget)
    for at, logits in chunks:
        y = target[at]
        statistics = head.statistics(logits, y, entropy=grad_entropy is not None)
        chunk_grad_entropy = None if grad_entropy is None else grad_entropy[at]
        head.write_gradient(logits, y, statistics, grad_logprobs[at], chunk_grad_entropy)
        chunks.add(at, logits)
    return chunks.finish()


def _checked_head(
    input, weight, target, bias, lora_a, lora_b, down, temperature, ignore_index, softcap, accum_dtype, memory_budget,
    logits_dtype,
):  # fmt: skip
    check_head(
        _LOGPROBS, input, weight, target, bias, temperature, softcap, accum_dtype, memory_budget, logits_dtype
    )
    check_low_rank(_LOGPROBS, input, weight, lora_a, lora_b, down)
    check_classes(_LOGPROBS, "target", target, weight.shape[0], ignore_index)
    return LMHead(weight, bias, temperature, ignore_index, softcap, logits_dtype is not None)


register_portable(
    {
        "fused_linear_ce_lora_forward": fused_linear_ce_lora_forward,
        "fused_linear_logprobs_lora_forward": fused_linear_logprobs_lora_forward,
        "fused_linear_logprobs_lora_backward": fused_linear_logprobs_lora_backward,
    }
)
