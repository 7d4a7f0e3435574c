# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of fused_linear_logprobs: Python for every device, over the engines and row kernels of cross
entropy.

Without kept logits or exponentials the backward computes the logits again.
:mod:`liger._core.head.kept_logits` describes what the forward may keep. With ``logits_dtype`` float32 there
are float32 logits (:mod:`liger._core.head.float32`), on no engine of fused_linear_ce.
"""

import torch

from ..._core.head.chunks import HeadChunks
from ..._core.head.cross_entropy import CEOptions, LogProbMetrics, Metrics
from ..._core.head.kept_logits import (
    EXPONENTIALS,
    LOGITS,
    NOTHING,
    budget_or_default,
    check_engine,
    check_keep,
    check_kept,
    engine_takes,
    new_kept,
)
from ..._core.head.lm_head import HeadOptions, RowStatistics
from ..._core.head.results import LogProbRows, new_rows
from ..._core.math.dtypes import accumulate_dtype
from ..._core.op.by_name import by_name
from ..._core.op.registration import register_portable
from ..._core.op.tensors import check_classes
from ..fused_linear_ce.op import fused_linear_ce_forward

_OP = "fused_linear_logprobs"


@by_name(torch.ops.liger.fused_linear_logprobs_forward.default)
def fused_linear_logprobs_forward(a):
    input, weight, target, bias = a.input, a.weight, a.target, a.bias
    options, requested, keep = HeadOptions.of_op(a), LogProbMetrics.of_op(a), a.keep
    options.check(_OP, input, weight, target, bias)
    check_classes(_OP, "target", target, weight.shape[0], options.ignore_index)
    check_keep(_OP, keep)
    nothing, float32, softcap = keep == NOTHING, options.float32, options.softcap
    check_engine(_OP, keep, input, weight, bias, softcap, float32)
    wide = accumulate_dtype(input.dtype)
    if nothing and options.temperature == 1.0 and not float32 and not any(requested[2:]):
        # The engines of fused_linear_ce, which leave out ignored rows.
        ce_options = _ce_options(options._replace(accum_dtype=None), "none")
        ce_metrics = Metrics(False, False, requested.argmax, True, requested.entropy)
        results = fused_linear_ce_forward(
            input, weight, target, bias, *ce_options, *ce_metrics, False, False, False
        )
        kept = new_kept(NOTHING, input, weight, wide, False, None)
        return results[4], results[5], results[3], *new_rows(input, False, False), *kept
    if keep == EXPONENTIALS or (nothing and engine_takes(input, weight, bias, softcap, float32)):
        budget = budget_or_default(options.memory_budget)
        head = options.ignore_index, options.temperature, budget
        flags = requested.entropy, requested.argmax, keep == EXPONENTIALS, a.need_grad_weight
        metrics = new_rows(input, *requested[2:])
        forward = torch.ops.liger_sm90.logprobs_forward.default
        results = forward(input, weight, target, *head, *flags, *metrics)
        kept = new_kept(NOTHING, input, weight, wide, False, None) if nothing else results[3:]
        return *results[:3], *metrics, *kept
    head = options.head(weight, bias)
    results = LogProbRows(input, requested)
    kept, kept_rows = new_kept(keep, input, weight, wide, requested.entropy, options.logits_dtype)
    memory = None
    if keep == LOGITS:
        # Columns that align the rows for a GEMM: no value of a tensor that autograd saves depends on chance.
        kept[:, weight.shape[0] :] = 0
        memory = kept[:, : weight.shape[0]]
    skip, budget = float32 and nothing, options.memory_budget
    chunks = HeadChunks.plan(input, target, head, (False,) * 3, True, budget, skip=skip, memory=memory)
    for at, logits in chunks:
        statistics = results.fill(at, head, logits, target[at])
        if keep == LOGITS:
            kept_rows[:2] = statistics.stats
            if requested.entropy:
                kept_rows[2] = statistics.entropy
    return *results.all, kept, kept_rows


class _KeptChunks(HeadChunks):
    """:class:`HeadChunks` with the logits in ``kept``."""

    def _write_logits(self, at, logits):
        logits.copy_(self.kept[at, : logits.shape[1]])


@by_name(torch.ops.liger.fused_linear_logprobs_backward.default)
def fused_linear_logprobs_backward(a):
    input, weight, target, bias, grad_entropy = a.input, a.weight, a.target, a.bias, a.grad_entropy
    options, keep, kept, kept_rows = HeadOptions.of_op(a), a.keep, a.kept, a.kept_rows
    options.check(_OP, input, weight, target, bias)
    check_keep(_OP, keep)
    nothing, float32, softcap = keep == NOTHING, options.float32, options.softcap
    check_engine(_OP, keep, input, weight, bias, softcap, float32)
    check_kept(_OP, keep, kept, kept_rows, input, weight, grad_entropy is not None, options.logits_dtype)
    if nothing and options.temperature == 1.0 and grad_entropy is None and not float32:
        ce_options = _ce_options(options, "sum", token_weight=-a.grad_logprobs)
        return fused_linear_ce_forward(input, weight, target, bias, *ce_options, *Metrics(), *a.needs_grad)[
            -3:
        ]
    budget = budget_or_default(options.memory_budget)
    if not nothing:
        # A budget that has room for the kept rows is not spent a second time on a copy of them.
        budget = min(budget, budget_or_default(None))
    if keep == EXPONENTIALS or (nothing and engine_takes(input, weight, bias, softcap, float32)):
        no_rows = input.new_empty(0)
        upstream = [g if g is None else g.contiguous() for g in (a.grad_logprobs, grad_entropy)]
        forward_results = (no_rows, no_rows) if nothing else (kept, kept_rows)
        head = options.ignore_index, options.temperature, budget, a.need_grad_input, a.need_grad_weight
        backward = torch.ops.liger_sm90.logprobs_backward.default
        grads = backward(*upstream, *forward_results, input, weight, target, *head)
        return *grads, input.new_empty(0)

    def kept_statistics(at):
        entropy = kept_rows[2, at] if len(kept_rows) > 2 else None
        return RowStatistics(None, entropy, None, kept_rows[:2, at])

    make, statistics = (_KeptChunks, kept_statistics) if keep == LOGITS else (HeadChunks, None)
    head, exact = options.head(weight, bias), options.exact
    chunks = make.plan(input, target, head, a.needs_grad, exact, budget, skip=float32, engine=True)
    chunks.kept = kept
    chunks.add_logprobs(target, a.grad_logprobs, grad_entropy, statistics)
    return chunks.finish()


def _ce_options(options, reduction, token_weight=None):
    """The :class:`CEOptions` of an op of fused_linear_ce."""
    of_logits = {"ignore_index": options.ignore_index, "softcap": options.softcap, "reduction": reduction}
    limits = {"accum_dtype": options.accum_dtype, "memory_budget": options.memory_budget}
    return CEOptions(token_weight=token_weight, **of_logits, **limits)


register_portable(fused_linear_logprobs_forward, fused_linear_logprobs_backward)
