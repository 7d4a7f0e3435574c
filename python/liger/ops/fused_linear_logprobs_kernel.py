"""The kernels of fused_linear_logprobs: Python for every device, over the engines and row kernels of cross entropy.

Without kept logits or exponentials the backward computes the logits again. :mod:`liger._core.kept_logits` describes
what the forward may keep. With ``logits_dtype`` float32 there are float32 logits (:mod:`liger._core.lm_head_float32`),
on no engine of fused_linear_ce.
"""

import torch

from .._core.arguments import check_classes
from .._core.dtypes import accumulate_dtype
from .._core.head_chunks import HeadChunks
from .._core.kept_logits import (
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
from .._core.lm_head import LMHead, RowStatistics, check_head
from ..backend import register_portable
from .fused_linear_ce import fused_linear_ce_forward

_OP = "fused_linear_logprobs"


def fused_linear_logprobs_forward(
    input, weight, target, bias, temperature, ignore_index, softcap, memory_budget, return_entropy, return_argmax,
    return_log_sum_sq_probs=False, return_mean_logits=False, keep=NOTHING, need_grad_weight=False, logits_dtype=None,
    accum_dtype=None,
):  # fmt: skip
    check_head(
        _OP, input, weight, target, bias, temperature, softcap, accum_dtype, memory_budget, logits_dtype
    )
    check_classes(_OP, "target", target, weight.shape[0], ignore_index)
    check_keep(_OP, keep)
    nothing, float32 = keep == NOTHING, logits_dtype is not None
    check_engine(_OP, keep, input, weight, bias, softcap, float32)
    rows, wide = input.shape[0], accumulate_dtype(input.dtype)
    metrics = return_log_sum_sq_probs, return_mean_logits
    # The results of ignored rows, which may be skipped.
    log_sum_sq_probs, mean_logits = (input.new_zeros(rows if wanted else 0, dtype=wide) for wanted in metrics)
    if nothing and temperature == 1.0 and not float32 and not any(metrics):
        # The engines of fused_linear_ce, which leave out ignored rows.
        results = fused_linear_ce_forward(
            input, weight, target, bias, None, None, None, ignore_index, 0.0, 0.0, softcap, "none", None,
            memory_budget, False, False, return_argmax, True, return_entropy, False, False, False,
        )  # fmt: skip
        kept = new_kept(NOTHING, input, weight, wide, False, None)
        return results[4], results[5], results[3], log_sum_sq_probs, mean_logits, *kept
    if keep == EXPONENTIALS or (nothing and engine_takes(input, weight, bias, softcap, float32)):
        results = torch.ops.liger_sm90.logprobs_forward.default(
            input, weight, target, ignore_index, temperature, budget_or_default(memory_budget), return_entropy,
            return_argmax, keep == EXPONENTIALS, need_grad_weight, log_sum_sq_probs, mean_logits,
        )  # fmt: skip
        kept = new_kept(NOTHING, input, weight, wide, False, None) if nothing else results[3:]
        return *results[:3], log_sum_sq_probs, mean_logits, *kept
    head = LMHead(weight, bias, temperature, ignore_index, softcap, float32)
    logprobs = input.new_zeros(rows, dtype=wide)
    entropy = input.new_zeros(rows if return_entropy else 0, dtype=wide)
    argmax = target.new_full((rows if return_argmax else 0,), -1, dtype=torch.int64)
    kept, kept_rows = new_kept(keep, input, weight, wide, return_entropy, logits_dtype)
    if keep == LOGITS:
        # Columns that align the rows for a GEMM: no value of a tensor that autograd saves depends on chance.
        kept[:, weight.shape[0] :] = 0
    chunks = HeadChunks.plan(
        input, target, head, (False,) * 3, True, memory_budget, skip=float32 and nothing,
        memory=kept[:, : weight.shape[0]] if keep == LOGITS else None,
    )  # fmt: skip
    for at, logits in chunks:
        statistics = head.statistics(logits, target[at], return_entropy, return_argmax)
        logprobs[at] = statistics.logprobs
        if return_entropy:
            entropy[at] = statistics.entropy
        if return_argmax:
            argmax[at] = statistics.argmax
        if any(metrics):
            for result, values in zip(
                (log_sum_sq_probs, mean_logits), head.metrics(logits, target[at], *metrics), strict=True
            ):
                if values is not None:
                    result[at] = values
        if keep == LOGITS:
            kept_rows[:2] = statistics.stats
            if return_entropy:
                kept_rows[2] = statistics.entropy
    return logprobs, entropy, argmax, log_sum_sq_probs, mean_logits, kept, kept_rows


class _KeptChunks(HeadChunks):
    """:class:`HeadChunks` whose logits ``kept`` has."""

    def _write_logits(self, at, logits):
        logits.copy_(self.kept[at, : logits.shape[1]])


def fused_linear_logprobs_backward(
    grad_logprobs, grad_entropy, input, weight, target, bias, temperature, ignore_index, softcap, accum_dtype,
    memory_budget, need_grad_input, need_grad_weight, need_grad_bias, keep=NOTHING, kept=None, kept_rows=None,
    logits_dtype=None,
):  # fmt: skip
    check_head(
        _OP, input, weight, target, bias, temperature, softcap, accum_dtype, memory_budget, logits_dtype
    )
    check_keep(_OP, keep)
    nothing, float32 = keep == NOTHING, logits_dtype is not None
    check_engine(_OP, keep, input, weight, bias, softcap, float32)
    check_kept(_OP, keep, kept, kept_rows, input, weight, grad_entropy is not None, logits_dtype)
    needs_grad = need_grad_input, need_grad_weight, need_grad_bias
    if nothing and temperature == 1.0 and grad_entropy is None and not float32:
        return fused_linear_ce_forward(
            input, weight, target, bias, None, -grad_logprobs, None, ignore_index, 0.0, 0.0, softcap, "sum",
            accum_dtype, memory_budget, False, False, False, False, False, *needs_grad,
        )[-3:]  # fmt: skip
    budget = budget_or_default(memory_budget)
    if not nothing:
        # A budget that has room for the kept rows is not spent a second time on a copy of them.
        budget = min(budget, budget_or_default(None))
    if keep == EXPONENTIALS or (nothing and engine_takes(input, weight, bias, softcap, float32)):
        no_rows = input.new_empty(0)
        grads = torch.ops.liger_sm90.logprobs_backward.default(
            grad_logprobs.contiguous(), grad_entropy if grad_entropy is None else grad_entropy.contiguous(),
            no_rows if nothing else kept, no_rows if nothing else kept_rows, input, weight, target, ignore_index,
            temperature, budget, need_grad_input, need_grad_weight,
        )  # fmt: skip
        return *grads, input.new_empty(0)
    head = LMHead(weight, bias, temperature, ignore_index, softcap, float32)
    exact = accum_dtype in (None, torch.float32)
    make = _KeptChunks if keep == LOGITS else HeadChunks
    chunks = make.plan(input, target, head, needs_grad, exact, budget, skip=float32, engine=True)
    chunks.kept = kept
    for at, logits in chunks:
        y = target[at]
        if keep == LOGITS:
            entropy = kept_rows[2, at] if len(kept_rows) > 2 else None
            statistics = RowStatistics(None, entropy, None, kept_rows[:2, at])
        else:
            statistics = head.statistics(logits, y, entropy=grad_entropy is not None)
        chunk_grad_entropy = None if grad_entropy is None else grad_entropy[at]
        head.write_gradient(logits, y, statistics, grad_logprobs[at], chunk_grad_entropy)
        chunks.add(at, logits)
    return chunks.finish()


register_portable(
    {
        "fused_linear_logprobs_forward": fused_linear_logprobs_forward,
        "fused_linear_logprobs_backward": fused_linear_logprobs_backward,
    }
)
