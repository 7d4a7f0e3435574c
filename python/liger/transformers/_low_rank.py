"""The loss of an lm_head with low-rank adapters (LoRA): logits ``x W^T + down up^T``, in chunks that fit the budget.

``down`` has r columns: the output of the adapters' first matrices, scaled. Adding ``up @ A`` to the weight instead
would take a second weight, and in bfloat16 it would round small updates away. Concatenating ``[W, up]`` would copy W
as well.
Here no tensor is larger than one chunk of logits, the weight gradients that are asked for, and down.
"""

import torch

from .._core.autocast import autocast_operands
from .._core.autograd import wants_grad
from .._core.forward_gradients import scaled_by_upstream
from .._core.row_blocks import row_blocks

# Rows of logits are scored by liger.cross_entropy, whose gradient overwrites them.
_score = torch.ops.liger.cross_entropy_forward_


def low_rank_ce(
    x,
    weight,
    down,
    up,
    target,
    bias=None,
    denominator=None,
    ignore_index=-100,
    softcap=None,
    memory_budget=None,
):
    """``cross_entropy(x @ weight.T + bias + down @ up.T, target)``, the mean over valid rows.

    Args:
        x: (N, H) and weight: (V, H), of one dtype, unless autocast casts them.
        down: (N, r) and up: (V, r), of any dtype; they are rounded to that of x, and their gradients are not.
        target: (N,) class indices.
        bias: (V,) or None.
        denominator: a number or a scalar tensor in place of the number of valid rows.
        ignore_index, softcap: as in :func:`liger.cross_entropy`.
        memory_budget: as in :func:`liger.fused_linear_ce`.

    Returns:
        The loss, a scalar; differentiable with respect to x, weight, down, up and bias.
    """
    x, weight, bias = autocast_operands(x, weight, bias)
    if denominator is None:
        denominator = (target != ignore_index).sum().to(torch.float32)
    elif not isinstance(denominator, torch.Tensor):
        denominator = x.new_full((), denominator, dtype=torch.float32)
    operands = x, weight, down, up, bias
    needs = wants_grad(*operands)
    return _LowRankCE.apply(*operands, target, denominator, ignore_index, softcap, memory_budget, needs)


class _LowRankCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, down, up, bias, target, denominator, ignore_index, softcap, memory_budget, needs
    ):
        (rows, hidden), vocab = x.shape, weight.shape[0]
        wide = torch.promote_types(x.dtype, torch.float32)
        step, *_ = torch.ops.liger.plan_chunks(
            rows, hidden, vocab, x.element_size(), needs[1], True, memory_budget
        )
        operands = x, weight, down, up, bias
        down, up = down.to(x.dtype), up.to(x.dtype)
        grads = [
            torch.empty_like(x) if needs[0] else None,
            weight.new_zeros(weight.shape, dtype=wide) if needs[1] else None,
            torch.empty_like(down) if needs[2] else None,
            up.new_zeros(up.shape, dtype=wide) if needs[3] else None,
            x.new_zeros(vocab, dtype=wide) if needs[4] else None,
        ]
        loss = x.new_zeros((), dtype=wide)
        memory = x.new_empty(min(step, rows), vocab)
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, rows, max(step, 1)):
                chunk = slice(start, start + step)
                logits = memory[: x[chunk].shape[0]]
                if bias is None:
                    torch.mm(x[chunk], weight.t(), out=logits)
                else:
                    torch.addmm(bias, x[chunk], weight.t(), out=logits)
                logits.addmm_(down[chunk], up.t())
                loss += _loss_and_gradient(
                    logits, target[chunk], denominator, ignore_index, softcap, any(needs)
                )
                _add_gradients(grads, logits, chunk, x, weight, down, up)
        grads = [None if g is None else g.to(t.dtype) for g, t in zip(grads, operands, strict=True)]
        ctx.present = [g is not None for g in grads]
        ctx.save_for_backward(*(g for g in grads if g is not None))
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        saved = iter(scaled_by_upstream(ctx, ctx.saved_tensors, grad_loss))
        return (*(next(saved) if present else None for present in ctx.present), *(None,) * 6)


def _loss_and_gradient(logits, target, denominator, ignore_index, softcap, need_grad):
    """The loss of a chunk; its gradient overwrites the logits."""
    options = (None, None, denominator, ignore_index, 0.0, 0.0, softcap, "mean")
    flags = (False,) * 5
    if need_grad:
        return _score(logits, target, *options, *flags)[0]
    return torch.ops.liger.cross_entropy_forward(logits, target, *options, *flags, False)[0]


def _add_gradients(grads, dlogits, chunk, x, weight, down, up):
    grad_x, grad_weight, grad_down, grad_up, grad_bias = grads
    if grad_x is not None:
        torch.mm(dlogits, weight, out=grad_x[chunk])
    if grad_down is not None:
        torch.mm(dlogits, up, out=grad_down[chunk])
    for total, rows in ((grad_weight, x), (grad_up, down)):
        if total is not None and total.dtype == dlogits.dtype:
            total.addmm_(dlogits.t(), rows[chunk])
        elif total is not None:
            # Blocks of classes, because the float32 copy of all logits would exceed the budget.
            for block in row_blocks(dlogits.t()):
                total[block].addmm_(dlogits.t()[block].to(total.dtype), rows[chunk].to(total.dtype))
    if grad_bias is not None:
        grad_bias += dlogits.sum(0, dtype=grad_bias.dtype)
