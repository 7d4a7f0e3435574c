# SPDX-License-Identifier: BSD-3-Clause
"""Autograd nodes of patched models that reuse memory where autograd would allocate a second large tensor.

Both give the results of the torch operations, with the same rounding. If the graph is retained for another
backward, they overwrite nothing and use the formulas of torch.
"""

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ..._core.head.main_grad import add_in_backward
from ..._core.modules.hooks import hooks_of
from ..._core.modules.linear_layers import moves_nothing, overrides_forward
from ..._core.op.autograd import is_traced, may_write_saved

# Types of weights that a node may save and read again in its backward. During the forward, FSDP1 replaces the
# parameters by tensors, views of the gathered parameters.
_PLAIN_WEIGHTS = (nn.Parameter, torch.Tensor)

# --- an embedding that is tied to the lm_head ---------------------------------------------------------------


class _SharedLookup(torch.autograd.Function):
    """(rows of the weight, a stand-in for the head's weight); its backward gets the gradients of both.

    Autograd would allocate a second, mostly zero gradient of the size of the weight and add the two. This
    node adds the gradient of the lookup to the head's in place, in the rows that the lookup has read.
    """

    @staticmethod
    def forward(ctx, ids, weight, padding_idx):
        ctx.save_for_backward(ids)
        ctx.weight_rows, ctx.padding_idx = len(weight), -1 if padding_idx is None else padding_idx
        ctx.set_materialize_grads(False)
        return nn.functional.embedding(ids, weight, padding_idx), weight.new_empty(()).expand(weight.shape)

    @staticmethod
    def backward(ctx, grad_rows, grad_weight):
        if grad_rows is None:
            return None, grad_weight, None
        (ids,) = ctx.saved_tensors
        # The gradient of the head has no other reader, so it may be overwritten.
        owned = may_write_saved(ctx, grad_rows, grad_weight)
        if grad_weight is not None and owned and _ROWS_PER_TOKEN * ids.numel() < ctx.weight_rows:
            _add_to_rows(grad_weight, grad_rows, ids, ctx.padding_idx)
            return None, grad_weight, None
        grad = torch.ops.aten.embedding_dense_backward(
            grad_rows, ids, ctx.weight_rows, ctx.padding_idx, False
        )
        if grad_weight is not None:
            grad = grad_weight.add_(grad) if owned else grad_weight + grad
        return None, grad, None


