# SPDX-License-Identifier: BSD-3-Clause
"""Bytes per token that the decoder layers of a tiny model save for the backward, counted op by op."""

import copy
import gc

import torch
from live_bytes import LiveBytes
from tiny_models import VOCAB, fill
from transformers import AutoConfig, AutoModelForCausalLM

ROWS, TOKENS = 2, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_TYPE = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    # A window shorter than the sequence needs a mask, with which SDPA copies k and v for every query head.
    "gemma3_text": {"sliding_window": 4096, "num_key_value_heads": 4},
}


def build(model_type, layers=2, dtype=torch.bfloat16, device="cpu", **settings):
    """A model in training mode with the same weights for the same arguments."""
    settings = {**SIZES, **OF_TYPE.get(model_type, {}), "num_hidden_layers": layers, **settings}
    config = AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        fill(model)
    return model.to(device, dtype).train()


def ids(device="cpu", rows=ROWS, tokens=TOKENS):
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(3)).to(device)


def forward(model, given):
    return model(input_ids=given, labels=given, use_cache=False).loss


def step(model, given):
    """(loss, {name: gradient}) of one forward and backward."""
    model.zero_grad()
    loss = forward(model, given)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def saved_per_token(prepare, model_type):
    """Bytes per token that one decoder layer saves: the difference between three and two layers.

    ``prepare(model)`` patches the model.
    """
    alive = []
    for layers in (2, 3):
        model, given = build(model_type, layers), ids()
        model = prepare(model) or model
        with LiveBytes(*model.parameters(), *model.buffers()) as live:
            loss = forward(model, given)
            gc.collect()
            alive.append(live.live)
        del loss
    return (alive[1] - alive[0]) / (ROWS * TOKENS)


def twins(model, *options):
    """Copies of a model, one per set of options of patch."""
    import liger

    return [liger.patch(copy.deepcopy(model), **each) for each in options]


def assert_same_bits(ours, theirs):
    """Two results of :func:`step` are equal, bit for bit."""
    assert torch.equal(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    different = [name for name, grad in theirs[1].items() if not torch.equal(grad, ours[1][name])]
    assert not different
