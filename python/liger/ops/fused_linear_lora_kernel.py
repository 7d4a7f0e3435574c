"""The kernels of fused_linear_ce and fused_linear_logprobs for an lm_head with a low-rank term (LoRA): Python for every
device, over GEMMs and the row kernels of cross entropy.

:mod:`liger._core.low_rank` has the term. Ignored rows are left out of all products; for their number the host waits for
the device, except under CUDA graph capture.
"""

from functools import partial

import torch

from .._core.arguments import check_classes
from .._core.cross_entropy_math import CEOptions, make_rule
from .._core.dtypes import accumulate_dtype
from .._core.head_chunks import HeadChunks
from .._core.lm_head import LMHead, check_head
from .._core.low_rank import LowRank, LowRankGradients, check_low_rank
from ..backend import register_portable

_CE, _LOGPROBS = "fused_linear_ce", "fused_linear_logprobs"


class _Chunks(HeadChunks):
    """:class:`HeadChunks` with a low-rank term. ``needs_grad``: of input, weight, bias, lora_a, lora_b and down."""

    @classmethod
    def of(cls, x, target, head, factors, scale, needs_grad, exact, memory_budget):
        low_rank = LowRank.of(x, *factors, scale, head.float32_logits)
        chunks = cls.plan(x, target, head, needs_grad, exact, memory_budget, skip=True)
        chunks._low_rank = low_rank
        chunks._low_rank_gradients = LowRankGradients(low_rank, factors, x.shape[0], needs_grad[3:])
        return chunks

    def _write_logits(self, at, logits):
        self._down = self._low_rank.down_of(at, self.x)
        super()._write_logits(at, logits)
        self._low_rank.add_logits(self._down, logits, 1.0 / self._head.temperature)

    def add(self, at, dlogits):
        ignored, need_input = self.rows.ignored(at), self.gradients.needs_grad[0]
        low_rank = self._low_rank_gradients
        grad_down = low_rank.add(at, self.x, dlogits, self._down, ignored, need_input)
        term = None if grad_down is None else partial(low_rank.add_grad_input, grad_down=grad_down)
        self._add(at, dlogits, ignored, term)

    def finish(self):
        """The gradients of input, weight, bias, lora_a, lora_b and down; empty unless needed."""
        return *super().finish(), *self._low_rank_gradients.finish()


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
    chunks = _Chunks.of(
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
    chunks = _Chunks.of(input, target, head, factors, lora_scale, (False,) * 6, True, memory_budget)
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
    chunks = _Chunks.of(input, target, head, factors, lora_scale, needs_grad, exact, memory_budget)
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
