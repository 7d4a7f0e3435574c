# SPDX-License-Identifier: BSD-3-Clause
"""Tensor parallel over DTensor: sharded projections, and norms and loss on sharded tokens."""

import models
import pytest
import ranks
import tiny_models
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import liger

TOKENS, WHOLE = Shard(1), Replicate()
# The styles of torch take shards of one size.
LENGTH = 4 * ranks.WORLD


def on_whole_tokens():
    """Around a module that takes all tokens and returns the same on every rank: outside of it they are
    sharded."""
    return PrepareModuleInputOutput(
        input_layouts=(TOKENS,),
        desired_input_layouts=(WHOLE,),
        output_layouts=(WHOLE,),
        desired_output_layouts=(TOKENS,),
    )


def parallelize(model):
    """Tokens are sharded between the layers, heads and intermediate features within them."""
    of_block = {
        "input_norm": SequenceParallel(),
        "attention": on_whole_tokens(),
        **{f"attention.{n}_proj": ColwiseParallel() for n in "qkv"},
        "attention.o_proj": RowwiseParallel(),
        "post_norm": SequenceParallel(),
        "mlp": on_whole_tokens(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    plan = {
        "embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=TOKENS),
        **{f"blocks.*.{name}": style for name, style in of_block.items()},
        "norm": SequenceParallel(),
        "head": PrepareModuleInput(
            input_layouts=(TOKENS, WHOLE), desired_input_layouts=(TOKENS, TOKENS), use_local_output=False
        ),
    }
    parallelize_module(model, ranks.mesh(), plan)
    # The head's weight is the same on every rank, and so a DTensor like the hidden states.
    distribute_module(model.head, ranks.mesh())
    return model


@pytest.mark.parametrize("mlp", models.MLPS)
def test_matches_one_process(mlp):
    """The loss of sharded tokens: a rank sees only its part of the hidden states, and never the others'."""
    model = models.make(mlp, device=ranks.DEVICE)
    batches = [[models.batch(LENGTH, 1, ranks.DEVICE), models.batch(2 * LENGTH, 2, ranks.DEVICE)]]
    reference = models.Reference(model, batches)
    model = parallelize(model)
    denominator, total = models.count(batches[0]), 0.0
    for ids, target in batches[0]:
        loss = model(ids, target, denominator)
        assert loss.placements[0].is_partial()
        loss.full_tensor().backward()
        total += loss.detach().full_tensor()
    reference.check(total, {n: ranks.whole(p.grad) for n, p in model.named_parameters()})


@pytest.mark.parametrize("mlp", models.MLPS)
def test_mean_without_a_denominator(mlp):
    """The mean over the tokens of all ranks, of which one rank has fewer that count."""
    model = models.make(mlp, device=ranks.DEVICE)
    ids, target = models.batch(LENGTH, 4, ranks.DEVICE)
    reference = models.Reference(model, [[(ids, target)]])
    model = parallelize(model)
    loss = model(ids, target, None)
    loss.full_tensor().backward()
    reference.check(loss.full_tensor(), {n: ranks.whole(p.grad) for n, p in model.named_parameters()})


def test_patched_llama():
    """A patched Hugging Face model: its norms take sharded tokens, its MLPs and its head sharded features."""
    model = tiny_models.make("llama", ranks.DEVICE)
    inputs = tiny_models.batch(ranks.DEVICE, tokens=LENGTH)
    expected = tiny_models.step(tiny_models.twin(model), **inputs)
    liger.patch(model)
    on_tokens = PrepareModuleInputOutput(
        input_layouts=(WHOLE,),
        desired_input_layouts=(TOKENS,),
        use_local_input=False,
        output_layouts=(TOKENS,),
        desired_output_layouts=(WHOLE,),
    )
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            distribute_module(norm, ranks.mesh())
            parallelize_module(norm, ranks.mesh(), on_tokens)
    plan = {
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=WHOLE),
    }
    parallelize_module(model, ranks.mesh(), plan)
    output, grads = tiny_models.step(model, **inputs)
    grads = {n: ranks.whole(g) for n, g in grads.items()}
    tiny_models.assert_same_step((output, grads), expected)
