# SPDX-License-Identifier: BSD-3-Clause
"""Sequence parallelism of a model of transformers: every rank has a part of the tokens.

Queries, keys and values are exchanged before the attention, so that a rank has all tokens of some heads, and
the result back after it (DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509).
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single

NAME = "liger_bench_ulysses"


def exchange(tensor, split, joined):
    """Gives every rank its part of dimension ``split``, and gets the parts of dimension ``joined`` of all
    ranks.

    Args:
        tensor: its size in ``split`` is a multiple of the number of ranks.
    """
    sent = torch.stack(tensor.chunk(dist.get_world_size(), split))
    received = all_to_all_single(torch.empty_like(sent), sent)
    return torch.cat(received.unbind(0), joined)


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """Causal attention of (batch, heads, tokens of a rank, size), as an attention function of
    transformers."""
    ranks = dist.get_world_size()
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % ranks:
        raise ValueError(
            f"ulysses.attention: {heads} heads of queries for {ranks} ranks, expected a multiple"
        )
    # Each rank needs the keys of its queries: of fewer heads of keys than ranks, several ranks have one.
    copies = math.lcm(kv_heads, ranks) // kv_heads
    key, value = (t.repeat_interleave(copies, 1) for t in (key, value)) if copies > 1 else (key, value)
    query, key, value = (exchange(t, 1, 2) for t in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return exchange(out, 2, 1).transpose(1, 2).contiguous(), None


def enable(model):
    """The model with this attention; transformers makes no mask for a function that it does not know."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    return model


def inputs(tokens):
    """The keywords of a call of the model with the tokens of this rank; the mean of the losses of all ranks
    is the loss of all tokens.

    Args:
        tokens: (batch, tokens of the whole sequence), the same on all ranks; as many that the ranks divide
            them.
    """
    ranks, batch, length = dist.get_world_size(), *tokens.shape
    if length % ranks:
        raise ValueError(f"ulysses.inputs: {length} tokens for {ranks} ranks, expected a multiple")
    mine = slice(dist.get_rank() * length // ranks, (dist.get_rank() + 1) * length // ranks)
    labels = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:][:, mine].contiguous()
    positions = torch.arange(length, device=tokens.device)[None, mine]
    return {
        "input_ids": tokens[:, mine],
        "position_ids": positions.expand(batch, -1),
        "labels": labels,
        "shift_labels": labels,
        "num_items_in_batch": batch * (length - 1) / ranks,
    }
