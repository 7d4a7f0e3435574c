# SPDX-License-Identifier: BSD-3-Clause
"""The rows of grouped_experts: the sort of the slots by expert, and the weighted sum of the experts of each
token.

The sort is a stable counting sort in two launches. Each program of the first one counts the slots of each
expert in a chunk of consecutive slots. Each program of the second one adds up the counts of the chunks
before its own, and gives every slot of its chunk, in order, the next row of its expert. Only counts are
added, so the result does not depend on the order of programs.

The sum has one program per token and block of columns: it reads the rows of the token's choices once, sums
them in float32 in the order of the choices, and writes each result once, so the sum needs no atomics and is
deterministic.
"""

import torch
import triton
import triton.language as tl

from .common import on_device_of

_MAX_EXPERTS, _MAX_SLOTS = 1023, 2**30
# Slots that are counted at once, and slots that are compared with one another.
_COUNTED, _COMPARED = 1024, 128
# Every program of the second launch reads the counts of all chunks: more chunks are no gain for many experts.
_MAX_COUNTS = 1 << 18
# Counts that are read at once.
_READ = 4096
# 16 bytes per thread and load with 4 warps in half types.
_BLOCK = 1024
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _experts_of(index_ptr, slots, n_slots, n_experts):
    """The experts of slots. Sentinels, and slots after the last, have the expert n_experts."""
    expert = tl.load(index_ptr + slots, mask=slots < n_slots, other=n_experts)
    return tl.minimum(tl.maximum(expert, 0), n_experts).to(tl.int32)


# The number of slots depends on the batch.
@triton.jit(do_not_specialize=["n_slots", "chunk"])
def count_kernel(index_ptr, counts_ptr, n_slots, chunk, n_experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    end = tl.minimum((program + 1) * chunk, n_slots)
    for start in range(program * chunk, end, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        counts += tl.histogram(_experts_of(index_ptr, slots, end, n_experts), BINS)
    tl.store(counts_ptr + program * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["n_slots", "chunk", "n_chunks"])
def sort_kernel(
    index_ptr, counts_ptr, ends_ptr, order_ptr, tokens_ptr, experts_ptr, inverse_ptr,
    n_slots, chunk, n_chunks, n_experts, choices,
    BINS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total, before = tl.zeros((BINS,), dtype=tl.int32), tl.zeros((BINS,), dtype=tl.int32)
    for first in range(0, n_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)[:, None]
        counts = tl.load(counts_ptr + chunks * BINS + bins[None, :], mask=chunks < n_chunks, other=0)
        # Slots after the last of a chunk were counted as sentinels.
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(chunks < program, counts, 0), 0)
    ends = tl.cumsum(total, 0)
    n_valid = tl.sum(tl.where(bins < n_experts, total, 0), 0)
    if program == 0:
        tl.store(ends_ptr + bins, ends, mask=bins < n_experts)
        # The pad.
        tl.store(tokens_ptr + n_slots, 0)
        tl.store(experts_ptr + n_slots, 0)
    # The next row of each expert. Sentinels of a chunk follow all rows, and sentinels of the chunks before.
    position = program * chunk
    following = tl.where(bins < n_experts, ends - total + before, n_valid + position)
    following -= tl.where(bins == n_experts, tl.sum(tl.where(bins < n_experts, before, 0), 0), 0)
    end = tl.minimum((program + 1) * chunk, n_slots)
    lane = tl.arange(0, BLOCK)
    for start in range(position, end, BLOCK):
        slots = start + lane
        inside = slots < end
        expert = _experts_of(index_ptr, slots, end, n_experts)
        earlier = (expert[:, None] == expert[None, :]) & (lane[None, :] < lane[:, None])
        row = tl.gather(following, expert, 0) + tl.sum(earlier.to(tl.int32), 1)
        following += tl.histogram(expert, BINS)
        is_valid = expert < n_experts
        tl.store(order_ptr + row, slots.to(tl.int64), mask=inside)
        tl.store(tokens_ptr + row, (slots // choices).to(tl.int64), mask=inside)
        tl.store(experts_ptr + row, tl.minimum(expert, n_experts - 1).to(tl.int64), mask=inside)
        tl.store(inverse_ptr + slots, tl.where(is_valid, row, n_slots).to(tl.int64), mask=inside)


def sorts(top_k_index, num_experts):
    """True if the kernels sort these indices, (T, K)."""
    return num_experts <= _MAX_EXPERTS and 0 < top_k_index.numel() <= _MAX_SLOTS


def route(top_k_index, num_experts):
    """(ends, order, tokens, experts, inverse) of a ``Routing``, which describes them.

    Args:
        top_k_index: (T, K), int64 or int32, which :func:`sorts` has accepted.
    """
    slots, choices = top_k_index.numel(), top_k_index.shape[1]
    bins = triton.next_power_of_2(num_experts + 1)
    chunks = min(triton.cdiv(slots, _COMPARED), max(_MAX_COUNTS // bins, 1), 512)
    chunk = triton.cdiv(triton.cdiv(slots, chunks), _COMPARED) * _COMPARED
    chunks = triton.cdiv(slots, chunk)

    def new(*shape, dtype=torch.int64):
        return top_k_index.new_empty(shape, dtype=dtype)

    counts, ends = new(chunks, bins, dtype=torch.int32), new(num_experts, dtype=torch.int32)
    order, tokens, experts, inverse = new(slots), new(slots + 1), new(slots + 1), new(*top_k_index.shape)
    index = top_k_index.contiguous()
    with on_device_of(index):
        count_kernel[(chunks,)](index, counts, slots, chunk, num_experts, bins, _COUNTED)
        sort_kernel[(chunks,)](
            index, counts, ends, order, tokens, experts, inverse, slots, chunk, chunks, num_experts,
            choices, bins, _COMPARED, max(_READ // bins, 1),
        )  # fmt: skip
    return ends, order, tokens, experts, inverse


# pad depends on the number of tokens.
@triton.jit(do_not_specialize=["pad"])
def expert_sum_kernel(
    rows_ptr, inverse_ptr, weights_ptr, out_ptr, n_cols, pad,
    CHOICES: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * CHOICES
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(inverse_ptr + slot + choice).to(tl.int64)
        # Neither the row of a sentinel nor its weight may have an effect: both may be NaN.
        valid = row != pad
        present = cols < tl.where(valid, n_cols, 0)
        value = tl.load(rows_ptr + row * n_cols + cols, mask=present, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value *= tl.load(weights_ptr + slot + choice, mask=valid, other=0.0).to(tl.float32)
        total += value
    tl.store(out_ptr + slot // CHOICES * n_cols + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


def takes(weights):
    """True if the routing weights have a dtype of the kernel; None is no weights."""
    return weights is None or weights.dtype in _DTYPES


def expert_sum(rows, inverse, weights):
    """(T, N), the dtype of rows: the sum over K of ``weights * rows[inverse]``, rounded once.

    Args:
        rows: (S + 1, N), contiguous; the last row, the pad, has no effect.
        inverse: (T, K) int64.
        weights: (T, K), or None for weights of 1.
    """
    tokens, choices = inverse.shape
    columns = rows.shape[1]
    out = rows.new_empty(tokens, columns)
    block = min(triton.next_power_of_2(max(columns, 16)), _BLOCK)
    grid = tokens, triton.cdiv(columns, block)
    with on_device_of(rows):
        expert_sum_kernel[grid](
            rows, inverse.contiguous(), rows if weights is None else weights.contiguous(), out, columns,
            rows.shape[0] - 1, choices, weights is not None, block,
        )  # fmt: skip
    return out
