"""Cross entropy of a linear layer's output, a chunk of rows at a time: GEMMs of torch around the Triton row kernel.

The row kernel turns the logits of a chunk into their gradient in place. The rule of a row and the reductions are in
:mod:`.cross_entropy_rows`; this module is only the loop.
"""

import torch

from .common import require_dtype
from .cross_entropy_rows import RowResults, Rule


def _add_product(total, dlogits, x, first):
    """``total += dlogits.T @ x`` (``total =`` for the first chunk), summed in the dtype of total.

    Forms with ``out=`` throughout, because autocast casts the operands of the others.
    """
    a = dlogits.t()
    if total.dtype != a.dtype and a.is_cuda:
        # 16-bit operands with a float32 result exist on CUDA only.
        if first:
            torch.mm(a, x, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, x, out_dtype=total.dtype, out=total)
        return
    a, x = a.to(total.dtype), x.to(total.dtype)
    if first:
        torch.mm(a, x, out=total)
    else:
        torch.addmm(total, a, x, out=total)


def fused_linear_ce_forward(
    input, weight, target, bias, ce_weight, token_weight, denominator, ignore_index, label_smoothing,
    lse_square_scale, softcap, reduction, accum_dtype, memory_budget, return_z_loss, return_token_accuracy,
    return_predicted_tokens, return_logprobs, return_entropy, need_grad_input, need_grad_weight, need_grad_bias,
):  # fmt: skip
    torch.ops.liger.check_fused_linear_ce(
        input, weight, target, bias, ce_weight, token_weight, denominator, label_smoothing, softcap, reduction,
        accum_dtype, memory_budget,
    )  # fmt: skip
    require_dtype("fused_linear_ce", "input", input)
    (rows, hidden), vocab = input.shape, weight.shape[0]
    rule = Rule(
        "fused_linear_ce", vocab, target, ce_weight, token_weight, ignore_index, label_smoothing, lse_square_scale,
        softcap,
    )  # fmt: skip
    results = RowResults(
        rule, return_z_loss, return_token_accuracy, return_predicted_tokens, return_logprobs, return_entropy
    )
    chunk_rows, _chunks, _logits_bytes, accumulator_bytes = torch.ops.liger.plan_chunks(
        rows,
        hidden,
        vocab,
        input.element_size(),
        need_grad_weight,
        accum_dtype in (None, torch.float32),
        memory_budget,
    )
    need_grad_bias = need_grad_bias and bias is not None
    grad_input = input.new_empty(input.shape if need_grad_input else 0)
    grad_weight = input.new_empty(weight.shape if need_grad_weight else 0)
    grad_bias = input.new_zeros(vocab if need_grad_bias else 0, dtype=torch.float32)
    weight_sum = grad_weight
    if accumulator_bytes:
        weight_sum = torch.empty_like(grad_weight, dtype=torch.float32)
    if rows == 0:
        weight_sum.zero_()
    if accumulator_bytes and chunk_rows <= hidden:
        # Nothing is written to the final gradient before the last chunk is done: its memory holds the logits.
        buffer = grad_weight.view(-1)[: chunk_rows * vocab].view(chunk_rows, vocab)
    else:
        buffer = input.new_empty(chunk_rows, vocab)

    used_denominator = None
    if need_grad_input or need_grad_weight or need_grad_bias:
        used_denominator = results.used_denominator(denominator, reduction)
    for start in range(0, rows, max(chunk_rows, 1)):
        x = input[start : start + chunk_rows]
        logits = buffer[: x.shape[0]]
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        results.fill(logits, vocab, start, used_denominator)
        if need_grad_input:
            torch.mm(logits, weight, out=grad_input[start : start + chunk_rows])
        if need_grad_weight:
            _add_product(weight_sum, logits, x, first=start == 0)
        if need_grad_bias:
            grad_bias += logits.sum(0, dtype=torch.float32)
    if weight_sum is not grad_weight:
        grad_weight.copy_(weight_sum)
    reduced = results.reduced(denominator if used_denominator is None else used_denominator, reduction)
    return *reduced, grad_input, grad_weight, grad_bias.to(input.dtype)
