# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of fused_linear_ce and fused_linear_logprobs for an lm_head with a low-rank term (LoRA): Python
for every device, over GEMMs and the row kernels of cross entropy.

:mod:`liger._core.head.low_rank` has the term. Ignored rows are left out of all products; for their number the
host waits for the device, except under CUDA graph capture.
"""

from functools import partial

import torch

from ..._core.head.chunks import HeadChunks
from ..._core.head.cross_entropy import CEOptions, LogProbMetrics, Metrics, make_rule
from ..._core.head.lm_head import HeadOptions, LMHead
from ..._core.head.low_rank import LowRank, LowRankGradients, check_low_rank
from ..._core.head.results import LogProbRows
from ..._core.op.by_name import by_name
from ..._core.op.registration import register_portable
from ..._core.op.tensors import check_classes

_CE, _LOGPROBS = "fused_linear_ce", "fused_linear_logprobs"


class _Chunks(HeadChunks):
    """:class:`HeadChunks` with a low-rank term. ``needs_grad``: of input, weight, bias, lora_a, lora_b and
    down."""

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


@by_name(torch.ops.liger.fused_linear_ce_lora_forward.default)
def fused_linear_ce_lora_forward(a):
    options, metrics = CEOptions.of_op(a), Metrics.of_op(a)
    input, weight, target, bias = a.input, a.weight, a.target, a.bias
    options.check_linear(input, weight, target, bias)
    factors = _checked_factors(_CE, a)
    rows, rule = input.shape[0], make_rule(_CE, input.dtype, weight.shape[0], target, options)
    per_row, wide, token_weight = options.reduction == "none", rule.wide, options.token_weight
    used_denominator = rule.denominator(options.denominator, options.reduction)
    divisor = None if per_row else used_denominator
    head = LMHead(weight, bias, 1.0, options.ignore_index, options.softcap)
    chunks = _Chunks.of(
        input, target, head, factors, a.lora_scale, a.needs_grad, options.exact, options.memory_budget
    )

    def reduced(requested):
        """A sum over no rows yet."""
        if not requested:
            return input.new_empty(0, dtype=wide)
        return input.new_zeros(rows, dtype=wide) if per_row else input.new_zeros((), dtype=wide) / divisor

    def of_rows(requested, value=0.0, dtype=wide):
        return input.new_full((rows if requested else 0,), value, dtype=dtype)

    need_predicted = metrics.argmax or metrics.token_accuracy
    loss, z_loss = reduced(True), reduced(metrics.z_loss)
    predicted = of_rows(need_predicted, -1, torch.int64)
    logprobs, entropy = of_rows(metrics.logprobs), of_rows(metrics.entropy)
    flags = metrics._replace(token_accuracy=False, argmax=need_predicted)
    for at, logits in chunks:
        chunk_options = options._replace(
            token_weight=None if token_weight is None else token_weight[at].contiguous(),
            denominator=divisor,
            reduction="none" if per_row else "sum",
        )
        arguments = logits, target[at], *chunk_options.of_logits, *flags
        if any(a.needs_grad):
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
    if metrics.token_accuracy:
        hits = (predicted == rule.class_index) & rule.has_class
        accuracy = hits.sum(dtype=wide) / rule.valid.sum(dtype=wide)
    predicted = predicted if metrics.argmax else predicted.new_empty(0)
    return loss, z_loss, accuracy, predicted, logprobs, entropy, *chunks.finish()


@by_name(torch.ops.liger.fused_linear_logprobs_lora_forward.default)
def fused_linear_logprobs_lora_forward(a):
    head, chunks = _logprob_chunks(a, (False,) * 6)
    results = LogProbRows(a.input, LogProbMetrics.of_op(a))
    for at, logits in chunks:
        results.fill(at, head, logits, a.target[at])
    return results.all


@by_name(torch.ops.liger.fused_linear_logprobs_lora_backward.default)
def fused_linear_logprobs_lora_backward(a):
    _, chunks = _logprob_chunks(a, a.needs_grad)
    chunks.add_logprobs(a.target, a.grad_logprobs, a.grad_entropy)
    return chunks.finish()


def _checked_factors(op, a):
    check_low_rank(op, a.input, a.weight, a.lora_a, a.lora_b, a.down)
    return a.lora_a, a.lora_b, a.down


def _logprob_chunks(a, needs_grad):
    """(the :class:`LMHead`, its chunks) of an op of log-probabilities."""
    options, layer = HeadOptions.of_op(a), (a.input, a.weight, a.target, a.bias)
    options.check(_LOGPROBS, *layer)
    factors = _checked_factors(_LOGPROBS, a)
    check_classes(_LOGPROBS, "target", a.target, a.weight.shape[0], options.ignore_index)
    head = options.head(a.weight, a.bias)
    return head, _Chunks.of(
        a.input, a.target, head, factors, a.lora_scale, needs_grad, options.exact, options.memory_budget
    )


register_portable(
    fused_linear_ce_lora_forward, fused_linear_logprobs_lora_forward, fused_linear_logprobs_lora_backward
)