class _WeightOfHead(torch.autograd.Function):
    """Returns the weight; its gradient becomes the gradient of the stand-in.

    ZeRO-3 releases the weight behind the embedding and gathers it for the head: a view would keep it.
    """

    @staticmethod
    def forward(ctx, stand_in, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# Peak memory of _add_to_rows per token, in rows of the hidden size.
_ROWS_PER_TOKEN = 2


def _add_to_rows(total, grads, ids, padding_idx):
    """``total[id] += sum of the grads of that id``: float32 sums, rounded and then added, as autograd does.

    Shapes do not depend on data, so the host does not synchronise. The order of every sum is fixed.
    """
    ids, grads = ids.reshape(-1), grads.reshape(-1, grads.shape[-1])
    tokens = ids.numel()
    if tokens == 0:
        return
    sorted_ids, order = ids.sort(stable=True)
    starts = torch.zeros_like(sorted_ids)
    starts[1:] = sorted_ids[1:] != sorted_ids[:-1]
    rank = starts.cumsum(0)
    numbers = torch.empty_like(rank).scatter_(0, order, rank)
    if padding_idx >= 0:
        # Padding has no gradient: a separate index, which embedding_dense_backward skips, gives zero rows.
        numbers = numbers.masked_fill(ids == padding_idx, tokens)
    sums = torch.ops.aten.embedding_dense_backward(grads, numbers, tokens + 1, tokens, False)
    rows = sums.index_select(0, rank)
    del sums
    rows += total.index_select(0, sorted_ids)
    # Tokens with the same id write the same values to the same row.
    total.index_copy_(0, sorted_ids, rows)


def can_share(embedding, head):
    """True if embedding and head share a plain weight, which nothing but ZeRO-3 gathers in between.

    Forward hooks of the embedding are allowed: gradient checkpointing of transformers registers one.
    """
    weight = embedding.weight
    return (
        head.weight is weight
        and type(weight) in _PLAIN_WEIGHTS
        and weight.requires_grad
        and torch.is_grad_enabled()
        and embedding.max_norm is None
        and not (embedding.sparse or embedding.scale_grad_by_freq)
        and (
            hasattr(weight, "ds_id")
            or not (embedding._forward_pre_hooks or head._forward_pre_hooks or head._forward_hooks)
        )
        and not any(map(overrides_forward, (embedding, head)))
    )


def lookup(embedding, ids):
    """(output of the embedding, the stand-in for :func:`weight_of_head`); both share one autograd node."""
    return _SharedLookup.apply(ids, embedding.weight, embedding.padding_idx)


def weight_of_head(stand_in, weight):
    """The weight for the head of a :func:`lookup`."""
    return _WeightOfHead.apply(stand_in, weight.detach())


def lookup_adding_gradient(embedding, ids):
    """The output of the embedding; its backward adds the gradient to the float32 sum of the weight."""

    def add(total, weight, saved, grads):
        _add_to_rows(total, grads[0].to(total.dtype), *saved, padding_idx)

    padding_idx = -1 if embedding.padding_idx is None else embedding.padding_idx
    rows = nn.functional.embedding(ids, embedding.weight.detach(), embedding.padding_idx)
    return add_in_backward("liger.patch", "embedding.weight", embedding.weight, add, (rows,), (ids,))[0]


# --- a linear layer that may overwrite its input ------------------------------------------------------------

# Smaller inputs, in bytes, are not worth the host time of two more autograd nodes (40 us).
WORTH_REUSING = 64 << 20


class _Saved(torch.autograd.Function):
    """Saves the tensors for the backward of :class:`_LinearOver`.

    Gradient checkpointing stops the recomputation when the last tensor has been saved, and a node saves after
    its forward. This node has no computation, so the GEMM of _LinearOver is not recomputed.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _LinearOver(torch.autograd.Function):
    """``linear(x, weight, bias)``; its backward overwrites x, unless the graph is retained."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.saved = x.grad_fn
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved.saved_tensors
        flat_grad, flat_x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_weight = flat_grad.t() @ flat_x if ctx.needs_input_grad[1] else None
        grad_bias = flat_grad.sum(0) if ctx.needs_input_grad[2] else None
        if may_write_saved(ctx, grad, x, weight) and x.is_contiguous():
            # Detached: a gradient must not have the history of x.
            grad_x = x.detach()
            torch.mm(flat_grad, weight, out=grad_x.view(flat_x.shape))
        else:
            grad_x = (flat_grad @ weight).view(x.shape)
        return grad_x, grad_weight, grad_bias


def linear_over(layer, x):
    """``layer(x)``; the backward may overwrite x, so the caller must have no other use of it.

    A layer that is not a plain nn.Linear, has hooks (also global ones) or a small input, is called as it is.
    """
    if is_plain_linear(layer, x) and not is_traced(x) and x.requires_grad and x.nbytes > WORTH_REUSING:
        return _LinearOver.apply(_Saved.apply(x, layer.weight), layer.weight, layer.bias)
    return layer(x)


def is_plain_linear(layer, x):
    """True if ``layer(x)`` is recorded, and the linear operation alone with a plain, uncast weight."""
    return (
        getattr(type(layer), "forward", None) is nn.Linear.forward
        and _has_plain_weight(layer)
        and not any(hooks_of(layer))
        and not (overrides_forward(layer) and not moves_nothing(layer, x))
        and not _has_any_global_hook()
        and torch.is_grad_enabled()
        and not _autocast_casts(layer, x)
    )


def _has_plain_weight(layer):
    # A parametrization is a property of the class, and another reading of it may give another weight.
    weight = layer._parameters.get("weight")
    return type(layer.__dict__.get("weight") if weight is None else weight) in _PLAIN_WEIGHTS


def _autocast_casts(layer, x):
    """True if autocast makes copies of weight or bias, which it keeps for other calls of the layer."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return False
    dtype, bias = torch.get_autocast_dtype(device), layer.bias
    return not (x.dtype == dtype == layer.weight.dtype and (bias is None or bias.dtype == dtype))
