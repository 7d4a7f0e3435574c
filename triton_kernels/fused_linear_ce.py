# SPDX-License-Identifier: BSD-3-Clause
"""Fused linear cross entropy: the chunk loop, with GEMMs of torch and the Triton row kernel.

The row kernel of :mod:`.cross_entropy_rows` overwrites the logits of a chunk with their gradient. The logits
of the whole batch are never materialised.
"""

from dataclasses import replace

import torch

from .._core.head.cross_entropy import CEOptions, Metrics, at_original_rows
from .._core.math.computed_rows import ignored_rows
from .._core.math.matmul import product, without_ignored, write_linear
from .._core.op.by_name import by_name
from .common import require_dtype
from .cross_entropy_rows import RowResults, Rule
from .valid_rows import ValidRows

# LogitsIn of csrc/lm_head/planner.h.
_IN_GRAD_WEIGHT, _IN_GRAD_INPUT = 1, 2


@by_name(torch.ops.liger.fused_linear_ce_forward.default)
def fused_linear_ce_forward(a):
    input, weight, target, bias = a.input, a.weight, a.target, a.bias
    options, metrics = CEOptions.of_op(a), Metrics.of_op(a)
    need_grad_input, need_grad_weight, need_grad_bias = a.needs_grad
    options.check_linear(input, weight, target, bias)
    require_dtype("fused_linear_ce", "input", input)
    (rows, hidden), vocab = input.shape, weight.shape[0]
    rule = Rule.of_options("fused_linear_ce", vocab, target, options)
    denominator, reduction = options.denominator, options.reduction
    results = RowResults(rule, *metrics)
    need_grad_bias = need_grad_bias and bias is not None
    used_denominator = None
    if need_grad_input or need_grad_weight or need_grad_bias:
        used_denominator = results.used_denominator(denominator, reduction)

    def lay_out(*valid_counts):
        return torch.ops.liger.lay_out_chunks(
            rows, hidden, vocab, input.element_size(), need_grad_input, need_grad_weight, options.exact,
            options.memory_budget, *valid_counts,
        )  # fmt: skip

    logits_in, stride, elements, accumulator_bytes, prefetch_rows, chunks, offsets = lay_out()
    grad_weight = input.new_empty(weight.shape if need_grad_weight else 0)
    grad_bias = input.new_zeros(vocab if need_grad_bias else 0, dtype=torch.float32)
    weight_sum = torch.empty_like(grad_weight, dtype=torch.float32) if accumulator_bytes else grad_weight
    memory = grad_weight.view(-1) if logits_in == _IN_GRAD_WEIGHT else input.new_empty(elements)
    if logits_in == _IN_GRAD_INPUT:
        grad_input = memory[: rows * hidden].view(rows, hidden)
    else:
        grad_input = input.new_empty(input.shape if need_grad_input else 0)

    def logits_at(offset, count):
        return memory[offset : offset + count * stride].view(count, stride)[:, :vocab]

    def gather(first, count):
        # The rows are stored in the memory of their gradient, if it is needed.
        out = grad_input[first : first + count] if need_grad_input else None
        return valid_rows.gather(input, first, count, out)

    def zero_ignored(x, first):
        """Rows of x for the GEMM of grad_weight, with zeros in ignored rows; x itself if it has valid rows
        only."""
        if all_valid or valid_rows is not None:
            return x
        rows = slice(first, first + x.shape[0])
        ignored = ignored_rows(rule.target[rows], rule.ignore_index)
        return without_ignored(x, ignored, grad_input[rows] if need_grad_input else None)

    # The device computes the logits of the first rows, needed in any case, while the host waits for the valid
    # count.
    valid_rows, all_valid, done = None, False, 0
    may_wait = not (input.is_cuda and torch.cuda.is_current_stream_capturing())
    # With LIGER_CHECK_TARGETS the kernel prints row numbers, which must be rows of the batch.
    if prefetch_rows and may_wait and not rule.check_targets:
        valid_rows, done = ValidRows(rule.target, rule.ignore_index), prefetch_rows
        write_linear(gather(0, prefetch_rows), weight, bias, logits_at(offsets[0], prefetch_rows))
        valid_rows.wait()
        *_, chunks, offsets = lay_out(valid_rows.count, valid_rows.leading_rows)
        if sum(chunks) == rows:
            valid_rows, all_valid = None, valid_rows.count == rows
        else:
            token_weight = None if rule.token_weight is None else rule.token_weight[valid_rows.index]
            rule = replace(rule, target=rule.target[valid_rows.index], token_weight=token_weight)
            results = RowResults(rule, *metrics)

    start = 0
    for count, offset in zip(chunks, offsets, strict=True):
        x = input[start : start + count] if valid_rows is None else gather(start, count)
        logits = logits_at(offset, count)
        if done < count:
            write_linear(x[done:], weight, bias, logits[done:])
        results.fill(logits, stride, start, used_denominator)
        if need_grad_weight:
            product(logits.t(), zero_ignored(x, start), weight_sum, add=start > 0)
        if need_grad_bias:
            grad_bias += logits.sum(0, dtype=torch.float32)
        if need_grad_input:
            # This product comes last: x may be stored in these rows of grad_input.
            torch.mm(logits, weight, out=grad_input[start : start + count])
        start, done = start + count, 0

    if not chunks:
        weight_sum.zero_()
        grad_input.zero_()
    elif valid_rows is not None and need_grad_input:
        valid_rows.expand_(grad_input)
    if weight_sum is not grad_weight:
        grad_weight.copy_(weight_sum)
    reduced = results.reduced(denominator if used_denominator is None else used_denominator, reduction)
    if valid_rows is not None:
        reduced = at_original_rows(reduced, metrics, reduction, valid_rows.index.long(), rows)
    return *reduced, grad_input, grad_weight, grad_bias.to(input.dtype)
