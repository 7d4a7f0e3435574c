# SPDX-License-Identifier: BSD-3-Clause
"""The sort of the slots of grouped_experts by csrc/experts/routing.cu, in two launches, with the routing
weights in the order of the rows."""

import torch

from ..._core.op.registration import FAMILIES

# Constants of routing.cuh: experts, and threads of a block, a multiple of which is a chunk of slots.
_MAX_EXPERTS, _THREADS = 1024, 256
# Every block of the second launch reads the counts of all chunks.
_MAX_CHUNKS, _MIN_CHUNK = 128, 1024
_MAX_SLOTS = 2**30
_WEIGHTS = (None, torch.float32, torch.bfloat16, torch.float16)


def sorts(top_k_index, num_experts, top_k_weights):
    """True if the op sorts these indices, (T, K), with these weights, (T, K) or None."""
    return (
        _has_op(top_k_index)
        and num_experts <= _MAX_EXPERTS
        and 0 < top_k_index.numel() <= _MAX_SLOTS
        and (top_k_weights if top_k_weights is None else top_k_weights.dtype) in _WEIGHTS
    )


def _has_op(tensor):
    return tensor.is_cuda and FAMILIES["swiglu"].choice == "cuda" and hasattr(torch.ops.liger_experts, "sort")


def route(top_k_index, num_experts, top_k_weights):
    """(ends, order, tokens, experts, inverse, weights) of a ``Routing``, which describes them."""
    slots = top_k_index.numel()
    chunk = max(-(-slots // _MAX_CHUNKS), _MIN_CHUNK)
    chunk += -chunk % _THREADS

    def new(*shape, dtype=torch.int64):
        return top_k_index.new_empty(shape, dtype=dtype)

    counts, ends = (
        new(-(-slots // chunk), num_experts + 1, dtype=torch.int32), new(num_experts, dtype=torch.int32)
    )  # fmt: skip
    order, tokens, experts, inverse = new(slots), new(slots + 1), new(slots + 1), new(*top_k_index.shape)
    weights = given = None
    if top_k_weights is not None:
        weights, given = new(slots + 1, 1, dtype=torch.float32), top_k_weights.contiguous()
    torch.ops.liger_experts.sort.default(
        top_k_index.contiguous(), given, chunk, counts, ends, order, tokens, experts, inverse, weights
    )
    return ends, order, tokens, experts, inverse, weights
