# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel: each parameter gets one gradient, when its hooks expect it."""

import contextlib

import models
import pytest
import ranks
import tiny_models
import torch
from torch.nn.parallel import DistributedDataParallel

import liger

LENGTHS = [[9, 5], [6, 11]]


def train(module, batches):
    """(loss, gradients) of this rank's micro-batches, synchronised with the last of them."""
    mine = batches[ranks.RANK]
    # DDP averages over ranks: this makes the average of the ranks' losses the mean over all tokens.
    denominator = models.count([b for of_rank in batches for b in of_rank]) / ranks.WORLD
    loss = 0.0
    module.zero_grad()
    for i, (ids, target) in enumerate(mine):
        with contextlib.nullcontext() if i == len(mine) - 1 else module.no_sync():
            part = module(ids, target, denominator)
            part.backward()
        loss += part.detach()
    return ranks.total(loss) / ranks.WORLD, {n: p.grad for n, p in module.module.named_parameters()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("static_graph", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("mlp", models.MLPS)
def test_matches_one_process(mlp, static_graph, tied):
    """Two micro-batches with no_sync between them, of other lengths on every rank."""
    model = models.make(mlp, tied, ranks.DEVICE)
    batches = models.batches_of_ranks(LENGTHS, ranks.DEVICE)
    reference = models.Reference(model, batches)
    module = DistributedDataParallel(model, static_graph=static_graph)
    # DDP learns a static graph in its first iteration, which therefore cannot be one without synchronisation,
    # and uses it from the second on; a dynamic one gets new buckets after the first.
    single = models.batches_of_ranks([[7], [4]], ranks.DEVICE)
    models.Reference(model, single).check(*train(module, single))
    for _ in range(2):
        reference.check(*train(module, batches))


@pytest.mark.parametrize("mlp", models.MLPS)
def test_gradient_as_bucket_view(mlp):
    """Gradients that live in DDP's buckets, under bfloat16 autocast."""
    model = models.make(mlp, device=ranks.DEVICE)
    batches = models.batches_of_ranks([[8], [8]], ranks.DEVICE)
    reference = models.Reference(model, batches, torch.bfloat16)
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    with torch.autocast(ranks.DEVICE.type, torch.bfloat16):
        reference.check(*train(module, batches))


@pytest.mark.parametrize("bucket_view", [False, True], ids=["", "bucket view"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradient_added_by_the_head(tied, bucket_view):
    """accumulate_grad_weight: the reduction starts after the head, and the lookup of a tied weight, have
    added."""
    model = tiny_models.make("llama", ranks.DEVICE, tie_word_embeddings=tied)
    inputs = tiny_models.batch(ranks.DEVICE, rows=2 * ranks.WORLD)
    count = (inputs["labels"][:, 1:] != -100).sum()
    expected = tiny_models.step(tiny_models.twin(model), **inputs, num_items_in_batch=count)
    liger.patch(model, accumulate_grad_weight=True)
    module = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    mine = {name: value.chunk(ranks.WORLD)[ranks.RANK] for name, value in inputs.items()}
    rows = [{name: value[i : i + 1] for name, value in mine.items()} for i in range(2)]
    for _ in range(3):
        module.zero_grad()
        loss = 0.0
        for i, micro_batch in enumerate(rows):
            with module.no_sync() if i == 0 else contextlib.nullcontext():
                part = module(**micro_batch, num_items_in_batch=count / ranks.WORLD).loss
                part.backward()
            loss += part.detach()
        grads = {name: p.grad for name, p in model.named_parameters()}
        tiny_models.assert_same_step(({"loss": ranks.total(loss) / ranks.WORLD}, grads), expected)
